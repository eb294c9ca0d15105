"""What is said of a data set, and that nothing wrong with it goes unseen."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from support.data_maker import write_data
from support.wording import wording

from megatron_lite.cli.main import main
from megatron_lite.data import dataset_check as module
from megatron_lite.data.dataset_check import inspect
from megatron_lite.data.indexed import HEADER, MAGIC
from megatron_lite.errors import DataError

EOD = 9
DOCUMENTS = [[1, 2, EOD], [], [4, EOD], [1, 2, EOD], [5, EOD, 6, 7, EOD], [4, EOD], [1, 2, EOD], [8], [4, 0]]


@pytest.fixture
def prefix(tmp_path):
    return write_data(tmp_path / "x", DOCUMENTS, 10)


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_counts_are_those_of_the_plain_way(prefix, monkeypatch, block):
    monkeypatch.setattr(module, "BLOCK_TOKENS", block)
    monkeypatch.setattr(module, "BLOCK_DOCUMENTS", block)
    found = inspect(prefix, vocab_size=10)
    lengths = [len(document) for document in DOCUMENTS]
    full = [document for document in DOCUMENTS if document]
    assert (found.documents, found.sequences, found.tokens) == (9, 8, sum(lengths))
    assert (found.shortest, found.median, found.mean, found.longest) == (0, np.median(lengths), np.mean(lengths), 5)
    assert (found.empty, found.duplicates) == (1, len(full) - len(set(map(tuple, full))))
    first, second = found.duplicate_pair
    assert first < second and DOCUMENTS[first] == DOCUMENTS[second]
    assert (found.smallest_id, found.largest_id, found.samples[0]) == (0, 9, (1, 2, EOD))
    assert (found.end_id, found.ending_so, found.end_id_inside) == (EOD, 6, 1)
    assert found.file_bytes == sum(Path(prefix + ending).stat().st_size for ending in (".bin", ".idx"))


def index_of(path, lengths, marks):
    """An .idx of uint16 tokens."""
    lengths = np.asarray(lengths, "<i4")
    starts = 2 * (np.cumsum(lengths, dtype="<i8") - lengths)
    header = HEADER.pack(MAGIC, 1, 8, len(lengths), len(marks) + 1)
    tables = (lengths, starts, np.asarray([0, *marks], "<i8"))
    Path(path).write_bytes(header + b"".join(table.tobytes() for table in tables))


def test_other_ends_several_sequences_and_no_duplicates(prefix, tmp_path):
    found = inspect(prefix, eod=2)
    assert (found.end_id, found.ending_so, found.end_id_inside) == (2, 0, 3)
    found = inspect(write_data(tmp_path / "y", [[1, 2], [1], [2], [2, 1], [], []], 10))
    assert (found.duplicates, found.duplicate_pair) == (0, None)
    index_of(prefix + ".idx", [3, 2, 3, 5, 2, 3, 1, 2], [2, 2, 8])  # documents are measured as a whole
    found = inspect(prefix)
    assert (found.documents, found.sequences, found.empty, found.shortest, found.longest) == (3, 8, 1, 0, 16)


@pytest.mark.parametrize("block", [1, 4, 1 << 20])
def test_an_id_outside_the_vocabulary_is_found_wherever_it_stands(prefix, monkeypatch, block):
    monkeypatch.setattr(module, "BLOCK_TOKENS", block)
    for position, document in ((0, 0), (3, 2), (12, 4), (20, 8)):
        tokens = np.concatenate([np.array(document, "<u2") for document in DOCUMENTS])
        tokens[position] = 10
        Path(prefix + ".bin").write_bytes(tokens.tobytes())
        message = (
            rf"^{prefix}\.bin: token {position} \(document {document}\) is the id 10, outside the vocabulary of 10; "
            "give the tokenizer that it was made with, or preprocess the text again$"
        )
        with pytest.raises(DataError, match=message):
            inspect(prefix, vocab_size=10)
        assert inspect(prefix, vocab_size=11).largest_id == 10


@pytest.mark.parametrize("vocab_size", [None, 100_000])
def test_a_negative_id_is_damage_with_or_without_a_vocabulary(tmp_path, vocab_size):
    prefix = write_data(tmp_path / "wide", [[1, 2, 3]], 100_000)
    Path(prefix + ".bin").write_bytes(np.array([1, -2, 3], "<i4").tobytes())
    with pytest.raises(DataError, match=r"^\S+wide\.bin: token 1 \(document 0\) is the id -2; copy the file again .*$"):
        inspect(prefix, vocab_size)


@pytest.mark.slow
def test_many_documents_take_little_memory(tmp_path):
    count = 400_000
    tokens = np.random.RandomState(1).randint(0, 50_000, 20 * count).astype("<u2")
    tokens[-20:] = tokens[:20]
    tokens.tofile(tmp_path / "big.bin")
    index_of(tmp_path / "big.idx", np.full(count, 20), np.arange(1, count + 1))
    tracemalloc.start()
    found = inspect(str(tmp_path / "big"), 50_000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (found.duplicates, found.duplicate_pair) == (1, (0, count - 1))
    assert peak_bytes < 60 * count + (8 << 20)


def test_the_command_shows_what_it_found(prefix, capsys):
    assert main(["inspect", prefix, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]) == 0
    shown = capsys.readouterr().out
    told = (
        "x: sound|9 (8 sequences)|21 as uint16|0 to 9, all below the vocabulary of 10|0 to 5 tokens, median 2.0, mean 2.3; "
        "1 empty|3 documents (33.3%) equal an earlier one|6 of 8 documents end with 9, and it occurs 1 time elsewhere|"
        "begins             '1 2 9'"
    )
    assert [words for words in told.split("|") if words not in shown] == []


def test_a_sample_cannot_command_the_terminal(tmp_path, capsys):
    prefix = write_data(tmp_path / "y", [[*b"\x1b[2Jred\n", 256]], 257)
    assert main(["inspect", prefix, "--tokenizer-type", "ByteTokenizer"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and r"'\x1b[2Jred\n<|endoftext|>'" in shown
    assert main(["inspect", prefix]) == 0
    assert "begins" not in capsys.readouterr().out


def test_damaged_ones_are_named_and_the_others_shown(prefix, tmp_path, capsys):
    cut, turned = (write_data(tmp_path / name, DOCUMENTS, 10) for name in ("cut", "turned"))
    Path(cut + ".bin").write_bytes(b"odd")
    with open(turned + ".idx", "r+b") as index:
        index.seek(HEADER.size + 12 * 8 + 8)
        index.write(struct.pack("<q", 7))
    assert main(["inspect", cut, prefix, turned, f"{tmp_path}/none", "--vocab-size", "10"]) == 2
    output = capsys.readouterr()
    assert output.out.count(": sound") == 1
    lines = output.err.splitlines()
    named = [f"{cut}.bin", f"{turned}.idx", f"megatron-lite inspect {tmp_path}/none"]
    assert [line.split(": ")[1] for line in lines] == named
    assert wording("data/document-marks-go-backwards") in lines[1]


def test_a_mistake_is_one_line_and_exit_code_2(prefix, capsys):
    for argv, said in (
        ("--vocab-size 0", "--vocab-size 0: must be 1 or more; give the number of ids"),
        ("--vocab-size 9", "is the id 9, outside the vocabulary of 9"),
        ("--vocab-file none.json", "--vocab-file none.json: cannot be read"),
        ("--tokenizer-type NoTokenizer", "--tokenizer-type NoTokenizer: not available"),
    ):
        assert main(["inspect", prefix, *argv.split()]) == 2
        message = capsys.readouterr().err
        assert said in message and message.count("\n") == 1
