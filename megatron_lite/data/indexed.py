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
from numpy.typing import NDArray

from megatron_lite.config.data_paths import find_written_prefix
from megatron_lite.errors import DataError
from megatron_lite.shared_files import open_foreign
from megatron_lite.units import count, counted

MAGIC = b"MMIDIDX\x00\x00"
INDEX_VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
Tokens = NDArray[np.integer]  # of the type that the file's header names
NUM_RUNS = 256  # of tokens that are looked at when a large file is opened
CHECKED_SEQUENCES = 1 << 22  # sequences checked at a time: bounds the memory that opening a huge file takes


def damaged(path: str, what: str) -> DataError:
    """The error for a file whose bytes contradict each other."""
    return DataError(f"{path}: {what}; copy the file again or preprocess the text again")


class IndexedDataset:
    """A pair of files, opened by mmap and checked. Arrays are read-only views.

    sequence_lengths: int32 [sequences]; document_marks: int64 [documents + 1], marks[d] is the first sequence of
    document d; all_tokens: [num_tokens], of the whole file.
    """

    def __init__(self, prefix: str, flag: str = "--data-path"):
        """
        Args:
            prefix: Path of the two files, without .bin and .idx.
            flag: The option that named it, for messages.

        Raises:
            DataError: A file is missing or damaged.
        """
        self.prefix = str(prefix)
        self._flag = flag
        _require_files(self.prefix, flag)
        path = self.prefix + ".idx"
        index = _map_file(path)
        self.dtype, num_sequences, num_marks = _read_header(path, index)
        lengths_at = HEADER.size
        pointers_at = lengths_at + 4 * num_sequences
        marks_at = pointers_at + 8 * num_sequences
        self.sequence_lengths: NDArray[np.int32]
        self.sequence_lengths = np.frombuffer(index, "<i4", num_sequences, lengths_at)
        self._pointers: NDArray[np.int64]  # bytes before each sequence in .bin
        self._pointers = np.frombuffer(index, "<i8", num_sequences, pointers_at)
        self.document_marks: NDArray[np.int64]
        self.document_marks = np.frombuffer(index, "<i8", num_marks, marks_at)
        self._check_marks(path)
        self.num_tokens = self._check_sequences(path)
        self.all_tokens = self._open_tokens(self.prefix + ".bin")

    def _open_tokens(self, path: str) -> Tokens:
        """Map the .bin file at a path. DataError unless it holds the tokens that the .idx file counts."""
        num_bytes = os.path.getsize(path)
        expected = self.num_tokens * self.dtype.itemsize
        if num_bytes != expected:
            raise damaged(path, f"{count(num_bytes)} bytes, but its .idx needs {count(expected)}")
        if self.num_tokens == 0:
            raise DataError(f"{path}: holds no tokens; preprocess a text that has some")
        return np.frombuffer(_map_file(path), self.dtype)

    def _check_marks(self, path: str) -> None:
        """DataError unless document marks rise from 0 to the number of sequences. path: of the .idx."""
        marks = self.document_marks
        whole = f"from 0 to {len(self)}"
        if len(marks) == 0:
            raise damaged(path, f"document marks run from nothing, not {whole}")
        first = marks[0]
        last = marks[-1]
        if first != 0 or last != len(self):
            raise damaged(path, f"document marks run from {first} to {last}, not {whole}")
        for start in range(0, len(marks), CHECKED_SEQUENCES):
            steps = np.diff(marks[start : start + CHECKED_SEQUENCES + 1])
            if (steps < 0).any():
                raise damaged(path, "document marks go backwards")

    def _check_sequences(self, path: str) -> int:
        """The number of tokens. DataError unless sequences follow on each other. path: of the .idx."""
        num_tokens = 0
        for start in range(0, len(self), CHECKED_SEQUENCES):
            block = slice(start, start + CHECKED_SEQUENCES)
            lengths = self.sequence_lengths[block].astype(np.int64)
            is_negative = lengths < 0
            if is_negative.any():
                first = start + int(is_negative.argmax())
                raise damaged(path, f"sequence {first} has a negative length")
            ends = num_tokens + np.cumsum(lengths)
            expected = (ends - lengths) * self.dtype.itemsize
            wrong = self._pointers[block] != expected
            if wrong.any():
                first = start + int(wrong.argmax())
                raise damaged(path, f"sequence {first} does not start where the one before it ends")
            num_tokens = int(ends[-1])
        return num_tokens

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str, str]]:
        # A loader worker that is started by spawning opens the files again; pickling would copy the whole .bin.
        return IndexedDataset, (self.prefix, self._flag)

    def tokens(self, sequence: int, offset: int = 0, length: int | None = None) -> Tokens:
        """A view of tokens of a sequence. IndexError for what it does not hold.

        Args:
            sequence: Number of the sequence in the file.
            offset: The first token.
            length: How many; None: all that are left.
        """
        available = int(self.sequence_lengths[sequence]) - offset
        if length is None:
            length = available
        if offset < 0 or not 0 <= length <= available:
            raise IndexError(f"tokens {offset} to {offset + length} of a sequence of {available + offset}")
        first = int(self._pointers[sequence]) // self.dtype.itemsize
        start = first + offset
        return self.all_tokens[start : start + length]

    def document_bounds(self) -> NDArray[np.int64]:
        """The number of tokens before each document, and of all: int64 [documents + 1]."""
        bounds = np.full(len(self.document_marks), self.num_tokens, np.int64)
        # the marks of empty documents at the end are of no sequence
        inner = self.document_marks < len(self)
        first_sequences = self.document_marks[inner]
        bounds[inner] = self._pointers[first_sequences] // self.dtype.itemsize
        return bounds

    def extreme_token_ids(self, sample: int = 1_000_000) -> tuple[int, int]:
        """The smallest and the largest id of a part of the file, or of all if it is small.

        Args:
            sample: About how many tokens are looked at, in runs spread over the file: a run costs one disk access, a
                million scattered tokens a million.
        """
        if self.num_tokens <= sample:
            runs = [self.all_tokens]
        else:
            run = max(1, sample // NUM_RUNS)
            num_runs = max(2, sample // run)
            last = self.num_tokens - run
            starts = np.linspace(0, last, num=num_runs).astype(np.int64)
            runs = [self.all_tokens[start : start + run] for start in starts]
        smallest = min(int(ids.min()) for ids in runs)
        largest = max(int(ids.max()) for ids in runs)
        return smallest, largest


def _require_files(prefix: str, flag: str) -> None:
    """DataError, with what may be meant instead, unless both files of a prefix are there."""
    paths = [prefix + ending for ending in (".bin", ".idx")]
    missing = [path for path in paths if not os.path.isfile(path)]
    if not missing:
        return
    stem, ending = os.path.splitext(prefix)
    written = find_written_prefix(prefix)
    if ending in (".bin", ".idx"):
        remedy = f"leave the ending off: {stem}"
    elif written:
        remedy = f"did you mean {written}?"
    elif len(missing) == 1:
        remedy = "the two files belong together: copy the other one too, or preprocess the text again"
    else:
        remedy = "give the path that preprocessing wrote, without .bin or .idx"
    raise DataError(f"{flag} {prefix}: no file {' and no file '.join(missing)}; {remedy}")


def _map_file(path: str) -> mmap.mmap | bytes:
    """The contents of a file, read-only. DataError if it cannot be read."""
    try:
        with open_foreign(path) as file:
            if not os.path.getsize(path):
                return b""  # an empty file cannot be mapped
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _read_header(path: str, index: mmap.mmap | bytes) -> tuple[np.dtype[np.integer], int, int]:
    """The token type and the numbers of sequences and document marks; DataError unless they fit the file's size."""
    if len(index) < HEADER.size:
        raise damaged(path, f"{len(index)} bytes is too short for a header of {HEADER.size}")
    magic, version, code, num_sequences, num_marks = HEADER.unpack_from(index)
    if magic != MAGIC:
        raise DataError(f"{path}: starts with {magic!r}, not {MAGIC!r}; not an indexed data set: preprocess the text")
    if version != INDEX_VERSION:
        raise DataError(f"{path}: version {version} is unknown, {INDEX_VERSION} is read; preprocess the text again")
    if code not in TOKEN_DTYPES:
        raise damaged(path, f"token type code {code} is unknown (1 to 8 exist)")
    dtype: np.dtype[np.integer] = np.dtype(TOKEN_DTYPES[code])
    if dtype.kind == "f":
        raise DataError(f"{path}: token type {dtype} holds no token ids; preprocess the text with a tokenizer")
    expected = HEADER.size + 12 * num_sequences + 8 * num_marks
    with_modes = expected + num_sequences
    if len(index) not in (expected, with_modes):
        sequences = counted(num_sequences, "sequence")
        marks = counted(num_marks, "document mark")
        contents = f"{sequences} and {marks}"
        raise damaged(path, f"{count(len(index))} bytes, but its {contents} need {count(expected)}")
    return dtype, num_sequences, num_marks
