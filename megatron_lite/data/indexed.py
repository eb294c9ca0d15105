"""Megatron's indexed data set: PREFIX.bin holds the tokens one after another, PREFIX.idx where each sequence starts."""

import mmap
import os
from collections.abc import Iterator

import numpy as np

from megatron_lite.data.index_format import (
    HEADER,
    LONGEST_SEQUENCE,
    check_marks,
    check_pointers,
    damaged,
    read_header,
    token_dtype,
)
from megatron_lite.data.indexed_writer import PairWriter, Written
from megatron_lite.errors import DataError
from megatron_lite.units import count


class IndexedDataset:
    """A pair of files, opened by mmap and checked.

    sequence_lengths: int32 [sequences]; document_marks: int64 [documents + 1], marks[d] is the first sequence of
    document d. Raises DataError for a file that is missing or damaged; `flag` is the option it blames.
    """

    def __init__(self, prefix: str, flag: str = "--data-path"):
        self.prefix = str(prefix)
        self._flag = flag
        _require_files(self.prefix, flag)
        index = _open_bytes(self.prefix + ".idx")
        self.dtype, num_sequences, num_marks = read_header(self.prefix + ".idx", index)
        pointers_at = HEADER.size + 4 * num_sequences
        marks_at = pointers_at + 8 * num_sequences
        self.sequence_lengths = np.frombuffer(index, "<i4", num_sequences, HEADER.size)
        self._pointers = np.frombuffer(index, "<i8", num_sequences, pointers_at)
        self.document_marks = np.frombuffer(index, "<i8", num_marks, marks_at)
        check_marks(self.prefix + ".idx", self.document_marks, num_sequences)
        self.num_tokens = check_pointers(self.prefix + ".idx", self.sequence_lengths, self._pointers, self.dtype)
        self._tokens = _open_tokens(self.prefix + ".bin", self.dtype, self.num_tokens)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __reduce__(self):
        # A loader worker that is started by spawning opens the files again; pickling would copy the whole .bin.
        return IndexedDataset, (self.prefix, self._flag)

    def tokens(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """A read-only view of `length` tokens (default: all that are left) of a sequence, from `offset` on."""
        available = int(self.sequence_lengths[sequence]) - offset
        length = available if length is None else length
        if offset < 0 or not 0 <= length <= available:
            raise IndexError(f"tokens {offset} to {offset + length} of a sequence of {available + offset}")
        start = int(self._pointers[sequence]) // self.dtype.itemsize + offset
        return self._tokens[start : start + length]

    def token_blocks(self, size: int) -> Iterator[np.ndarray]:
        """All tokens as read-only views, `size` at a time and the rest."""
        for start in range(0, self.num_tokens, size):
            yield self._tokens[start : start + size]

    def tokens_at(self, where) -> np.ndarray:
        """The tokens at these positions, an array of them or a slice, counted through the whole file."""
        return self._tokens[where]

    def file_bytes(self) -> int:
        """The size of both files together."""
        return sum(os.path.getsize(self.prefix + ending) for ending in (".bin", ".idx"))

    def document_bounds(self) -> np.ndarray:
        """int64 [documents + 1]: the number of tokens before each document, and of all."""
        bounds = np.full(len(self.document_marks), self.num_tokens, np.int64)
        inner = self.document_marks < len(self)
        bounds[inner] = self._pointers[self.document_marks[inner]] // self.dtype.itemsize
        return bounds

    def extreme_token_ids(self, sample: int = 1_000_000) -> tuple[int, int]:
        """The smallest and the largest id among about `sample` tokens, taken as runs evenly spread over the file; of all if it is small.

        Runs rather than single tokens: a run costs one disk access, a million scattered tokens a million.
        """
        if self.num_tokens <= sample:
            return int(self._tokens.min()), int(self._tokens.max())
        run = max(1, sample // 256)
        starts = np.linspace(0, self.num_tokens - run, num=max(2, sample // run)).astype(np.int64)
        runs = [self._tokens[start : start + run] for start in starts]
        return min(int(ids.min()) for ids in runs), max(int(ids.max()) for ids in runs)


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx, byte for byte as Megatron does; a context manager.

    The files appear under their names only when the `with` block ends without an error.
    """

    def __init__(self, prefix: str, vocab_size: int):
        self.prefix = str(prefix)
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self._pair = PairWriter(self.prefix, self.dtype, f".tmp{os.getpid()}")

    @property
    def num_tokens(self) -> int:
        return self._pair.written.tokens

    def __enter__(self):
        self._pair.open()
        self._pair.cut(Written())
        return self

    def add_document(self, token_ids) -> None:
        """Appends one document of one sequence; an empty document has no sequence. DataError for an id that is none."""
        whose = f"document {count(self._pair.written.documents + 1)}"
        ids = checked_ids(token_ids, self.vocab_size, self.prefix, whose)
        lengths = np.array([ids.size] if ids.size else [], np.int32)
        self._pair.append(ids.astype(self.dtype).tobytes(), lengths, np.array([lengths.size]))

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._pair.complete()
                self._pair.place()
        finally:
            self._pair.discard()


def checked_ids(token_ids, vocab_size: int, source: str, whose: str) -> np.ndarray:
    """The ids as an array of integers; DataError, naming source and whose they are, for one outside the vocabulary."""
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return ids.astype(np.int64)
    if ids.size > LONGEST_SEQUENCE:
        raise DataError(
            f"{source}: {whose} has {count(ids.size)} tokens, the format ends at {count(LONGEST_SEQUENCE)}; "
            "cut it into several"
        )
    if ids.dtype.kind not in "iu":
        raise DataError(f"{source}: token ids of type {ids.dtype} are no integers; check the tokenizer")
    # Anything below the vocabulary fits the type: uint16 is chosen below 65,500 ids only.
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < vocab_size:
            raise DataError(
                f"{source}: token id {extreme} in {whose} is outside the vocabulary of {count(vocab_size)}; "
                "use the tokenizer's real --vocab-size"
            )
    return ids


def _require_files(prefix: str, flag: str) -> None:
    missing = [prefix + ending for ending in (".bin", ".idx") if not os.path.isfile(prefix + ending)]
    if not missing:
        return
    raise DataError(f"{flag} {prefix}: no file {' and no file '.join(missing)}; {_way_out(prefix, missing)}")


def _way_out(prefix: str, missing: list[str]) -> str:
    stem, ending = os.path.splitext(prefix)
    if ending in (".bin", ".idx"):
        return f"leave the ending off: {stem}"
    if os.path.isfile(prefix + "_text_document.idx"):
        return f"did you mean {prefix}_text_document?"
    if len(missing) == 1:
        return "the two files belong together: copy the other one too, or preprocess the text again"
    return "give the path that preprocessing wrote, without .bin or .idx"


def _open_bytes(path: str):
    try:
        with open(path, "rb") as file:
            # An empty file cannot be mapped.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.path.getsize(path) else b""
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def _open_tokens(path: str, dtype: np.dtype, num_tokens: int) -> np.ndarray:
    num_bytes = os.path.getsize(path)
    if num_bytes != num_tokens * dtype.itemsize:
        raise damaged(path, f"{count(num_bytes)} bytes, but its .idx needs {count(num_tokens * dtype.itemsize)}")
    if num_tokens == 0:
        raise DataError(f"{path}: holds no tokens; preprocess a text that has some")
    return np.frombuffer(_open_bytes(path), dtype)
