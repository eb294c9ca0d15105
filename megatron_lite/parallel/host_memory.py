"""The C library's allocator on a CPU run: keeps large blocks.

By default glibc gives every large block back to the kernel when it is freed and faults it in again, page by page, at
the next allocation: training on a CPU then spends a large part of each step in page faults.
"""

import ctypes
import os
import sys

# glibc's malloc.h
M_MXFAST, M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = 1, -1, -2, -4
KEEP_BYTES = 2**31 - 1
GROW_BY_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Reuse freed memory inside the process; costs resident memory. False where the C library is another."""
    try:
        if not (sys.platform.startswith("linux") and os.confstr("CS_GNU_LIBC_VERSION")):
            return False
    except (OSError, ValueError):  # musl does not know the name
        return False
    libc = ctypes.CDLL(None)
    # M_MXFAST: small blocks that wait to be used again would not be merged with large neighbours
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, KEEP_BYTES), (M_TOP_PAD, GROW_BY_BYTES), (M_MXFAST, 0))
    return all(libc.mallopt(name, value) for name, value in settings)
