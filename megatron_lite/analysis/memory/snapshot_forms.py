"""Forms in which a file holds a memory snapshot, by its first bytes; and packed files as they are inside.

Nothing here needs numpy: reports of traces look at files, too.
"""

import contextlib
import importlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from megatron_lite.plain_pickles import PICKLE
from megatron_lite.shared_files import open_foreign

# --- how a file is packed

# First bytes of a packed file, and what unpacks it by hand.
PACKINGS = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
}
ZIP = b"PK\x03\x04"
# Modules that unpack a form; the first that is installed does. zstd is in Python's library since 3.14.
UNPACKERS = {"gzip": ("gzip",), "bzip2": ("bz2",), "xz": ("lzma",), "zstd": ("compression.zstd", "zstandard")}
IN_ZIP = re.compile(r"(^|/)data\.pkl$|\.(pickle|pkl|json)$")  # torch.save calls it data.pkl


class CannotUnpackError(Exception):
    """A packed file that cannot be unpacked here; the text says what to do."""


def find_packing(head: bytes) -> str:
    """The packing of a file that begins with `head`: gzip, bzip2, xz, zstd, zip; "" for none."""
    names = [name for magic, (name, _) in PACKINGS.items() if head.startswith(magic)]
    return "zip" if head.startswith(ZIP) else "".join(names)


@contextlib.contextmanager
def open_unpacked(path: Path, packing: str) -> Iterator[IO[bytes]]:
    """The content of the file `path` that is packed so. Raises CannotUnpackError."""
    if packing == "zip":
        with open_foreign(path) as whole, zipfile.ZipFile(whole) as archive:
            inside = [info for info in archive.infolist() if IN_ZIP.search(info.filename)]
            if not inside:
                raise CannotUnpackError("a zip file without a snapshot in it")
            with archive.open(max(inside, key=lambda info: info.file_size)) as file:
                yield file
        return
    for name in UNPACKERS[packing]:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        with open_foreign(path) as whole, module.open(whole, "rb") as file:
            yield file
        return
    command = next(command for kind, command in PACKINGS.values() if kind == packing)
    raise CannotUnpackError(f"packed with {packing}, which this Python cannot unpack; unpack it first: {command}")


def read_beginning(path: Path, packing: str, count: int) -> bytes:
    """Read the beginning of a file's content, as it is inside.

    Args:
        path: The file.
        packing: How it is packed.
        count: Bytes to read.

    Raises:
        CannotUnpackError: The file cannot be unpacked, or is damaged.
    """
    try:
        with open_unpacked(path, packing) as file:
            return file.read(count)
    except (CannotUnpackError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise CannotUnpackError(str(error)) from None
    except Exception as error:  # noqa: BLE001 - each library has errors of its own for damaged data
        raise CannotUnpackError(f"damaged {packing} data ({type(error).__name__})") from None


# --- what a file's beginning says of its form

# what `python -m torch.cuda._memory_viz trace_plot` writes
PAGE = re.compile(rb"\s*<!DOCTYPE html>.{0,4096}add_local_files", re.DOTALL)


def is_snapshot_beginning(head: bytes) -> bool:
    """Whether a pickle, JSON text or page that begins with `head` (a megabyte of it) holds a snapshot."""
    if head.lstrip().startswith(b"<"):
        # other pages, such as a report of this program, may speak of segments and blocks
        return PAGE.match(head) is not None
    if b"device_traces" in head or b"segments" in head and (b"blocks" in head or PICKLE.match(head) is not None):
        return True
    # torch.cuda.memory_snapshot() is a list of segments
    return all(word in head for word in (b"total_size", b"blocks", b"active_size"))
