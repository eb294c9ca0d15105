"""Files, indices and samples against Megatron's own, bit for bit. Skipped where megatron-core is not installed."""

import warnings
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_lite.config.args import DataArgs
from megatron_lite.data.blend_order import BlendedDataset
from megatron_lite.data.build import DataSpec, build_datasets, parse_blend
from megatron_lite.data.gpt_dataset import GPTDataset
from megatron_lite.data.index_cache import IndexCache
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.indexed_writer import IndexedWriter

VOCAB = 100


@pytest.fixture(scope="module")
def megatron():
    """The parts of megatron-core that are compared with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        datasets = "megatron.core.datasets."
        modules = [
            pytest.importorskip(datasets + name, exc_type=ImportError)
            for name in ("helpers", "indexed_dataset", "gpt_dataset", "blended_megatron_dataset_builder", "utils")
        ]
    names = ("helpers", "indexed", "gpt", "builder", "utils")
    return SimpleNamespace(**dict(zip(names, modules)))


@pytest.fixture
def corpora(tmp_path):
    random = np.random.default_rng(11)
    prefixes = []
    for number in range(3):
        prefixes.append(str(tmp_path / f"corpus{number}"))
        with IndexedWriter(prefixes[-1], VOCAB) as writer:
            for length in random.integers(1, 40, size=60 + 20 * number):
                writer.add_document(random.integers(VOCAB, size=length))
    return prefixes


class FakeTokenizer:
    eod, pad, vocab_size = 0, -1, VOCAB

    @property
    def unique_identifiers(self):
        return {"class": "FakeTokenizer"}


def config(megatron, seq_length, seed, **blend):
    off = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"), False)
    given = {"random_seed": seed, "sequence_length": seq_length, "tokenizer": FakeTokenizer()}
    return megatron.gpt.GPTDatasetConfig(**given, **off, **blend)


def assert_same_samples(ours, theirs):
    assert len(ours) == len(theirs)
    for i, raw in enumerate(ours[i] for i in range(len(ours))):
        assert np.array_equal(raw[:-1], theirs[i]["tokens"].numpy())
        assert np.array_equal(raw[1:], theirs[i]["labels"].numpy())


def test_file_is_read_alike(megatron, corpora):
    ours, theirs = IndexedDataset(corpora[0]), megatron.indexed.IndexedDataset(corpora[0])
    assert np.array_equal(ours.sequence_lengths, theirs.sequence_lengths)
    assert np.array_equal(ours.document_marks, theirs.document_indices)
    assert all(np.array_equal(ours.tokens(i), theirs[i]) for i in range(len(ours)))


def test_file_is_written_alike(megatron, tmp_path):
    documents = [[1, 2, 3], [99], list(range(50))]
    builder = megatron.indexed.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    with IndexedWriter(str(tmp_path / "ours"), VOCAB) as writer:
        for document in documents:
            writer.add_document(document)
            builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"ours{ending}").read_bytes() == (tmp_path / f"theirs{ending}").read_bytes()


@pytest.fixture
def both(megatron, corpora, tmp_path):
    """The same data set by us and by Megatron, which writes its indices to tmp_path/cache."""
    low = megatron.indexed.IndexedDataset(corpora[0])

    def build(sequences, num_samples, seq_length, seed, cache=None):
        given = {"blend": ([corpora[0]], None), "split": "1,0,0", "path_to_cache": str(tmp_path / "cache")}
        settings = config(megatron, seq_length, seed, **given)
        numbers = np.arange(sequences.start, sequences.stop, dtype=np.int32)
        split = megatron.utils.Split.valid
        theirs = megatron.gpt.GPTDataset(low, corpora[0], numbers, num_samples, split, settings)
        given = (sequences, num_samples, seq_length, seed, cache)
        return GPTDataset(IndexedDataset(corpora[0]), *given, split="valid"), theirs

    return build


def assert_same_indices(ours, theirs):
    for name in ("document_index", "sample_index", "shuffle_index"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert mine.dtype == other.dtype
        assert np.array_equal(mine, other), name


@pytest.mark.parametrize("block", [1, 7, 1 << 16])
def test_indices(both, block, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_lite.data.gpt_dataset.BLOCK_SEQUENCES", block)
    kinds = set()
    for seed in range(120):
        random = np.random.default_rng(seed)
        seq_length = int(random.integers(2, 60))
        num_samples = None if seed % 6 == 5 else int(random.integers(1, random.choice([30, 80, 400])))
        sequences = range(int(random.integers(20)), int(random.integers(40, 61)))
        ours, theirs = both(sequences, num_samples, seq_length, seed)
        assert_same_indices(ours, theirs)
        epochs = len(ours.document_index) // len(sequences)
        first_epochs = ours.document_index[: (epochs - 1) * len(sequences)]
        apart = epochs > 1 and set(np.unique(first_epochs, return_counts=True)[1].tolist()) == {epochs - 1}
        kinds.add((min(epochs, 3), apart))
    assert kinds == {kind for kind in product((1, 2, 3), (False, True)) if kind != (1, True)}


def test_one_folder_for_both_caches(both, tmp_path):
    """Neither takes the other's files for its own."""
    cache = IndexCache(str(tmp_path / "cache"))
    names = []
    for _ in range(2):
        ours, theirs = both(range(60), None, 7, 1, cache)
        assert_same_indices(ours, theirs)
        names.append(sorted(path.name for path in (tmp_path / "cache").iterdir()))
    assert names[0] == names[1] and len(names[0]) == 8
    assert {name.split("-", 1)[1] for name in names[0]} == {
        f"GPTDataset-valid-{ending}"
        for ending in ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
    }


@pytest.mark.parametrize("size", [3000, 40_000])
@pytest.mark.parametrize("weights", [[0.7, 0.3], [1 / 3, 1 / 3, 1 / 3], [5.0, 1.0, 2.5], [1.0, 1e-4, 0.3], [0.1] * 10])
def test_blend_indices(megatron, weights, size):
    shares = (np.array(weights) / np.sum(weights)).tolist()
    datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
    megatron.helpers.build_blending_indices(datasets, samples, shares, len(shares), size, False)
    ours = BlendedDataset([range(size)] * len(shares), weights, size)
    assert np.array_equal(ours.dataset_index, datasets)
    assert np.array_equal(ours.dataset_sample_index, samples)


@pytest.mark.parametrize("form", ["one", "weights", "one-weight", "lengths"])
def test_shares_of_all_data(megatron, corpora, form):
    first, second, third = corpora
    words = {"one": [first], "weights": ["3", first, "1", second], "one-weight": ["2", third], "lengths": corpora}[form]
    assert_build_alike(megatron, {"data_path": tuple(words)}, {"blend": parse_blend(words, ""), "split": "80,15,5"})


def test_own_data_for_each_split(megatron, corpora):
    paths = (("1", corpora[0], "2", corpora[1]), (corpora[2],), (corpora[0], corpora[1], corpora[2]))
    ours = dict(zip(("train_data_path", "valid_data_path", "test_data_path"), paths))
    assert_build_alike(megatron, ours, {"blend_per_split": [parse_blend(words, "") for words in paths]})


def assert_build_alike(megatron, our_paths, their_paths):
    sizes, seq_length, seed = (70, 12, 9), 16, 1234
    ours = build_datasets(DataSpec(DataArgs(split="80,15,5", **our_paths), sizes, seq_length, seed, VOCAB))
    builder = megatron.builder.BlendedMegatronDatasetBuilder(
        megatron.gpt.GPTDataset, sizes, lambda: True, config(megatron, seq_length, seed, **their_paths)
    )
    for mine, other in zip((ours.train, ours.valid, ours.test), builder.build()):
        assert_same_samples(mine, other)
