"""Writing .bin/.idx pairs: under other names, which they trade for their own at the end; and joining several to one."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader, BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_lite.data.indexed import HEADER, INDEX_VERSION, MAGIC, TOKEN_DTYPES, IndexedDataset
from megatron_lite.errors import DataError
from megatron_lite.units import count

UINT16_BELOW = 65_500  # ids in the vocabulary
MAX_SEQUENCE_TOKENS = 2**31 - 1  # tokens; lengths are int32
INDEX_BLOCK = 1 << 16  # sequences whose pointers are computed at a time
MERGE_BLOCK = 1 << 22  # tokens, sequences or documents copied at a time
NO_LENGTHS = np.empty(0, np.int64)


def token_dtype(vocab_size: int) -> np.dtype[np.integer]:
    """The type that tokens of this vocabulary are stored in: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2" if vocab_size < UINT16_BELOW else "<i4")


class Written(NamedTuple):
    """The contents of a pair, counted."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class PairWriter:
    """Appends to PREFIX.{bin,lengths,marks}ENDING; complete() and place() make PREFIX.bin and PREFIX.idx of them.

    Lengths and marks have files of their own until then, so that memory stays the same however many documents there
    are. Every failure to write is a DataError; discard() or close() is for the caller to call then. As a context
    manager: the files take their names if the block ends without an error, and go if it fails.
    """

    def __init__(self, prefix: str, dtype: np.dtype[np.integer], ending: str | None = None):
        """
        Args:
            prefix: Path of the two files, without .bin and .idx.
            dtype: Data type of the tokens in .bin.
            ending: Ending of the files' names until then; None: this process's own.
        """
        ending = ending or f".tmp{os.getpid()}"
        self.prefix = str(prefix)
        self.dtype = dtype
        self.written = Written()
        self._paths = {part: f"{self.prefix}.{part}{ending}" for part in ("bin", "lengths", "marks", "idx")}
        self._files: dict[str, BufferedWriter] = {}  # bin, lengths and marks

    def open(self) -> None:
        """Open the files, keeping what they hold; to be followed by cut(). DataError if another run has them open."""
        with self._writing():
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            for part in ("bin", "lengths", "marks"):
                path = self._paths[part]
                file = open(path, "wb", opener=lambda path, flags: os.open(path, flags & ~os.O_TRUNC, 0o666))
                self._files[part] = file
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_ours = os.path.samestat(os.fstat(file.fileno()), os.stat(path))  # or it was just renamed
                except (BlockingIOError, FileNotFoundError):
                    is_ours = False
                except OSError:
                    continue  # a file system without locks
                if not is_ours:
                    raise DataError(
                        f"{self.prefix}: another run is writing it; wait for that one or choose another output"
                    )

    def holds(self, written: Written) -> bool:
        """Whether the files are long enough to go on from there."""
        for part, size in self._sizes(written).items():
            if os.path.getsize(self._paths[part]) < size:
                return False
        return True

    def cut(self, written: Written) -> None:
        """Drop all that was appended later."""
        with self._writing():
            for part, size in self._sizes(written).items():
                self._files[part].truncate(size)
                self._files[part].seek(size)
        self.written = written

    def append(self, tokens: bytes, lengths: NDArray[np.integer], ends: NDArray[np.integer]) -> None:
        """Add sequences and documents.

        Args:
            tokens: The bytes of their ids in dtype.
            lengths: int32 [sequences], in tokens.
            ends: int64 [documents], the number of these sequences up to the end of each document.
        """
        before = self.written
        marks = ends + before.sequences
        with self._writing():
            self._files["bin"].write(tokens)
            self._files["lengths"].write(lengths.astype("<i4", copy=False).tobytes())
            self._files["marks"].write(marks.astype("<i8", copy=False).tobytes())
        self.written = Written(
            before.tokens + len(tokens) // self.dtype.itemsize,
            before.sequences + len(lengths),
            before.documents + len(ends),
        )

    def sync(self) -> None:
        """Bring all that was appended to the disk."""
        with self._writing():
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())

    def complete(self) -> None:
        """Write the .idx, still under another name. DataError if there is no token."""
        if not self.written.tokens:
            raise DataError(f"{self.prefix}: not a single token to write; check the input files and --json-keys")
        self.sync()
        code = next(code for code, known in TOKEN_DTYPES.items() if np.dtype(known) == self.dtype)
        with self._writing(), open(self._paths["idx"], "wb") as index:
            index.write(HEADER.pack(MAGIC, INDEX_VERSION, code, self.written.sequences, self.written.documents + 1))
            with open(self._paths["lengths"], "rb") as lengths:
                shutil.copyfileobj(lengths, index)
                lengths.seek(0)
                self._write_pointers(lengths, index)
            index.write(bytes(8))  # the marks start with a 0
            with open(self._paths["marks"], "rb") as marks:
                shutil.copyfileobj(marks, index)
            index.flush()
            os.fsync(index.fileno())

    def _write_pointers(self, lengths: BufferedReader, index: BufferedWriter) -> None:
        """Write where each sequence starts in .bin, in bytes. lengths: the file of their tokens."""
        num_tokens = 0
        while raw := lengths.read(4 * INDEX_BLOCK):
            block = np.frombuffer(raw, "<i4")
            ends = num_tokens + np.cumsum(block, dtype="<i8")
            pointers = (ends - block) * self.dtype.itemsize
            index.write(pointers.tobytes())
            num_tokens = int(ends[-1])

    def place(self) -> None:
        """Put both files under their names."""
        with self._writing():
            # The old .idx goes first: dying between the renames must not leave it beside a new .bin.
            Path(self.prefix + ".idx").unlink(missing_ok=True)
            for part in ("bin", "idx"):
                os.replace(self._paths[part], f"{self.prefix}.{part}")

    def close(self) -> None:
        """Leave the files as they are, for a later run."""
        for file in self._files.values():
            # Closing writes out what is buffered, and fails again if that is what failed.
            with contextlib.suppress(OSError):
                file.close()

    def discard(self) -> None:
        """Remove what has no final name; nothing if the files could not be opened, as they may be another run's."""
        if len(self._files) == 3:
            for path in self._paths.values():
                Path(path).unlink(missing_ok=True)
        self.close()

    def _sizes(self, written: Written) -> dict[str, int]:
        """The bytes of each file that holds so much."""
        tokens, sequences, documents = written
        return {"bin": tokens * self.dtype.itemsize, "lengths": sequences * 4, "marks": documents * 8}

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A failure to write becomes a DataError."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.prefix}: cannot be written ({error.strerror}); free some space or choose another output"
            ) from None

    def __enter__(self) -> "PairWriter":  # noqa: PYI034 - Self came with Python 3.11
        self.open()
        self.cut(Written())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.complete()
                self.place()
        finally:
            self.discard()


class IndexedWriter(PairWriter):
    """Writes PREFIX.bin and PREFIX.idx from documents, byte for byte as Megatron does."""

    def __init__(self, prefix: str, vocab_size: int):
        super().__init__(prefix, token_dtype(vocab_size))
        self.vocab_size = vocab_size

    def __enter__(self) -> "IndexedWriter":  # noqa: PYI034 - Self came with Python 3.11
        super().__enter__()
        return self

    def add_document(self, token_ids: ArrayLike) -> None:
        """Appends one document of one sequence; an empty document has no sequence. DataError for an id that is none."""
        try:
            ids = checked_ids(token_ids, self.vocab_size, f"document {count(self.written.documents + 1)}")
        except DataError as error:
            raise DataError(f"{self.prefix}: {error}") from None
        lengths = np.array([ids.size] if ids.size else [], np.int32)
        ends = np.array([lengths.size])
        self.append(ids.astype(self.dtype).tobytes(), lengths, ends)


def checked_ids(token_ids: ArrayLike, vocab_size: int, whose: str) -> NDArray[np.integer]:
    """Check token ids, and make an array of them.

    Args:
        token_ids: Token ids of one document.
        vocab_size: Ids are below it.
        whose: Words that name the document, for messages.

    Raises:
        DataError: There are too many of them, or one is no integer or outside the vocabulary.
    """
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return ids.astype(np.int64)
    if ids.size > MAX_SEQUENCE_TOKENS:
        most = count(MAX_SEQUENCE_TOKENS)
        raise DataError(f"{whose} has {count(ids.size)} tokens, the format ends at {most}; cut it into several")
    if ids.dtype.kind not in "iu":
        raise DataError(f"token ids of type {ids.dtype} are no integers; check the tokenizer")
    # Anything below the vocabulary fits the type: uint16 is chosen below 65,500 ids only.
    for extreme in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme < vocab_size:
            raise DataError(
                f"token id {extreme} in {whose} is outside the vocabulary of {count(vocab_size)}; "
                "use the tokenizer's real --vocab-size"
            )
    return ids


def merge(
    prefixes: Sequence[str], output_prefix: str, flag: str = "--inputs", report: Callable[[int], None] = lambda _: None
) -> Written:
    """Writes OUTPUT.bin and .idx: the sequences of all data sets in their order.

    As Megatron's add_index: the marks of a data set are moved by the sequences before it and its leading 0 is dropped.

    Args:
        prefixes: Prefixes of the data sets.
        output_prefix: Prefix of the new data set.
        flag: Flag that named the data sets, for messages.
        report: Is called now and then with the tokens written.

    Returns:
        How much was written.

    Raises:
        DataError: A pair is damaged, token types differ, or the output is one of the inputs; nothing is written then.
    """
    datasets = [IndexedDataset(prefix, flag) for prefix in prefixes]
    _require_mergeable(datasets, output_prefix, flag)
    with PairWriter(output_prefix, datasets[0].dtype) as pair:
        for dataset in datasets:
            # Marks first: they are moved by the sequences that the pair holds when they come.
            for start in range(1, len(dataset.document_marks), MERGE_BLOCK):
                pair.append(b"", NO_LENGTHS, dataset.document_marks[start : start + MERGE_BLOCK])
            for start in range(0, len(dataset), MERGE_BLOCK):
                pair.append(b"", dataset.sequence_lengths[start : start + MERGE_BLOCK], NO_LENGTHS)
            for start in range(0, dataset.num_tokens, MERGE_BLOCK):
                pair.append(dataset.all_tokens[start : start + MERGE_BLOCK].tobytes(), NO_LENGTHS, NO_LENGTHS)
                report(pair.written.tokens)
    return pair.written


def _require_mergeable(datasets: list[IndexedDataset], output_prefix: str, flag: str) -> None:
    """DataError for data sets that cannot be joined, as `merge` says."""
    first = datasets[0]
    for dataset in datasets:
        prefix = dataset.prefix
        without_modes = HEADER.size + 12 * len(dataset) + 8 * len(dataset.document_marks)
        if os.path.getsize(f"{prefix}.idx") != without_modes:
            raise DataError(
                f"{flag} {prefix}: a multimodal data set, whose modes would be lost; merge text data sets only"
            )
        if dataset.dtype != first.dtype:
            raise DataError(
                f"{flag} {prefix}: its tokens are {dataset.dtype}, those of {first.prefix} {first.dtype}; "
                "preprocess both with the same vocabulary"
            )
        if os.path.realpath(f"{prefix}.bin") == os.path.realpath(f"{output_prefix}.bin"):
            raise DataError(f"--output-prefix {output_prefix}: is one of the data sets to merge; choose another name")
