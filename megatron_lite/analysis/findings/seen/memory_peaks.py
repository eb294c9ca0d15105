"""Whether memory is short at all, and what a category holds."""

from megatron_lite.analysis.findings.seen.headroom import device_bytes
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import GIB

TIGHT = 0.60  # of the device's memory: below, a larger micro-batch is the better use of what is left
LARGE_BYTES = 4 * GIB  # where the device is not known: less fits on any that trains


def is_tight(facts: Facts, one: Snapshot) -> bool:
    """Did it run out, fill most of the device, or (the device unknown) take gigabytes?"""
    if one.oom is not None:
        return True
    room = device_bytes(facts)
    return one.peak_bytes >= (TIGHT * room if room else LARGE_BYTES)


def bytes_of(one: Snapshot, category: str) -> int:
    """Of one category at the peak."""
    return sum(held.num_bytes for held in one.held if held.category == category)
