"""Megatron's indexed data set: PREFIX.bin holds the tokens one after another, PREFIX.idx where each sequence starts.

.idx, little-endian and unpadded, for N sequences and D document marks:

    0        9 bytes   magic
    9        u64       version, 1
    17       u8        code of the token type in .bin
    18       u64       N
    26       u64       D, one more than there are documents
    34       N x i32   tokens per sequence
    34+4N    N x i64   byte offset of each sequence in .bin
    34+12N   D x i64   0, then the number of sequences up to the end of each document
    then     N x i8    mode of each sequence; multimodal files only, not read here
"""

import mmap
import os
import struct

import numpy as np

from megatron_lite.config.data_paths import find_written_prefix
from megatron_lite.errors import DataError
from megatron_lite.shared_files import open_foreign
from megatron_lite.units import count, counted

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
BLOCK = 1 << 22  # sequences checked at a time: bounds the memory that opening a huge file takes


def damaged(path: str, what: str) -> DataError:
    """The error for a file whose bytes contradict each other."""
    return DataError(f"{path}: {what}; copy the file again or preprocess the text again")


class IndexedDataset:
    """A pair of files, opened by mmap and checked.

    sequence_lengths: int32 [sequences]; document_marks: int64 [documents + 1], marks[d] is the first sequence of
    document d; all_tokens: [num_tokens], of the whole file. Arrays are read-only views.
    Raises DataError for a file that is missing or damaged; `flag` is the option it blames.
    """

    def __init__(self, prefix: str, flag: str = "--data-path"):
        self.prefix, self._flag = str(prefix), flag
        _require_files(self.prefix, flag)
        path = self.prefix + ".idx"
        index = _map_file(path)
        self.dtype, num_sequences, num_marks = _read_header(path, index)
        self.sequence_lengths = np.frombuffer(index, "<i4", num_sequences, HEADER.size)
        self._pointers = np.frombuffer(index, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
        self.document_marks = np.frombuffer(index, "<i8", num_marks, HEADER.size + 12 * num_sequences)
        self.num_tokens = self._check_index(path)
        path = self.prefix + ".bin"
        num_bytes, expected = os.path.getsize(path), self.num_tokens * self.dtype.itemsize
        if num_bytes != expected:
            raise damaged(path, f"{count(num_bytes)} bytes, but its .idx needs {count(expected)}")
        if self.num_tokens == 0:
            raise DataError(f"{path}: holds no tokens; preprocess a text that has some")
        self.all_tokens = np.frombuffer(_map_file(path), self.dtype)

    def _check_index(self, path: str) -> int:
        """The number of tokens. DataError unless marks rise from 0 to the end, and sequences follow on each other."""
        marks = self.document_marks
        if len(marks) == 0 or marks[0] != 0 or marks[-1] != len(self):
            ends = f"{marks[0]} to {marks[-1]}" if len(marks) else "nothing"
            raise damaged(path, f"document marks run from {ends}, not from 0 to {len(self)}")
        for start in range(0, len(marks), BLOCK):
            if (np.diff(marks[start : start + BLOCK + 1]) < 0).any():
                raise damaged(path, "document marks go backwards")
        num_tokens = 0
        for start in range(0, len(self), BLOCK):
            lengths = self.sequence_lengths[start : start + BLOCK].astype(np.int64)
            if (lengths < 0).any():
                raise damaged(path, f"sequence {start + int((lengths < 0).argmax())} has a negative length")
            ends = num_tokens + np.cumsum(lengths)
            wrong = self._pointers[start : start + BLOCK] != (ends - lengths) * self.dtype.itemsize
            if wrong.any():
                first = start + int(wrong.argmax())
                raise damaged(path, f"sequence {first} does not start where the one before it ends")
            num_tokens = int(ends[-1])
        return num_tokens

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __reduce__(self):
        # A loader worker that is started by spawning opens the files again; pickling would copy the whole .bin.
        return IndexedDataset, (self.prefix, self._flag)

    def tokens(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """A view of `length` tokens (default: all that are left) of a sequence, from `offset` on."""
        available = int(self.sequence_lengths[sequence]) - offset
        length = available if length is None else length
        if offset < 0 or not 0 <= length <= available:
            raise IndexError(f"tokens {offset} to {offset + length} of a sequence of {available + offset}")
        start = int(self._pointers[sequence]) // self.dtype.itemsize + offset
        return self.all_tokens[start : start + length]

    def document_bounds(self) -> np.ndarray:
        """int64 [documents + 1]: the number of tokens before each document, and of all."""
        bounds = np.full(len(self.document_marks), self.num_tokens, np.int64)
        inner = self.document_marks < len(self)
        bounds[inner] = self._pointers[self.document_marks[inner]] // self.dtype.itemsize
        return bounds

    def extreme_token_ids(self, sample: int = 1_000_000) -> tuple[int, int]:
        """The smallest and the largest id among about `sample` tokens, in runs spread over the file; of all if it is
        small.

        Runs rather than single tokens: a run costs one disk access, a million scattered tokens a million.
        """
        if self.num_tokens <= sample:
            return int(self.all_tokens.min()), int(self.all_tokens.max())
        run = max(1, sample // 256)
        starts = np.linspace(0, self.num_tokens - run, num=max(2, sample // run)).astype(np.int64)
        runs = [self.all_tokens[start : start + run] for start in starts]
        return min(int(ids.min()) for ids in runs), max(int(ids.max()) for ids in runs)


def _require_files(prefix: str, flag: str) -> None:
    missing = [prefix + ending for ending in (".bin", ".idx") if not os.path.isfile(prefix + ending)]
    if not missing:
        return
    stem, ending = os.path.splitext(prefix)
    if ending in (".bin", ".idx"):
        remedy = f"leave the ending off: {stem}"
    elif written := find_written_prefix(prefix):
        remedy = f"did you mean {written}?"
    elif len(missing) == 1:
        remedy = "the two files belong together: copy the other one too, or preprocess the text again"
    else:
        remedy = "give the path that preprocessing wrote, without .bin or .idx"
    raise DataError(f"{flag} {prefix}: no file {' and no file '.join(missing)}; {remedy}")


def _map_file(path: str):
    try:
        with open_foreign(path) as file:
            # An empty file cannot be mapped.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.path.getsize(path) else b""
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _read_header(path: str, index) -> tuple[np.dtype, int, int]:
    """The token type and the numbers of sequences and document marks; DataError unless they fit the file's size."""
    if len(index) < HEADER.size:
        raise damaged(path, f"{len(index)} bytes is too short for a header of {HEADER.size}")
    magic, version, code, num_sequences, num_marks = HEADER.unpack_from(index)
    if magic != MAGIC:
        raise DataError(f"{path}: starts with {magic!r}, not {MAGIC!r}; not an indexed data set: preprocess the text")
    if version != VERSION:
        raise DataError(f"{path}: version {version} is unknown, {VERSION} is read; preprocess the text again")
    if code not in DTYPES:
        raise damaged(path, f"token type code {code} is unknown (1 to 8 exist)")
    dtype = np.dtype(DTYPES[code])
    if dtype.kind == "f":
        raise DataError(f"{path}: token type {dtype} holds no token ids; preprocess the text with a tokenizer")
    expected = HEADER.size + 12 * num_sequences + 8 * num_marks
    if len(index) not in (expected, expected + num_sequences):
        contents = f"{counted(num_sequences, 'sequence')} and {counted(num_marks, 'document mark')}"
        raise damaged(path, f"{count(len(index))} bytes, but its {contents} need {count(expected)}")
    return dtype, num_sequences, num_marks
