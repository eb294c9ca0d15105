"""Several data sets in one, byte for byte as Megatron joins them."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.data_maker import write_data

from megatron_lite.cli.main import main
from megatron_lite.data import indexed_writer
from megatron_lite.data.indexed_writer import merge
from megatron_lite.errors import DataError


def contents(prefix):
    return [Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx")]


@pytest.fixture
def parts(tmp_path):
    """Three data sets; documents that are empty stand at their beginnings and ends, where marks could get lost."""
    return [
        write_data(tmp_path / "a", [[1, 2, 3], [4], []]),
        write_data(tmp_path / "b", [[], [5, 6]]),
        write_data(tmp_path / "c", [[7], [], [8, 9, 10]]),
    ]


@pytest.mark.parametrize("block", [1, 2, 1 << 22])
def test_it_is_as_if_all_had_been_written_to_one(parts, tmp_path, monkeypatch, block):
    monkeypatch.setattr(indexed_writer, "MERGE_BLOCK", block)
    monkeypatch.setattr(indexed_writer, "INDEX_BLOCK", block)
    seen = []
    written = merge(parts, str(tmp_path / "new" / "all"), report=seen.append)
    write_data(tmp_path / "one", [[1, 2, 3], [4], [], [], [5, 6], [7], [], [8, 9, 10]])
    assert contents(tmp_path / "new" / "all") == contents(tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["all.bin", "all.idx"]
    assert tuple(written) == (10, 5, 8) and seen[-1] == 10


@pytest.mark.parametrize("vocab_size", [50_257, 100_000])
def test_same_bytes_as_megatrons_add_index(tmp_path, vocab_size):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    random = np.random.RandomState(3)
    parts = []
    for number in range(3):
        documents = [random.randint(0, vocab_size, random.randint(0, 30)) for _ in range(200)]
        parts.append(write_data(tmp_path / f"part{number}", documents, vocab_size))
    # Documents of several sequences: ours are read from them, though preprocessing never makes them.
    dtype = megatron.DType.optimal_dtype(vocab_size)
    builder = megatron.IndexedDatasetBuilder(f"{tmp_path}/several.bin", dtype=dtype)
    builder.add_document(np.arange(9), [2, 3, 4])
    builder.add_document(np.arange(5), [5])
    builder.finalize(f"{tmp_path}/several.idx")
    parts.insert(1, f"{tmp_path}/several")

    theirs = megatron.IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=dtype)
    for part in parts:
        theirs.add_index(part)
    theirs.finalize(f"{tmp_path}/theirs.idx")
    merge(parts, f"{tmp_path}/ours")
    assert contents(f"{tmp_path}/ours") == contents(f"{tmp_path}/theirs")


def test_the_commands(parts, tmp_path, capsys):
    """A folder is taken as Megatron's tool takes it."""
    folder, out = Path(parts[0]).parent, tmp_path / "out"
    (folder / "README").write_text("not data")
    commands = {"merge --inputs": parts, "preprocess --merge": parts, "merge --input": [str(folder)]}
    for command, inputs in commands.items():
        assert main([*command.split(), *inputs, "--output-prefix", f"{out}/{command}"]) == 0
        assert "8 documents of 3 data sets: 10 tokens in" in capsys.readouterr().out
    assert contents(out / "merge --inputs") == contents(out / "preprocess --merge") == contents(out / "merge --input")


MISTAKES = [
    ("merge --input /no/such", "--input /no/such: cannot be read (No such file or directory); give a fold"),
    ("merge --input EMPTY", "EMPTY: holds no .bin and .idx files; give another folder, or name data sets by --inputs"),
    ("merge --input HALF", "--input HALF/a: no file HALF/a.idx"),
    ("merge --input x --inputs y", "not allowed with argument"),
    ("merge --input x --multimodal", "merge --multimodal: only data sets of text are merged; leave it out"),
    ("merge", "one of the arguments --inputs --input is required"),
    ("preprocess --merge x --append-eod", "preprocess --append-eod: means nothing beside --merge; leave"),
    ("preprocess --merge x --workers=3", "preprocess --workers: means nothing beside --merge; leave it out"),
    ("preprocess --merge x --input z", "argument --input: not allowed with argument --merge"),
    ("preprocess", "one of the arguments --input --merge is required"),
    ("preprocess --merge /no/x", "--merge /no/x: no file /no/x.bin"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("EMPTY", "HALF"):
        (tmp_path / name).mkdir()
    (tmp_path / "HALF" / "a.bin").write_bytes(b"12")
    assert main([*words.split(), "--output-prefix", "out"]) == 2
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1


def refused(parts, output, message):
    before = {path: path.is_file() and path.read_bytes() for path in Path(parts[0]).parent.iterdir()}
    with pytest.raises(DataError, match=rf"^{message}$"):
        merge(parts, str(output))
    assert {path: path.is_file() and path.read_bytes() for path in Path(parts[0]).parent.iterdir()} == before


def test_what_cannot_be_merged_is_one_line_and_changes_nothing(parts, tmp_path):
    out, wide = tmp_path / "all", write_data(tmp_path / "wide", [[1]], 100_000)
    refused([*parts, wide], out, r"--inputs \S+/wide: its tokens are int32, those of \S+/a uint16; preprocess both .*")
    (tmp_path / "link").symlink_to(tmp_path)
    linked = tmp_path / "link" / "b"
    refused(parts, linked, r"--output-prefix \S+/link/b: is one of the data sets to merge; choose .*")
    refused([*parts, f"{tmp_path}/none"], out, r"--inputs \S+/none: no file \S+none\.bin and .*")
    with open(parts[1] + ".idx", "ab") as index:
        index.write(b"\x01")
    refused(parts, out, r"--inputs \S+/b: a multimodal data set, whose modes would be lost; .*")
    Path(parts[2] + ".bin").write_bytes(b"123")
    refused(parts, out, rf"{re.escape(parts[2])}\.bin: 3 bytes, but its \.idx needs 8; .*")
