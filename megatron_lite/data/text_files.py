"""Text and jsonl files, compressed or not, in pieces of bounded size."""

import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.errors import DataError, UserError
from megatron_lite.units import MIB

CHUNK_BYTES = 1 << 20
COMPRESSED_BYTES = 1 << 10  # of .zst at a time: they may stand for 32 MiB
JSON_LINES = (".jsonl", ".json")  # Megatron's "loose json" goes by either name
COMPRESSED = (".gz", ".zst")
END_OF_TEXT = "<|endoftext|>"


def replace_lone_surrogates(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair that stands alone, which UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@dataclass(frozen=True)
class Place:
    """A place in the input: the number of the file, the bytes before it (decompressed) and the number of its line."""

    file: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class Chunk:
    """Whole lines of a jsonl file, or the one document that any other file is."""

    path: str
    first_line: int | None  # None: one document
    raw: bytes
    end: Place
    bytes_read: int  # of all files as they lie on the disk, up to about here
    mistake: str | None = None  # instead of `raw`, of which there is more than may be


def is_jsonl(path: str | Path) -> bool:
    """Whether the file holds one object a line."""
    path = Path(path)
    return Path(path.stem if path.suffix in COMPRESSED else path.name).suffix in JSON_LINES


def chunks(inputs: Sequence[str | Path], start: Place, max_document_mb: int) -> Iterator[Chunk]:
    """All that lies behind `start`. DataError for a file that cannot be read or decompressed.

    A line, or a file that is one document, of more than max_document_mb MiB (at least one) is a chunk with a mistake.
    """
    limit = max_document_mb * MIB
    too_long = f"is longer than {max_document_mb} MiB; check the file, or raise --max-document-mb"
    before = sum(os.path.getsize(path) for path in inputs[: start.file])
    for number in range(start.file, len(inputs)):
        path = str(inputs[number])
        here = start if number == start.file else Place(number)
        try:
            with open(path, "rb") as packed, closing(_unpack(path, packed)) as file:
                if is_jsonl(path):
                    for raw, end in _blocks_of_lines(file, here, limit):
                        mistake = None if raw else f"{path}:{here.line}: the line {too_long}"
                        yield Chunk(path, here.line, raw, end, before + packed.tell(), mistake)
                        here = end
                else:
                    raw, end = file.read(limit + 1), Place(number + 1)
                    mistake = f"{path}: the document {too_long}" if len(raw) > limit else None
                    yield Chunk(path, None, b"" if mistake else raw, end, before + packed.tell(), mistake)
        except (OSError, EOFError, zlib.error) as error:
            why = getattr(error, "strerror", None) or error
            raise DataError(
                f"--input {path}: cannot be read ({why}); check its permissions, or copy the file again"
            ) from None
        before += os.path.getsize(path)


def _blocks_of_lines(file, here: Place, limit: int) -> Iterator[tuple[bytes, Place]]:
    """(whole lines, the place behind them); b"" for a line of more than `limit` bytes, which is never held as a whole."""
    if file.seekable():
        file.seek(here.offset)
    else:
        left = here.offset
        while left and (skipped := len(file.read(min(left, CHUNK_BYTES)))):
            left -= skipped
    while raw := file.read(CHUNK_BYTES):
        whole = raw.rfind(b"\n") + 1
        last = raw[whole:]
        if last:
            last += file.readline(limit + 1 - len(last))
        is_too_long = len(last) > limit
        raw = raw[:whole] if is_too_long else raw[:whole] + last
        if raw:
            here = Place(here.file, here.offset + len(raw), here.line + raw.count(b"\n"))
            yield raw, here
        if is_too_long:
            length = len(last)
            while last and not last.endswith(b"\n"):
                last = file.readline(CHUNK_BYTES)
                length += len(last)
            here = Place(here.file, here.offset + length, here.line + 1)
            yield b"", here


def _unpack(path: str, packed):
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=packed)
    if path.endswith(".zst"):
        return io.BufferedReader(_ZstandardReader(path, packed), CHUNK_BYTES)
    return packed


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
