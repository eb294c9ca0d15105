"""Text and jsonl files, compressed or not, in pieces of bounded size."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.data.compression import ByteStream, unpack
from megatron_lite.data.text_content import BYTE_ORDER_MARK, UNREADABLE, TextContent, explain_unreadable
from megatron_lite.shared_files import open_foreign
from megatron_lite.units import MIB

CHUNK_BYTES = 1 << 20
END_OF_TEXT = "<|endoftext|>"


def replace_lone_surrogates(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair that stands alone, which UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@dataclass(frozen=True)
class InputPosition:
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
    end: InputPosition
    bytes_read: int  # of all files as they lie on the disk, up to about here
    mistake: str | None = None  # instead of `raw`, of which there is more than may be


def chunks(
    inputs: Sequence[str | Path], contents: Sequence[TextContent], start: InputPosition, max_document_mb: int
) -> Iterator[Chunk]:
    """All text that lies behind a place in the input.

    Args:
        inputs: Paths of the files.
        contents: What each of them holds.
        start: The place.
        max_document_mb: MiB of the longest line, or file that is one document; a longer one is a chunk with a mistake.

    Raises:
        DataError: A file cannot be read or decompressed.
    """
    limit = max_document_mb * MIB
    too_long = f"is longer than {max_document_mb} MiB; check the file, or raise --max-document-mb"
    before = sum(os.path.getsize(path) for path in inputs[: start.file])
    for number in range(start.file, len(inputs)):
        path = str(inputs[number])
        content = contents[number]
        here = start if number == start.file else InputPosition(number)
        try:
            with open_foreign(path) as packed, closing(unpack(path, packed, content.kind)) as file:
                if content.is_jsonl:
                    for raw, end in _blocks_of_lines(file, here, limit):
                        mistake = None if raw else f"{path}:{here.line}: the line {too_long}"
                        if here.offset == 0:
                            raw = raw.removeprefix(BYTE_ORDER_MARK)
                        yield Chunk(path, here.line, raw, end, before + packed.tell(), mistake)
                        here = end
                else:
                    raw = file.read(limit + 1)
                    mistake = None
                    if len(raw) > limit:
                        mistake = f"{path}: the document {too_long}"
                        raw = b""
                    raw = raw.removeprefix(BYTE_ORDER_MARK)
                    yield Chunk(path, None, raw, InputPosition(number + 1), before + packed.tell(), mistake)
        except UNREADABLE as error:
            raise explain_unreadable(path, error) from None
        before += os.path.getsize(path)


def _blocks_of_lines(file: ByteStream, here: InputPosition, limit: int) -> Iterator[tuple[bytes, InputPosition]]:
    """Whole lines from a place in a file on.

    Args:
        file: Opened at its beginning.
        here: The place.
        limit: Bytes of the longest line.

    Yields:
        Lines, and the place behind them; b"" for a line that is too long, which is never held as a whole.
    """
    if file.seekable():
        file.seek(here.offset)
    else:
        _skip(file, here.offset)
    while raw := file.read(CHUNK_BYTES):
        whole = raw.rfind(b"\n") + 1
        last = raw[whole:]
        if last:
            last += file.readline(limit + 1 - len(last))
        is_too_long = len(last) > limit
        raw = raw[:whole] if is_too_long else raw[:whole] + last
        if raw:
            here = InputPosition(here.file, here.offset + len(raw), here.line + raw.count(b"\n"))
            yield raw, here
        if is_too_long:
            length = len(last)
            while last and not last.endswith(b"\n"):
                last = file.readline(CHUNK_BYTES)
                length += len(last)
            here = InputPosition(here.file, here.offset + length, here.line + 1)
            yield b"", here


def _skip(file: ByteStream, num_bytes: int) -> None:
    """Read past so many bytes of a file that cannot be sought in, or to its end."""
    left = num_bytes
    while left:
        skipped = len(file.read(min(left, CHUNK_BYTES)))
        if not skipped:
            return
        left -= skipped
