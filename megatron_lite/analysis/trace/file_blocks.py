"""The bytes of a trace's file, plain or gzipped, block by block."""

import contextlib
import queue
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_lite.analysis.trace.columns import TraceError
from megatron_lite.shared_files import open_foreign

BLOCK_BYTES = 1 << 20  # events of a larger one do not fit the caches: 20 to 40% slower
GZIP_MAGIC = b"\x1f\x8b"
_SMALL_BYTES = 64


def first_bytes(path: Path, count: int) -> bytes:
    """The beginning of the file's text, unzipped; less than `count` where it is shorter or damaged."""
    with open_foreign(path) as file:
        text = file.read(count)
    return zlib.decompressobj(wbits=31).decompress(text, count) if text.startswith(GZIP_MAGIC) else text


class FileBlocks:
    """Iterates over the text of a file. After it: `damage`, a sentence or None.

    bytes_read: of the file as it lies on the disk.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES):
        self.path = path
        self.block_bytes = block_bytes
        self.damage: str | None = None
        self.bytes_read = 0

    def __iter__(self) -> Iterator[bytes]:
        """The text of the file, plain or gzipped."""
        try:
            with open_foreign(self.path) as file:
                zipped = file.read(2) == GZIP_MAGIC
                file.seek(0)
                if zipped:
                    yield from read_ahead(self._unzip(file))
                    return
                while block := file.read(self.block_bytes):
                    self.bytes_read += len(block)
                    yield block
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror or error}; is this the right file?") from None

    def _unzip(self, file: BinaryIO) -> Iterator[bytes]:
        read = 0
        stream = zlib.decompressobj(wbits=31)
        while zipped := stream.unconsumed_tail or file.read(self.block_bytes // 8):
            before = stream.copy()
            try:
                text = stream.decompress(zipped, self.block_bytes)
            except zlib.error:
                pieces = []
                with contextlib.suppress(zlib.error):
                    for at in range(0, len(zipped), _SMALL_BYTES):
                        pieces.append(before.decompress(zipped[at : at + _SMALL_BYTES]))
                text = b"".join(pieces)
                where = f"after {read + len(text):,} bytes of text"
                self.damage = f"the gzip data is damaged {where}; what precedes it was read"
                yield text
                return
            read += len(text)
            self.bytes_read = file.tell()
            if text:
                yield text
            if stream.eof:  # gzip files may be several, one after the other
                left = stream.unused_data.lstrip(b"\0")
                stream = zlib.decompressobj(wbits=31)
                if not left:
                    left = file.read(self.block_bytes // 8)
                if not left.startswith(GZIP_MAGIC):
                    return
                file.seek(-len(left), 1)
        if not stream.eof:
            self.damage = f"the gzip file ends early, after {read:,} bytes of text; what precedes it was read"


def read_ahead(blocks: Iterator[bytes], most: int = 4) -> Iterator[bytes]:
    """The same blocks, made by a thread of their own while the last ones are worked on:
    unzipping leaves Python's lock."""
    made: queue.Queue[bytes | BaseException | None] = queue.Queue(maxsize=most)
    given_up = threading.Event()

    def make() -> None:
        try:
            for block in blocks:
                made.put(block)
                if given_up.is_set():
                    return
            made.put(None)
        except BaseException as error:  # noqa: BLE001  raised again where the blocks are wanted
            made.put(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while (block := made.get()) is not None:
            if isinstance(block, BaseException):
                raise block
            yield block
    finally:
        given_up.set()
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                made.get(timeout=0.01)
