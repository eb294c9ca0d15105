"""The allocator holds much more memory than tensors use.

Meaning: PyTorch takes memory in segments and cuts them up. Free pieces between live ones cannot serve a larger
    request, and another segment is taken: reserved grows, allocated does not. An out-of-memory error can come with
    gigabytes free.
Measured: reserved against allocated at the moment of the largest reservation in a snapshot; whether expandable
    segments would help is found by replaying the record with them, not by rule of thumb.
Cost: the difference. Reserved memory is no leak: it is kept for reuse.
Do: expandable segments where the replay shows a gain; else sizes that repeat: a constant batch and length.
Flags: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
False alarm: a peak that was freed a moment before; then the reserve serves the next step.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, find_lost_memory
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import MIB, size

CODE, TITLE = "fragmentation", "memory reserved but not used"
TOO_MUCH, MIN_BYTES = 0.10, 256 * MIB  # of what is reserved; segments of 20 MiB leave some of each free by design
HELPS = 0.05  # of what is reserved, that the replay must save to be worth a word
FLAG = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def find(facts: Facts) -> Finding | None:
    real = [(one.fragmentation, one) for one in facts.snapshots if not one.simulated]
    held, worst = max(real, key=lambda pair: pair[0].reserved_bytes - pair[0].allocated_bytes, default=(None, None))
    if held is None:
        return None
    reserved, replayed = held.reserved_bytes, held.replay_reserved_bytes
    unused, gain = reserved - held.allocated_bytes, None
    if unused < max(TOO_MUCH * reserved, MIN_BYTES):
        return None
    if held.expandable:
        told = "expandable segments were on"
    elif replayed is None:
        told = "the record cannot be replayed, so that nothing is known of expandable segments"
    else:
        gain = reserved - replayed if reserved - replayed >= HELPS * reserved else None
        would = f"save {size(gain)}" if gain else "not help"
        told = f"replayed with expandable segments {size(replayed)} would be reserved: they would {would}"
    text = f"{size(reserved)} are reserved for tensors of {size(held.allocated_bytes)}: {size(unused)} lie between them"
    advice = (
        f"let segments grow: {FLAG}"
        if gain
        else "keep batch and sequence length constant, so that freed pieces fit again"
    )
    return find_lost_memory(
        worst, unused, gain, text, advice, Evidence(told), flags=(FLAG,) if gain else (), certain=gain is not None
    )
