"""Indices on disk: the same numbers as without, made once, and nothing damaged or foreign is ever used."""

import dataclasses
import fcntl
import json
import multiprocessing
import os
import re
import time

import numpy as np
import pytest
from support.data_maker import contents, write_data
from support.waiting import LIMIT_S, full_disk
from support.wording import wording

from megatron_lite.data import index_cache
from megatron_lite.data.blend_order import BlendedDataset
from megatron_lite.data.gpt_dataset import GPTDataset, sample_recipe
from megatron_lite.data.index_cache import IndexCache, IndexFiles
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DataError
from megatron_lite.shared_files import Lock, try_lock

NAMES = ("document_index", "sample_index", "shuffle_index")
LENGTHS = [7, 1, 20, 2, 2, 9, 30, 11]


@pytest.fixture
def indexed(tmp_path):
    return IndexedDataset(write_data(tmp_path / "corpus", map(range, LENGTHS), 1000))


@pytest.fixture
def heard(monkeypatch):
    """What is logged."""
    lines = []
    monkeypatch.setattr(index_cache.logger, "info", lines.append)
    return lines


@pytest.fixture
def cache(tmp_path, heard):
    return IndexCache(str(tmp_path / "kept"))


def dataset(indexed, cache=None, num_samples=50, split="train"):
    return GPTDataset(indexed, range(1, 8), num_samples, 6, 3, cache=cache, split=split)


def recipe_of(indexed):
    """Of dataset(), and what the cache knows its indices by."""
    recipe = sample_recipe(range(1, 8), sum(LENGTHS[1:]), 50, 6, 3)
    return recipe, recipe.entry(indexed.sequence_lengths, "train")


def assert_same(mine, other):
    for name in NAMES:
        a, b = getattr(mine, name), getattr(other, name)
        assert a.dtype == b.dtype and np.array_equal(a, b), name


def must_not_build(*args):
    raise AssertionError("built although it is in the cache")


@pytest.fixture
def no_building(monkeypatch):
    return lambda: monkeypatch.setattr("megatron_lite.data.gpt_dataset.Recipe.build", must_not_build)


def test_second_time_is_mapped_not_built(indexed, cache, heard, tmp_path, no_building):
    first = dataset(indexed, cache)
    assert_same(first, dataset(indexed))
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    stem = names[0].removesuffix("-description.txt")
    assert stem.endswith("-GPTDataset-train") and len(stem) == 32 + len("-GPTDataset-train")
    assert names == [f"{stem}-{name}" for name in ("description.txt", *(f"{name}.npy" for name in NAMES))]
    no_building()
    second = dataset(indexed, cache)
    mapped = [getattr(second, name) for name in NAMES]
    assert all(isinstance(index, np.memmap) and not index.flags.writeable for index in mapped)
    assert_same(first, second)
    assert [second[i].tolist() for i in range(len(second))] == [first[i].tolist() for i in range(len(first))]
    assert heard == []


def test_blend_is_kept_too(cache, monkeypatch, tmp_path):
    parts = [range(100), range(100), range(100)]
    for weights, size in (([3, 1, 2], 90), ([100, 100, 100], 300)):
        plain, first = BlendedDataset(parts, weights, size), BlendedDataset(parts, weights, size, cache, "valid")
        with monkeypatch.context() as patch:
            patch.setattr("megatron_lite.data.blend_order.mix", must_not_build)
            second = BlendedDataset(parts, weights, size, cache, "valid")
        for mixed in (first, second):
            assert isinstance(mixed.dataset_index, np.memmap)
            assert mixed.dataset_index.tolist() == plain.dataset_index.tolist()
            assert mixed.dataset_sample_index.tolist() == plain.dataset_sample_index.tolist()
    assert len(list((tmp_path / "kept").glob("*-BlendedDataset-valid-*"))) == 6


def test_whatever_changes_an_index_changes_the_name():
    random = np.random.default_rng(5)
    by_name = {}
    for _ in range(1500):
        lengths = random.integers(1, 5, size=4).astype(np.int32)
        first = int(random.integers(2))
        sequences = range(first, int(random.integers(first + 1, 5)))
        tokens = int(lengths[sequences.start : sequences.stop].sum())
        wanted = [None, *random.integers(1, 12, size=6).tolist()][random.integers(7)]
        if wanted is None and tokens < 4:
            continue
        seq_length, seed = int(random.integers(1, 4)), int(random.integers(3))
        recipe = sample_recipe(sequences, tokens, wanted, seq_length, seed)
        made = {name: index.tolist() for name, index in recipe.build(lengths).items()}
        assert by_name.setdefault(recipe.entry(lengths, "train").name, made) == made
    assert len(by_name) > 500


def test_name_knows_format_kind_and_split_and_not_the_tokens(indexed, cache, monkeypatch, tmp_path, no_building):
    entry = recipe_of(indexed)[1]
    names = {dataclasses.replace(entry, **change).name for change in ({}, {"kind": "Other"}, {"split": "test"})}
    with monkeypatch.context() as patch:
        patch.setattr(index_cache, "CACHE_FORMAT", "another")
        assert len(names | {entry.name}) == 4
    dataset(indexed, cache)
    elsewhere = write_data(tmp_path / "elsewhere", ([7] * length for length in LENGTHS), 1000)
    no_building()
    assert set(dataset(IndexedDataset(elsewhere), cache)[0].tolist()) == {7}


def test_small_indices_leave_no_file_beside_the_data_and_large_ones_do(indexed, monkeypatch, tmp_path, heard):
    before, plain = contents(tmp_path), dataset(indexed)
    cache = IndexCache(None)
    dataset(indexed, cache)
    assert contents(tmp_path) == before
    monkeypatch.setattr(index_cache, "LARGE_INDEX_ENTRIES", 20)
    (tmp_path / "corpus").write_text("in the way")  # no mistake: they stay in memory
    assert_same(dataset(indexed, cache), plain)
    said = heard.pop()
    assert said.startswith("  indices of ") and said.endswith(wording("data/gptdataset-indices-cannot-be"))
    (tmp_path / "corpus").unlink()
    assert isinstance(dataset(indexed, cache).shuffle_index, np.memmap)
    assert len(list((tmp_path / "corpus" / "cache" / "GPTDataset_indices").iterdir())) == 4
    assert cache.folder_for("BlendedDataset", None, 10**12) is None
    assert heard == []


def test_read_only_cache_that_has_everything_serves(indexed, cache, monkeypatch):
    dataset(indexed, cache)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.makedirs", refuse)
    assert isinstance(dataset(indexed, cache).sample_index, np.memmap)
    with pytest.raises(DataError, match=r"^--data-cache-path \S+: cannot be written \(Permission denied\); .*$"):
        dataset(indexed, cache, num_samples=400)


def test_full_disk_leaves_nothing_behind(indexed, cache, tmp_path, heard, monkeypatch):
    plain = dataset(indexed)
    with full_disk(200):
        with pytest.raises(DataError, match=r"^--data-cache-path \S+: cannot be written \(File too large\); .*$"):
            dataset(indexed, cache)
        monkeypatch.setattr(index_cache, "LARGE_INDEX_ENTRIES", 20)
        assert_same(dataset(indexed, IndexCache(None)), plain)
    assert len(heard) == 1 and contents(tmp_path / "kept") == {}
    assert contents(tmp_path / "corpus/cache/GPTDataset_indices") == {}


def entry_files(indexed, cache, tmp_path):
    dataset(indexed, cache)
    paths = sorted((tmp_path / "kept").iterdir())
    return {next((name for name in NAMES if name in path.name), "description"): path for path in paths}


def rewrite(path, raw):
    """Replaces the file, None: removes it; as a write in place would not, this leaves arrays that are mapped alone."""
    path.unlink()
    if raw is not None:
        path.write_bytes(raw)


def flipped(raw, place):
    return raw[:place] + bytes([raw[place] ^ 1 << place % 8]) + raw[place + 1 :]


def described(change):
    def changed(raw):
        description = json.loads(raw)
        change(description)
        return json.dumps(description).encode()

    return changed


SIZE = "has .* bytes, which are not as many as were written"
DAMAGE = [
    ("sample_index", lambda raw: raw[:-1], SIZE),
    ("shuffle_index", lambda raw: raw + b"\0", SIZE),
    ("document_index", lambda raw: b"", "cannot be read"),
    ("document_index", lambda raw: None, "cannot be read"),
    ("sample_index", lambda raw: os.urandom(len(raw)), "has changed since it was written"),
    ("description", described(lambda d: d.update(format="1.0")), "describes something else"),
    ("description", described(lambda d: d["files"].pop("sample_index")), "lists other files"),
    ("description", lambda raw: b"[]", "lists other files"),
    ("description", described(lambda d: d["files"].update(sample_index=3)), SIZE),
    ("description", lambda raw: raw[: len(raw) // 2], "cannot be read"),
    ("description", lambda raw: b"\xff" + raw, "cannot be read"),
    *((name, os.mkfifo, ".*Not a regular file") for name in ("description", *NAMES)),
]


def test_damage_is_said_and_mended(indexed, cache, tmp_path, heard):
    files = entry_files(indexed, cache, tmp_path)
    sound, plain = contents(tmp_path / "kept"), dataset(indexed)
    for which, change, message in DAMAGE:
        raw = files[which].read_bytes()
        rewrite(files[which], None if change is os.mkfifo else change(raw))
        if change is os.mkfifo:
            os.mkfifo(files[which])
        assert_same(dataset(indexed, cache), plain)
        [said] = heard
        assert re.search(rf"^  index cache \S+: \S+ {message}.*; built again$", said)
        heard.clear()
        assert contents(tmp_path / "kept") == sound


def test_arrays_of_another_shape_are_refused_though_their_checksums_are_right(indexed, cache, tmp_path, heard):
    """As if our own code had written too few: the description cannot vouch for that."""
    recipe, entry = recipe_of(indexed)
    good = recipe.build(indexed.sequence_lengths)
    wrongs = {
        "shuffle_index": good["shuffle_index"][:-1],
        "document_index": good["document_index"].astype(np.int64),
        "sample_index": np.asfortranarray(good["sample_index"]),
    }
    (tmp_path / "kept").mkdir()
    for name, wrong in wrongs.items():
        IndexFiles(str(tmp_path / "kept"), entry).write({**good, name: wrong})
        assert_same(dataset(indexed, cache), dataset(indexed))
        assert f"-{name}.npy is " in heard.pop() and heard == []


def open_if_sound(entry: IndexFiles) -> dict[str, np.ndarray] | None:
    try:
        return entry.open()
    except index_cache.Damaged:
        return None


def test_no_flipped_bit_gets_through(indexed, cache, tmp_path):
    files = entry_files(indexed, cache, tmp_path)
    entry = IndexFiles(str(tmp_path / "kept"), recipe_of(indexed)[1])
    expected, harmless = entry.open(), 0
    for which, path in files.items():
        raw = path.read_bytes()
        for place in range(0, len(raw), 13):
            rewrite(path, flipped(raw, place))
            opened = open_if_sound(entry)
            if opened is not None:
                # White space of the description, at most.
                assert which == "description" and all(np.array_equal(opened[name], expected[name]) for name in NAMES)
                harmless += 1
            rewrite(path, raw)
    assert harmless < 20


def test_of_a_huge_entry_blocks_all_over_are_checked_and_reading_meets_most_of_the_rest(
    indexed, cache, tmp_path, monkeypatch, heard
):
    """What no one can meet then is a flip that turns an index into another one that is as good."""
    monkeypatch.setattr(index_cache, "CHECKSUM_BYTES", 16)
    monkeypatch.setattr(index_cache, "MAX_CHECKED_BLOCKS", 8)
    files, folder = entry_files(indexed, cache, tmp_path), tmp_path / "kept"
    met = {"at the start": 0, "while reading": 0, "another order": 0}
    for name in NAMES:
        sound = files[name].read_bytes()
        for place in range(128, len(sound), 5):
            rewrite(files[name], flipped(sound, place))
            heard.clear()
            damaged = dataset(indexed, IndexCache(str(folder)))
            try:
                assert heard or all(damaged[i].min() >= 0 for i in range(len(damaged)))
                met["at the start" if heard else "another order"] += 1
            except DataError as error:
                assert str(error).endswith(wording("data/do-not-fit-data", folder)) and "\n" not in str(error)
                met["while reading"] += 1
            rewrite(files[name], sound)
    assert met["at the start"] > 10 and met["while reading"] > 60 > met["another order"]


def test_what_a_killed_writer_left_is_removed_and_half_an_entry_is_none(indexed, cache, tmp_path, monkeypatch, heard):
    def die_while_writing():
        monkeypatch.setattr("os.replace", lambda *args: os._exit(9))
        dataset(indexed, cache)

    child = multiprocessing.get_context("fork").Process(target=die_while_writing)
    child.start()
    child.join(20)
    assert child.exitcode == 9
    assert any(name.endswith(".tmp") for name in contents(tmp_path / "kept"))
    assert_same(dataset(indexed, cache), dataset(indexed))
    files = entry_files(indexed, cache, tmp_path)
    rewrite(files["description"], None)
    assert_same(dataset(indexed, cache), dataset(indexed))
    assert heard == [] and files["description"].exists()
    assert not any(name.startswith(".") or name.endswith(".lock") for name in contents(tmp_path / "kept"))


def test_eight_ranks_at_once_build_once(indexed, cache, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(8), context.Queue()
    ranks = [context.Process(target=_one_rank, args=(indexed, cache, barrier, results, tmp_path)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    answers = [results.get(timeout=LIMIT_S) for _ in ranks]
    for rank in ranks:
        rank.join(LIMIT_S)
    assert [rank.exitcode for rank in ranks] == [0] * 8
    assert len(set(answers)) == 1
    assert (tmp_path / "built").read_text() == "x"
    assert not any(name.endswith(".lock") for name in contents(tmp_path / "kept"))


def _one_rank(indexed, cache, barrier, results, folder):
    recipe = sample_recipe(range(8), 82, 50, 6, 3)

    def build():
        with open(folder / "built", "a") as file:
            file.write("x")
        time.sleep(0.3)
        return recipe.build(indexed.sequence_lengths)

    barrier.wait(LIMIT_S)
    arrays = cache.get(str(folder / "kept"), recipe.entry(indexed.sequence_lengths, "train"), build)
    mapped = all(isinstance(array, np.memmap) for array in arrays.values())
    results.put((mapped, *(array.tobytes() for array in arrays.values())))


@pytest.mark.parametrize("error", [OSError(37, "No locks available"), OSError(95, "Operation not supported")])
def test_a_file_system_without_locks(indexed, cache, monkeypatch, tmp_path, error):
    def refuse(*args):
        raise error

    monkeypatch.setattr("fcntl.flock", refuse)
    assert isinstance(dataset(indexed, cache).sample_index, np.memmap)
    assert_same(dataset(indexed, cache), dataset(indexed))
    assert len(contents(tmp_path / "kept")) == 4


def test_a_builder_that_hangs_is_not_waited_for_for_ever(indexed, cache, monkeypatch, tmp_path, heard):
    monkeypatch.setattr(index_cache, "MAX_BUILD_WAIT_S", 0.25)
    _, entry = recipe_of(indexed)
    (tmp_path / "kept").mkdir()
    with open(tmp_path / "kept" / f"{entry.name}.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert_same(dataset(indexed, cache), dataset(indexed))
    assert len(heard) == 1 and heard[0].endswith(wording("data/another-process-has-been"))


@pytest.mark.parametrize("taken_again", [True, False])
def test_a_lock_file_that_its_holder_removes_is_no_lock(tmp_path, monkeypatch, taken_again):
    path, flock = tmp_path / "lock", fcntl.flock

    def removed_first(file, kind):
        path.unlink()
        if taken_again:
            path.touch()
        flock(file, kind)

    monkeypatch.setattr("fcntl.flock", removed_first)
    with try_lock(path) as lock:
        assert lock is Lock.BUSY
    assert path.exists() == taken_again
