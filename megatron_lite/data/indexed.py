"""Megatron's indexed data set: PREFIX.bin holds the tokens one after another, PREFIX.idx where each sequence starts."""

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np

from megatron_lite.data.index_format import (
    HEADER,
    LONGEST_SEQUENCE,
    check_marks,
    check_pointers,
    damaged,
    read_header,
    token_dtype,
    write_index,
)
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

    def largest_token_id(self, sample: int = 1_000_000) -> int:
        """The largest id among about `sample` tokens, taken as runs evenly spread over the file; of all if it is small.

        Runs rather than single tokens: a run costs one disk access, a million scattered tokens a million.
        """
        if self.num_tokens <= sample:
            return int(self._tokens.max())
        run = max(1, sample // 256)
        starts = np.linspace(0, self.num_tokens - run, num=max(2, sample // run)).astype(np.int64)
        return max(int(self._tokens[start : start + run].max()) for start in starts)


class IndexedWriter:
    """Writes PREFIX.bin and PREFIX.idx, byte for byte as Megatron does; a context manager.

    The files appear under their names only when the `with` block ends without an error.
    """

    def __init__(self, prefix: str, vocab_size: int):
        self.prefix = str(prefix)
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.num_tokens = 0
        self._lengths: list[int] = []
        self._marks = [0]
        self._temporary = {ending: f"{self.prefix}{ending}.tmp{os.getpid()}" for ending in (".bin", ".idx")}

    def __enter__(self):
        try:
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._temporary[".bin"], "wb")
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def add_document(self, token_ids) -> None:
        """Appends one document of one sequence; an empty document has no sequence. DataError for an id that is none."""
        ids = np.asarray(token_ids)
        if ids.size:
            self._check_size(ids.size)
            self._check_ids(ids)
            self._append(ids.astype(self.dtype).tobytes())
            self._lengths.append(ids.size)
            self.num_tokens += ids.size
        self._marks.append(len(self._lengths))

    def _check_size(self, num_tokens: int) -> None:
        if num_tokens > LONGEST_SEQUENCE:
            raise DataError(
                f"{self.prefix}: document {count(len(self._marks))} has {count(num_tokens)} tokens, the format ends at "
                f"{count(LONGEST_SEQUENCE)}; cut it into several"
            )

    def _check_ids(self, ids: np.ndarray) -> None:
        if ids.dtype.kind not in "iu":
            raise DataError(f"{self.prefix}: token ids of type {ids.dtype} are no integers; check the tokenizer")
        # Anything below the vocabulary fits the type: uint16 is chosen below 65,500 ids only.
        for extreme in (int(ids.min()), int(ids.max())):
            if not 0 <= extreme < self.vocab_size:
                raise DataError(
                    f"{self.prefix}: token id {extreme} in document {count(len(self._marks))} is outside the vocabulary "
                    f"of {count(self.vocab_size)}; use the tokenizer's real --vocab-size"
                )

    def _append(self, raw: bytes) -> None:
        try:
            self._bin.write(raw)
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(f"{self.prefix}: cannot be written ({error.strerror}); free some space or choose another output")

    def __exit__(self, kind, error, trace) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as failure:
            raise self._unwritable(failure) from None
        finally:
            self._discard()

    def _discard(self) -> None:
        # Closing writes out what is buffered, and fails again if that is what failed.
        with contextlib.suppress(OSError):
            self._bin.close()
        for path in self._temporary.values():
            Path(path).unlink(missing_ok=True)

    def _finish(self) -> None:
        if not self._lengths:
            raise DataError(f"{self.prefix}: not a single token to write; check the input files and --json-keys")
        _flush(self._bin)
        with open(self._temporary[".idx"], "wb") as index:
            write_index(index, self.dtype, self._lengths, self._marks)
            _flush(index)
        # The old .idx goes first: dying between the renames must not leave it beside a new .bin.
        Path(self.prefix + ".idx").unlink(missing_ok=True)
        for ending in (".bin", ".idx"):
            os.replace(self._temporary[ending], self.prefix + ending)


def _flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())


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
