"""A .bin/.idx pair while it is being written: files beside the final ones, which take their names at the end.

Lengths and marks go to files of their own until then, so that memory stays the same however many documents there are.
"""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_lite.data.index_format import write_index
from megatron_lite.errors import DataError


class Written(NamedTuple):
    """How much a pair holds."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class PairWriter:
    """Appends to PREFIX.{bin,lengths,marks}ENDING; complete() and place() make PREFIX.bin and PREFIX.idx of them.

    Every failure to write is a DataError; discard() or close() is for the caller to call then.
    """

    def __init__(self, prefix: str, dtype: np.dtype, ending: str):
        self.prefix, self.dtype = str(prefix), dtype
        self.written = Written()
        self._paths = {part: f"{self.prefix}.{part}{ending}" for part in ("bin", "lengths", "marks", "idx")}
        self._files = {}

    def open(self) -> None:
        """Open the files, keeping what they hold; to be followed by cut(). DataError if another run has them open."""
        with self._writing():
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            for part in ("bin", "lengths", "marks"):
                self._files[part] = open(self._paths[part], "wb", opener=_open_as_it_is)
                _lock(self._files[part], self.prefix)

    def holds(self, written: Written) -> bool:
        """Are the files long enough to go on from there?"""
        sizes = self._sizes(written)
        return all(os.path.getsize(self._paths[part]) >= size for part, size in sizes.items())

    def cut(self, written: Written) -> None:
        """Drop all that was appended later."""
        with self._writing():
            for part, size in self._sizes(written).items():
                self._files[part].truncate(size)
                self._files[part].seek(size)
        self.written = written

    def append(self, tokens, lengths: np.ndarray, ends: np.ndarray) -> None:
        """Add sequences and documents.

        tokens: the bytes of their ids in dtype; lengths: int32 [sequences], in tokens; ends: int64 [documents], the
        number of these sequences up to the end of each document.
        """
        with self._writing():
            self._files["bin"].write(tokens)
            self._files["lengths"].write(lengths.astype("<i4", copy=False).tobytes())
            self._files["marks"].write((ends + self.written.sequences).astype("<i8", copy=False).tobytes())
        num_tokens = len(tokens) // self.dtype.itemsize
        before = self.written
        self.written = Written(
            before.tokens + num_tokens, before.sequences + len(lengths), before.documents + len(ends)
        )

    def sync(self) -> None:
        """Bring all that was appended to the disk."""
        with self._writing():
            for file in self._files.values():
                _flush(file)

    def complete(self) -> None:
        """Write the .idx, still under another name. DataError if there is no token."""
        if not self.written.tokens:
            raise DataError(f"{self.prefix}: not a single token to write; check the input files and --json-keys")
        self.sync()
        with self._writing(), open(self._paths["idx"], "wb") as index:
            with open(self._paths["lengths"], "rb") as lengths, open(self._paths["marks"], "rb") as marks:
                write_index(index, self.dtype, self.written.sequences, self.written.documents, lengths, marks)
            _flush(index)

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
        sizes = (written.tokens * self.dtype.itemsize, written.sequences * 4, written.documents * 8)
        return dict(zip(("bin", "lengths", "marks"), sizes))

    @contextlib.contextmanager
    def _writing(self):
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{self.prefix}: cannot be written ({error.strerror}); free some space or choose another output"
            ) from None


def _open_as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def _lock(file, prefix: str) -> None:
    """DataError if another run holds the file, or has just renamed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    except (BlockingIOError, FileNotFoundError):
        same = False
    except OSError:
        return  # a file system without locks
    if not same:
        raise DataError(f"{prefix}: another run is writing it; wait for that one or choose another output")


def _flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())
