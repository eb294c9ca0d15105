"""The C library's allocator, told to keep large blocks on a CPU run.

By default glibc gives every large block back to the kernel when it is freed and faults it in again, page by page, at
the next allocation: training on a CPU then spends a large part of each step in page faults.
"""

import ctypes
import sys

# glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
KEEP_BYTES = 2**31 - 1
GROW_BY_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Reuse freed memory inside the process; costs resident memory. False where the C library is another."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, KEEP_BYTES), (M_TOP_PAD, GROW_BY_BYTES))
    return all(mallopt(name, value) for name, value in settings)
