"""A trace on its way to disk: whole under its name or not at all, and looked at before it is called a trace."""

import contextlib
import gzip
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.units import MIB

LARGE = 16 * MIB  # from here on a trace is compressed unless the flags say otherwise: JSON shrinks about 15-fold
CHUNK, OVERLAP = 4 * MIB, 4096
STEP = re.compile(rb'"ProfilerStep#(\d+)"')
KERNEL = re.compile(rb'"cat": ?"kernel"')
ENDING = re.compile(rb"[}\]]\s*\Z")


class LostFile(OSError):
    """What was to be written could not be, and nothing lies there."""


@dataclass(frozen=True)
class Found:
    """What a trace holds, read from the file itself."""

    steps: tuple[int, ...]
    kernels: int
    whole: bool


def inspect_trace(path: Path) -> Found:
    """Steps and GPU kernels of a Kineto trace that is not compressed, without parsing it: gigabytes take seconds."""
    steps, kernels, kept = set(), 0, b""
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            text = kept + chunk
            steps |= {int(number) for number in STEP.findall(text)}
            kernels += len(KERNEL.findall(text)) - len(KERNEL.findall(kept))  # what was kept was counted before
            kept = text[-OVERLAP:]
    return Found(tuple(sorted(steps)), kernels, bool(ENDING.search(kept)))


def write_whole(path: Path, write, compress: bool | None = False) -> tuple[Path, Found]:
    """Let `write(name)` fill a hidden file, look into it, compress it (None: if it is large), give it its name.

    Returns where it lies (with .gz if compressed) and what is in it. LostFile if the disk is full, or the like.
    """
    hidden = path.with_name(f".{path.name}.unfinished")
    with _removed_if_lost(path, hidden):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(hidden))
        if not hidden.exists():  # torch writes to a name of its own first, and says nothing when that fails
            raise LostFile("nothing was written: no room on the disk?")
        found = inspect_trace(hidden)
        if not found.whole:
            raise LostFile(f"the file broke off after {hidden.stat().st_size / MIB:.1f} MiB: no room on the disk?")
        if compress or (compress is None and hidden.stat().st_size >= LARGE):
            packed = hidden.with_name(f"{hidden.name}.gz")
            # level 1 is nearly as small as level 9 on traces, and several times faster
            with open(hidden, "rb") as plain, gzip.open(packed, "wb", compresslevel=1) as file:
                shutil.copyfileobj(plain, file, CHUNK)
            hidden.unlink()
            hidden, path = packed, path.with_name(f"{path.name}.gz")
        os.replace(hidden, path)
        return path, found


def write_text(path: Path, text: str):
    """A small file, whole or not at all. LostFile likewise."""
    hidden = path.with_name(f".{path.name}.unfinished")
    with _removed_if_lost(path, hidden):
        hidden.write_text(text, encoding="utf-8")
        os.replace(hidden, path)


@contextlib.contextmanager
def _removed_if_lost(path: Path, hidden: Path):
    try:
        yield
    except (OSError, RuntimeError) as error:  # RuntimeError: how torch's C++ says that it cannot write
        with contextlib.suppress(OSError):
            for left in [name for name in path.parent.iterdir() if name.name.startswith(hidden.name)]:
                left.unlink()  # also what torch itself names .tmp, and what was half compressed
        raise LostFile(f"{path}: {error}") from error
