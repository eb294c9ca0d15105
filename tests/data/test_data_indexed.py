"""The .bin/.idx pair: its bytes, and what is said of one that is missing or damaged.

Patterns that run from ^ to $ without a line break also hold that a message is one line.
"""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from support.data_maker import write_data
from support.waiting import full_disk

from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.indexed_writer import IndexedWriter
from megatron_lite.errors import DataError

DOCUMENTS = [[1, 2, 3], [], [40_000, 5]]

# Written by hand from the table of the format: two sequences, three documents, the second one empty.
GOLDEN_BIN = bytes.fromhex("0100 0200 0300 409c 0500")
GOLDEN_IDX = b"".join(
    [
        b"MMIDIDX\x00\x00",
        bytes.fromhex("0100000000000000 08 0200000000000000 0400000000000000"),
        bytes.fromhex("03000000 02000000"),
        bytes.fromhex("0000000000000000 0600000000000000"),
        bytes.fromhex("0000000000000000 0100000000000000 0100000000000000 0200000000000000"),
    ]
)


@pytest.fixture
def prefix(tmp_path):
    return write_data(tmp_path / "corpus", DOCUMENTS)


def test_bytes_are_the_format_and_read_back_as_what_was_written(prefix):
    assert Path(prefix + ".bin").read_bytes() == GOLDEN_BIN
    assert Path(prefix + ".idx").read_bytes() == GOLDEN_IDX
    indexed = IndexedDataset(prefix)
    assert [indexed.tokens(i).tolist() for i in range(len(indexed))] == [d for d in DOCUMENTS if d]
    assert indexed.document_marks.tolist() == [0, 1, 1, 2]
    assert indexed.tokens(0, offset=1).tolist() == [2, 3]
    assert indexed.tokens(0, offset=1, length=1).tolist() == [2]
    assert not indexed.tokens(0).flags.writeable
    for offset, length in ((0, 4), (2, 2), (-1, 1), (4, None)):  # never into the next sequence
        with pytest.raises(IndexError):
            indexed.tokens(0, offset, length)
    with open(prefix + ".idx", "ab") as index:
        index.write(b"\x00\x01")  # a multimodal file is read without its modes
    assert len(IndexedDataset(prefix)) == 2


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32)])
def test_token_type_follows_the_vocabulary(tmp_path, vocab_size, dtype):
    indexed = IndexedDataset(write_data(tmp_path / "x", [[vocab_size - 1]], vocab_size))
    assert indexed.dtype == dtype
    assert indexed.tokens(0).tolist() == [vocab_size - 1]


def test_pickling_opens_the_files_again(tmp_path):
    pickled = pickle.dumps(IndexedDataset(write_data(tmp_path / "x", [np.arange(50_000)])))
    assert len(pickled) < 1000
    assert pickle.loads(pickled).tokens(0, 49_999).tolist() == [49_999]


def test_extreme_token_ids_see_all_of_a_small_file_and_every_region_of_a_large_one(tmp_path):
    ids = np.zeros(100_000, np.int64)
    ids[77_777] = 9
    assert IndexedDataset(write_data(tmp_path / "small", [ids])).extreme_token_ids() == (0, 9)
    ids[60_000:70_000] = 8
    smallest, largest = IndexedDataset(write_data(tmp_path / "large", [ids])).extreme_token_ids(sample=10_000)
    assert smallest == 0 and largest >= 8


REFUSED = {
    "uint16": ([1, 70_000], 50_257, "token id 70000 in document 2 is outside the vocabulary of 50,257; .*--vocab-size"),
    "negative": ([-1], 50_257, "token id -1 in document 2 .*"),
    "vocabulary": ([300], 300, "token id 300 .* of 300; .*"),
    "float": ([1.5], 300, "token ids of type float64 are no integers; .*"),
    "long": (np.broadcast_to(np.uint8(1), 2**31), 300, "document 2 has 2,147,483,648 tokens, .*; cut it into several"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_document_leaves_no_file(tmp_path, kind):
    document, vocab_size, message = REFUSED[kind]
    with pytest.raises(DataError, match=rf"^\S+: {message}$"):
        write_data(tmp_path / "x", [[1], document], vocab_size)
    with pytest.raises(DataError, match=r"^\S+: not a single token to write; .*$"):
        write_data(tmp_path / "x", [[]])
    assert list(tmp_path.iterdir()) == []


def test_failure_keeps_the_files_of_an_earlier_run(prefix, monkeypatch):
    with pytest.raises(ZeroDivisionError), IndexedWriter(prefix, 50_257) as writer:
        writer.add_document([7])
        writer.add_document([1 // 0])
    assert Path(prefix + ".bin").read_bytes() == GOLDEN_BIN
    assert len(list(Path(prefix).parent.iterdir())) == 2
    with pytest.raises(DataError, match=r"^\S+: cannot be written \(.*\); .*$"):
        write_data(prefix + ".bin/x", [[1]])

    def replace(source, target):
        if target.endswith(".idx"):
            raise OSError(5, "Input/output error")
        Path(source).rename(target)

    # dying between the renames leaves no index beside a foreign .bin
    monkeypatch.setattr("os.replace", replace)
    with pytest.raises(DataError, match=r"^\S+: cannot be written \(Input/output error\); .*$"):
        write_data(prefix, [[7]])
    assert not Path(prefix + ".idx").exists()


@pytest.mark.parametrize("num_tokens", [100, 100_000], ids=["at-closing", "while-writing"])
def test_full_disk_is_one_line_and_leaves_no_file(tmp_path, num_tokens):
    message = r"^\S+: cannot be written \(File too large\); free some space .*$"
    with full_disk(64), pytest.raises(DataError, match=message):
        write_data(tmp_path / "x", [np.ones(num_tokens, int)])
    assert list(tmp_path.iterdir()) == []


MISSING = {  # what is opened, which file is removed before: what is said
    "both": ("none", None, r"no file \S+none\.bin and no file \S+none\.idx; give the path .*"),
    ".bin": ("corpus.bin", None, r".*; leave the ending off: \S+/corpus"),
    ".idx": ("corpus.idx", None, r".*; leave the ending off: \S+/corpus"),
    "half": ("corpus", "corpus.bin", r"no file \S+\.bin; the two files belong together.*"),
    "stem": ("text", None, r".*; did you mean \S+text_text_document\?"),
}


@pytest.mark.parametrize("kind", MISSING)
def test_missing_files_are_named_with_the_flag(prefix, tmp_path, kind):
    name, removed, message = MISSING[kind]
    write_data(tmp_path / "text_text_document", DOCUMENTS)
    if removed:
        (tmp_path / removed).unlink()
    for flag in ("--data-path", "--valid-data-path"):
        with pytest.raises(DataError, match=rf"^{flag} \S+/{name}: {message}$"):
            IndexedDataset(str(tmp_path / name), flag)


def test_unreadable_file(prefix, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=r"^\S+\.idx: cannot be read \(Permission denied\); check its permissions$"):
        IndexedDataset(prefix)


def patched(at, form, *values):
    """GOLDEN_IDX with other values at one place."""
    raw = bytearray(GOLDEN_IDX)
    struct.pack_into(form, raw, at, *values)
    return bytes(raw)


DAMAGED = [  # .idx, and what is said of it
    (b"", "0 bytes is too short"),
    (GOLDEN_IDX[:20], "20 bytes is too short"),
    (b"PK" + GOLDEN_IDX[2:], "starts with b'PKIDIDX.*not an indexed data set"),
    (patched(9, "<Q", 2), "version 2 is unknown"),
    (patched(17, "B", 9), "token type code 9 is unknown"),
    (patched(17, "B", 7), "token type float32 holds no token ids"),
    (patched(18, "<Q", 2**63), "bytes, but its 9,223,372,036,854,775,808 sequences"),
    (GOLDEN_IDX[:-1], "89 bytes, but its 2 sequences and 4 document marks need 90"),
    (GOLDEN_IDX + b"12345", "95 bytes, but"),
    (GOLDEN_IDX[:18] + bytes(16), "document marks run from nothing"),
    (patched(58, "<q", 1), "document marks run from 1 to 2, not from 0 to 2"),
    (patched(82, "<q", 1), "document marks run from 0 to 1, not from 0 to 2"),
    (patched(66, "<q", 2), "document marks go backwards"),
    (patched(34, "<i", -3), "sequence 0 has a negative length"),
    (patched(50, "<q", 4), "sequence 1 does not start where"),
]


def test_damaged_index(prefix):
    for index, message in DAMAGED:
        Path(prefix + ".idx").write_bytes(index)
        with pytest.raises(DataError, match=rf"^\S+\.idx: .*{message}.*[;:] .*$"):
            IndexedDataset(prefix)


def test_checks_reach_over_block_borders(prefix, monkeypatch):
    monkeypatch.setattr("megatron_lite.data.indexed.CHECKED_SEQUENCES", 1)
    assert IndexedDataset(prefix).num_tokens == 5
    for at, said in ((50, "sequence 1 does not start"), (66, "backwards")):
        Path(prefix + ".idx").write_bytes(patched(at, "<q", 4 if at == 50 else 2))
        with pytest.raises(DataError, match=said):
            IndexedDataset(prefix)


@pytest.mark.parametrize("tokens", [GOLDEN_BIN[:-2], GOLDEN_BIN + b"\0"])
def test_tokens_that_do_not_fit_the_index(prefix, tokens):
    Path(prefix + ".bin").write_bytes(tokens)
    with pytest.raises(DataError, match=rf"^\S+\.bin: {len(tokens)} bytes, but its \.idx needs 10; .*$"):
        IndexedDataset(prefix)
    Path(prefix + ".bin").write_bytes(b"")
    Path(prefix + ".idx").write_bytes(GOLDEN_IDX[:18] + struct.pack("<QQq", 0, 1, 0))
    with pytest.raises(DataError, match=r"^\S+\.bin: holds no tokens; .*$"):
        IndexedDataset(prefix)
