"""The format of Megatron's index files, and the checks that tell a sound one from a damaged one.

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

import shutil
import struct

import numpy as np

from megatron_lite.errors import DataError
from megatron_lite.units import count

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
UINT16_BELOW = 65_500  # ids in the vocabulary
LONGEST_SEQUENCE = 2**31 - 1  # tokens; lengths are int32
WRITTEN_BLOCK = 1 << 16  # sequences
BLOCK = 1 << 22  # sequences checked at a time: bounds the memory that opening a huge file takes


def token_dtype(vocab_size: int) -> np.dtype:
    """The type that tokens of this vocabulary are stored in: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2" if vocab_size < UINT16_BELOW else "<i4")


def write_index(file, dtype: np.dtype, num_sequences: int, num_documents: int, lengths, marks) -> None:
    """The whole .idx, from open files of the lengths (i32) and of the marks (i64, without the 0 they start with)."""
    code = next(code for code, known in DTYPES.items() if np.dtype(known) == dtype)
    file.write(HEADER.pack(MAGIC, VERSION, code, num_sequences, num_documents + 1))
    shutil.copyfileobj(lengths, file)
    lengths.seek(0)
    num_tokens = 0
    while raw := lengths.read(4 * WRITTEN_BLOCK):
        block = np.frombuffer(raw, "<i4")
        ends = num_tokens + np.cumsum(block, dtype="<i8")
        file.write(((ends - block) * dtype.itemsize).tobytes())
        num_tokens = int(ends[-1])
    file.write(bytes(8))
    shutil.copyfileobj(marks, file)


def damaged(path: str, what: str) -> DataError:
    """The error for a file whose bytes contradict each other."""
    return DataError(f"{path}: {what}; copy the file again or preprocess the text again")


def read_header(path: str, index) -> tuple[np.dtype, int, int]:
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
        contents = f"{count(num_sequences)} sequences and {count(num_marks)} document marks"
        raise damaged(path, f"{count(len(index))} bytes, but its {contents} need {count(expected)}")
    return dtype, num_sequences, num_marks


def check_marks(path: str, marks: np.ndarray, num_sequences: int) -> None:
    """DataError unless the marks rise from 0 to the number of sequences."""
    if len(marks) == 0 or marks[0] != 0 or marks[-1] != num_sequences:
        ends = f"{marks[0]} to {marks[-1]}" if len(marks) else "nothing"
        raise damaged(path, f"document marks run from {ends}, not from 0 to {num_sequences}")
    for start in range(0, len(marks), BLOCK):
        if (np.diff(marks[start : start + BLOCK + 1]) < 0).any():
            raise damaged(path, "document marks go backwards")


def check_pointers(path: str, lengths: np.ndarray, pointers: np.ndarray, dtype: np.dtype) -> int:
    """The number of tokens, after checking that each sequence starts where the one before it ends."""
    num_tokens = 0
    for start in range(0, len(lengths), BLOCK):
        block = lengths[start : start + BLOCK].astype(np.int64)
        if (block < 0).any():
            raise damaged(path, f"sequence {start + int((block < 0).argmax())} has a negative length")
        ends = num_tokens + np.cumsum(block)
        wrong = pointers[start : start + BLOCK] != (ends - block) * dtype.itemsize
        if wrong.any():
            raise damaged(path, f"sequence {start + int(wrong.argmax())} does not start where the one before it ends")
        num_tokens = int(ends[-1])
    return num_tokens
