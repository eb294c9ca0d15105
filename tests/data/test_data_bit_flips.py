"""Every bit of a small .idx and .bin flipped: refused, or shown to change nothing that can be known."""

import numpy as np
import pytest
from support.data_maker import write_data
from support.wording import wording

from megatron_lite.data.dataset_check import inspect
from megatron_lite.data.indexed import HEADER, IndexedDataset
from megatron_lite.errors import DataError

DOCUMENTS = [[1, 2, 3], [], [4, 5], [9], [], [6, 7, 8, 0]]
VOCABULARIES = [10, 100_000]  # uint16, int32


def flips(path):
    """(bit, the flipped file in place) for each bit; the file as it was in the end."""
    sound = path.read_bytes()
    try:
        for bit in range(8 * len(sound)):
            changed = bytearray(sound)
            changed[bit // 8] ^= 1 << bit % 8
            path.unlink()  # a new file: what is mapped stays as it is
            path.write_bytes(bytes(changed))
            yield bit
    finally:
        path.write_bytes(sound)


def opened(prefix):
    """None if refused in one line."""
    try:
        return IndexedDataset(prefix)
    except DataError as error:
        assert "\n" not in str(error) and str(error).startswith(prefix)
        return None


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_index(tmp_path, vocab_size):
    """What training reads, the lengths and where they begin, cannot change unseen; a document's border can.

    Lengths and pointers say the same twice, and their sum is the size of .bin. The marks of documents are said once: one
    that stays between its neighbors is as good as another, and only the inspector counts documents.
    """
    prefix = write_data(tmp_path / "x", DOCUMENTS, vocab_size)
    sound = IndexedDataset(prefix)
    marks_at, passed = HEADER.size + 12 * len(sound), 0
    for bit in flips(tmp_path / "x.idx"):
        found = opened(prefix)
        if found is None:
            continue
        passed += 1
        assert bit // 8 >= marks_at
        assert np.array_equal(found.sequence_lengths, sound.sequence_lengths) and found.dtype == sound.dtype
        assert all(np.array_equal(found.tokens(i), sound.tokens(i)) for i in range(len(sound)))
        assert (np.diff(found.document_marks) >= 0).all() and found.document_marks[-1] == len(sound)
        assert np.count_nonzero(found.document_marks != sound.document_marks) == 1
    assert 0 < passed < 10


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_tokens(tmp_path, vocab_size):
    """An id outside the vocabulary is found; one inside is as good as what stood there."""
    prefix = write_data(tmp_path / "x", DOCUMENTS, vocab_size)
    sound = np.fromfile(prefix + ".bin", IndexedDataset(prefix).dtype)
    for _ in flips(tmp_path / "x.bin"):
        tokens = np.fromfile(prefix + ".bin", sound.dtype)
        changed = int(tokens[(tokens != sound).argmax()])
        assert np.count_nonzero(tokens != sound) == 1
        try:
            found = inspect(prefix, vocab_size=vocab_size)
        except DataError as error:
            assert not 0 <= changed < vocab_size
            assert wording("data/is-id", changed) in str(error) and str(error).startswith(f"{prefix}.bin: ")
        else:
            assert 0 <= changed < vocab_size and found.tokens == len(sound)


@pytest.mark.parametrize("ending", [".idx", ".bin"])
def test_every_length_but_the_right_one_is_refused(tmp_path, ending):
    prefix = write_data(tmp_path / "x", DOCUMENTS, 10)
    path = tmp_path / f"x{ending}"
    raw = path.read_bytes()
    with_modes = len(raw) + len(IndexedDataset(prefix)) if ending == ".idx" else None
    for size in range(len(raw) + 12):
        path.unlink()
        path.write_bytes((raw + bytes(12))[:size])
        assert (opened(prefix) is not None) == (size in (len(raw), with_modes)), size
