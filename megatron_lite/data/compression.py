"""Tells what a file is by its first bytes, and reads compressed ones."""

import bz2
import gzip
import io
import lzma
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Protocol

from megatron_lite.errors import DataError, UserError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from zstandard import ZstdDecompressionObj

TABLE = Path(__file__).with_name("file_kinds.tsv")
BUFFER_BYTES = 1 << 20
# Of .zst at a time: they may stand for 32 MiB.
COMPRESSED_BYTES = 1 << 10
HEAD_BYTES = 512


class ByteStream(Protocol):
    """An opened file, compressed or not: the methods that readers of text use."""

    def read(self, size: int, /) -> bytes: ...

    def readline(self, size: int, /) -> bytes: ...

    def seekable(self) -> bool: ...

    def seek(self, offset: int, /) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class FileKind:
    """A kind of files: a row of file_kinds.tsv."""

    name: str
    offset: int
    magic: bytes
    reader: str  # what unpacks it; empty: nothing here does
    endings: tuple[str, ...]  # of names
    remedy: str

    def fits(self, head: bytes) -> bool:
        """Whether a file that begins with `head` is one."""
        return head.startswith(self.magic, self.offset)


@cache
def list_file_kinds() -> tuple[FileKind, ...]:
    """All rows of the table."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = [line.split("\t") for line in lines[1:]]
    return tuple(
        FileKind(name, int(offset), bytes.fromhex(magic), reader, tuple(endings.split()), remedy)
        for name, offset, magic, reader, endings, remedy in rows
    )


def find_kind(head: bytes) -> FileKind | None:
    """The kind of a file that begins with `head`; None for text, and for what the table does not know."""
    return next((kind for kind in list_file_kinds() if kind.fits(head)), None)


def find_kind_of_name(path: str | Path) -> FileKind | None:
    """The compressed kind that the ending of a file's name promises; None for any other ending."""
    ending = Path(path).suffix.lower()
    return next((kind for kind in list_file_kinds() if kind.reader and ending in kind.endings), None)


def unpack(path: str, packed: IO[bytes], kind: FileKind | None) -> ByteStream:
    """`packed`, or what it holds if it is compressed.

    Args:
        path: Path of the file, for messages.
        packed: The opened file.
        kind: Kind of its compression; None: it has none.

    Raises:
        DataError: The kind is not read.
    """
    if kind is None:
        return packed
    if kind.reader == "gzip":
        return gzip.GzipFile(fileobj=packed)
    if kind.reader == "bzip2":
        return bz2.BZ2File(packed)
    if kind.reader == "xz":
        return lzma.LZMAFile(packed)
    if kind.reader == "zstandard":
        return io.BufferedReader(_ZstandardReader(path, packed), BUFFER_BYTES)
    if kind.reader == "zip":
        return _open_only_member(path, packed)
    raise DataError(f"--input {path}: is {kind.name}, which is not read; {kind.remedy}")


def _open_only_member(path: str, packed: IO[bytes]) -> IO[bytes]:
    """The one file in a zip archive. DataError for an archive that is damaged, encrypted or of several files."""
    try:
        archive = zipfile.ZipFile(packed)
        files = [member for member in archive.infolist() if not member.is_dir()]
        if len(files) == 1 and not files[0].flag_bits & 1:
            return archive.open(files[0])
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise DataError(f"--input {path}: is a damaged zip archive ({error}); copy the file again") from None
    what = "an encrypted zip archive" if len(files) == 1 else f"a zip archive of {len(files)} files"
    raise DataError(f"--input {path}: is {what}; unpack it first, and give the text files in it")


def import_zstandard(path: str) -> ModuleType:
    """The package that decompresses the file. UserError if it is missing."""
    try:
        import zstandard
    except ImportError:
        raise UserError(f"--input {path}: the package that reads .zst is missing; pip install zstandard") from None
    return zstandard


class _ZstandardReader(io.RawIOBase):
    """Frame after frame. The package's own stream_reader takes a file that was cut short for a complete one."""

    def __init__(self, path: str, packed: IO[bytes]):
        """
        Args:
            path: Path of the file, for messages.
            packed: The opened file.

        Raises:
            UserError: The package that decompresses it is missing.
        """
        self._package = import_zstandard(path)
        self._packed = packed
        self._frame: ZstdDecompressionObj | None = None  # the one that is being unpacked
        self._rest = b""  # what follows the frame that ended
        self._ready = memoryview(b"")  # unpacked, and not read yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        while not self._ready:
            compressed = self._rest or self._packed.read(COMPRESSED_BYTES)
            if not compressed and self._frame is None:
                return 0
            if not compressed:
                raise EOFError("the file ends before its end-of-stream marker")
            self._rest = b""
            self._unpack(compressed)
        target = memoryview(buffer).cast("B")
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def _unpack(self, compressed: bytes) -> None:
        """Unpack the next bytes of the file. EOFError for what is damaged."""
        frame: ZstdDecompressionObj = self._frame or self._package.ZstdDecompressor().decompressobj()
        try:
            self._ready = memoryview(frame.decompress(compressed))
        except self._package.ZstdError as error:
            raise EOFError(str(error)) from None
        self._frame = frame
        if frame.eof:
            self._rest = frame.unused_data
            self._frame = None
