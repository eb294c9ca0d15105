"""What a file is by its first bytes, and the readers of compressed ones."""

import bz2
import gzip
import io
import lzma
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from megatron_lite.errors import DataError, UserError

TABLE = Path(__file__).with_name("file_kinds.tsv")
BUFFER_BYTES = 1 << 20
# Of .zst at a time: they may stand for 32 MiB.
COMPRESSED_BYTES = 1 << 10
HEAD_BYTES = 512


@dataclass(frozen=True)
class FileKind:
    """A row of file_kinds.tsv."""

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
    """What a file that begins with `head` is; None for text, and for what the table does not know."""
    return next((kind for kind in list_file_kinds() if kind.fits(head)), None)


def find_kind_of_name(path: str | Path) -> FileKind | None:
    """The compressed kind that the ending of a file's name promises; None for any other ending."""
    ending = Path(path).suffix.lower()
    return next((kind for kind in list_file_kinds() if kind.reader and ending in kind.endings), None)


def unpack(path: str, packed: IO[bytes], kind: FileKind | None) -> IO[bytes]:
    """`packed`, or what it holds if it is compressed. DataError for a kind that is not read."""
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
    try:
        archive = zipfile.ZipFile(packed)
        files = [member for member in archive.infolist() if not member.is_dir()]
        if len(files) == 1 and not files[0].flag_bits & 1:
            return archive.open(files[0])
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise DataError(f"--input {path}: is a damaged zip archive ({error}); copy the file again") from None
    what = f"a zip archive of {len(files)} files" if len(files) != 1 else "an encrypted zip archive"
    raise DataError(f"--input {path}: is {what}; unpack it first, and give the text files in it")


def import_zstandard(path: str):
    """The package that decompresses the file. UserError if it is missing."""
    try:
        import zstandard
    except ImportError:
        raise UserError(f"--input {path}: the package that reads .zst is missing; pip install zstandard") from None
    return zstandard


class _ZstandardReader(io.RawIOBase):
    """Frame after frame. The package's own stream_reader takes a file that was cut short for a complete one."""

    def __init__(self, path: str, packed):
        self._package, self._packed = import_zstandard(path), packed
        self._frame, self._rest = None, b""  # what is being unpacked, and what follows the frame that ended
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            compressed = self._rest or self._packed.read(COMPRESSED_BYTES)
            if not compressed and self._frame is None:
                return 0
            if not compressed:
                raise EOFError("the file ends before its end-of-stream marker")
            self._frame = self._frame or self._package.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(compressed))
            except self._package.ZstdError as error:
                raise EOFError(str(error)) from None
            self._rest = b""
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size
