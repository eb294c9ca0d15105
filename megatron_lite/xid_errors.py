"""Xid errors, as NVIDIA's driver numbers what befalls a GPU.

Names and causes: docs.nvidia.com/deploy/xid-errors, whose table lists for each number whether hardware, the driver or
the program of the user may have made it.
"""

from collections.abc import Sequence

# a kernel that reads outside of its memory makes 13 and 31, a process that ends while its kernels run 43 and 45
XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45})
XID_NAMES = {
    13: "graphics engine exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "preemptive cleanup",
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "ECC page retirement or row remapping",
    64: "ECC page retirement failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high single-bit ECC error rate",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP RPC timeout",
    120: "GSP error",
}


def is_of_hardware(xid: int | None) -> bool:
    """Whether an Xid is known, and known as one that no program makes. xid: its number; None for unknown."""
    return xid in XID_NAMES and xid not in XIDS_OF_PROGRAMS


def choose_most_telling(xids: Sequence[int]) -> int | None:
    """Choose the Xid that tells most: the last one that no program makes, else the last one; None of none.

    After a GPU has failed, the driver tells of each process that it ends there (Xid 45).

    Args:
        xids: Numbers of events, in their order.
    """
    of_hardware = [xid for xid in xids if is_of_hardware(xid)]
    return next(reversed(of_hardware or xids), None)
