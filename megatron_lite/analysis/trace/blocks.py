"""The bytes of a trace file in blocks, plain or gzipped: no file is ever held as a whole."""

import contextlib
import queue
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

from megatron_lite.analysis.trace.columns import TraceError

BLOCK_BYTES = 1 << 20  # events of a larger one do not fit the caches: 20 to 40% slower
_SMALL_BYTES = 64
GZIP_MAGIC = b"\x1f\x8b"


class Blocks:
    """Iterates over the text of `path`. After it, `damage` says in a sentence why there was no more, or is None.

    bytes_read: of the file as it lies on the disk.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES):
        self.path, self.block_bytes, self.damage, self.bytes_read = path, block_bytes, None, 0

    def __iter__(self) -> Iterator[bytes]:
        try:
            with open(self.path, "rb") as file:
                zipped = file.read(2) == GZIP_MAGIC
                file.seek(0)
                yield from ahead(self._unzipped(file)) if zipped else self._plain(file)
        except OSError as error:
            raise TraceError(f"{self.path}: {error.strerror or error}; is this the right file?") from None

    def _plain(self, file) -> Iterator[bytes]:
        while block := file.read(self.block_bytes):
            self.bytes_read += len(block)
            yield block

    def _unzipped(self, file) -> Iterator[bytes]:
        read, stream = 0, zlib.decompressobj(wbits=31)
        while zipped := stream.unconsumed_tail or file.read(self.block_bytes // 8):
            before = stream.copy()
            try:
                text = stream.decompress(zipped, self.block_bytes)
            except zlib.error:
                text = _until_damage(before, zipped)
                self.damage = (
                    f"the gzip data is damaged after {read + len(text):,} bytes of text; what stands before it was read"
                )
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
            self.damage = f"the gzip file ends early, after {read:,} bytes of text; what stands before it was read"


def ahead(blocks: Iterator[bytes], most: int = 4) -> Iterator[bytes]:
    """The same blocks, made by a thread of their own while the last ones are worked on: unzipping leaves Python's lock."""
    made, given_up = queue.Queue(maxsize=most), threading.Event()

    def make():
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


def _until_damage(stream, zipped: bytes) -> bytes:
    """What can still be unzipped."""
    pieces = []
    with contextlib.suppress(zlib.error):
        for at in range(0, len(zipped), _SMALL_BYTES):
            pieces.append(stream.decompress(zipped[at : at + _SMALL_BYTES]))
    return b"".join(pieces)


def first_bytes(path: Path, count: int) -> bytes:
    """The beginning of the file's text, unzipped; less than `count` where it is shorter or damaged."""
    with open(path, "rb") as file:
        text = file.read(count)
    return zlib.decompressobj(wbits=31).decompress(text, count) if text.startswith(GZIP_MAGIC) else text
