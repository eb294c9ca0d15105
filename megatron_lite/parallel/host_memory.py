"""The C library's allocator on a CPU run: keeps large blocks, and keeps what a profiler stores out of their way.

By default glibc gives every large block back to the kernel when it is freed and faults it in again, page by page, at
the next allocation: training on a CPU then spends a large part of each step in page faults.

What is small and stays brings some of them back, where it is cut from a large block while that is free.

A profiler brings back more. torch asks for blocks aligned to 64 bytes; glibc takes a longer one and frees what is left
over at both ends, 32 to 112 bytes. The names of operators, kept until the window's end, are as small and go there: the
block, once freed, is too short for its own size, and the heap grows. glibc up to 2.38 keeps leftovers in a cache of the
thread, which serves the next small request before anything else (sourceware bug 30723).
"""

import ctypes
import os
import sys
from collections import deque
from functools import cache
from itertools import repeat

# glibc's malloc.h
M_MXFAST, M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = 1, -1, -2, -4
KEEP_BYTES = 2**31 - 1
GROW_BY_BYTES = 64 * 2**20
NO_THREAD_CACHE = "glibc.malloc.tcache_count=0"
FIRST_WITHOUT_BUG = (2, 39)
SMALL_BLOCKS = 80_000  # 11 MB; 40,000 were too few in some runs of a GPT of 6 layers, 60,000 enough
# requests that leftovers would serve, and their shares: most names have 16 to 24 bytes
SMALL_BYTES = {24: 0.6, 40: 0.13, 56: 0.13, 72: 0.1, 88: 0.02, 104: 0.02}


def keep_freed_memory() -> bool:
    """Reuse freed memory inside the process; costs resident memory. False where the C library is another."""
    libc = _glibc()
    if libc is None:
        return False
    # M_MXFAST: small blocks that wait to be used again would not be merged with large neighbours
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, KEEP_BYTES), (M_TOP_PAD, GROW_BY_BYTES), (M_MXFAST, 0))
    kept = all(libc.mallopt(name, value) for name, value in settings)
    _keep_small_blocks_apart()
    return kept


def without_thread_cache(environ: dict[str, str], libc: str | None) -> dict[str, str] | None:
    """The environment that a profiled CPU run is to be started in again; None: this one is as good.

    `libc`: "glibc 2.36". glibc reads the setting once, when a process starts.
    """
    name, _, version = (libc or "").partition(" ")
    tunables = environ.get("GLIBC_TUNABLES", "")
    if name != "glibc" or "tcache_count" in tunables or tuple(map(int, version.split(".")[:2])) >= FIRST_WITHOUT_BUG:
        return None
    return {**environ, "GLIBC_TUNABLES": ":".join(filter(None, (tunables, NO_THREAD_CACHE)))}


@cache
def _keep_small_blocks_apart():
    """For as long as the process lives, so once: what is small and stays would go into the place of the freed logits, the largest
    block of a step, which then need another."""
    SmallBlocks().add(SMALL_BLOCKS)


class SmallBlocks:
    """Free small blocks, each between two in use, so that small requests need not take the ends of large blocks."""

    def __init__(self):
        self._between: list[int] = []

    def add(self, count: int):
        """About `count` free ones more; 140 bytes each. Nothing where the C library is another."""
        libc = _glibc()
        for size, share in SMALL_BYTES.items() if libc else ():
            blocks = list(map(libc.malloc, repeat(size, 2 * int(share * count))))
            deque(map(libc.free, blocks[::2]), maxlen=0)
            self._between += blocks[1::2]

    def close(self):
        """Give back what keeps them apart."""
        between, self._between = self._between, []
        if between:
            deque(map(_glibc().free, between), maxlen=0)


def libc_version() -> str | None:
    """Like "glibc 2.36"; None where it is another."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") if sys.platform.startswith("linux") else None
    except (OSError, ValueError):  # musl does not know the name
        return None


def _glibc() -> ctypes.CDLL | None:
    if not libc_version():
        return None
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    return libc
