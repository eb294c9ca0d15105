"""The allocator holds much more memory than tensors use.

Meaning: PyTorch takes memory in segments and cuts them up. Free pieces between live ones cannot
    serve a larger request, and another segment is taken: reserved grows, allocated does not. An
    out-of-memory error can come with gigabytes free.
Measured: reserved against allocated at the moment of the largest reservation in a snapshot;
    whether expandable segments would help is found by replaying the record with them, not by rule
    of thumb.
Cost: the difference. Reserved memory is no leak: it is kept for reuse.
Do: expandable segments where the replay shows a gain; else sizes that repeat: a constant batch
    and length.
Flags: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
False alarm: a peak that was freed a moment before; then the reserve serves the next step.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import MIB, size

CODE = "fragmentation"
TITLE = "memory reserved but not used"
TOO_MUCH, MIN_BYTES = 0.10, 256 * MIB  # of what is reserved; segments of 20 MiB leave some of each free by design
HELPS = 0.05  # of what is reserved, that the replay must save to be worth a word
FLAG = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def find(facts: Facts) -> Finding | None:
    worst = max((one for one in facts.snapshots if not one.simulated), key=_unused, default=None)
    if worst is None:
        return None
    held, unused = worst.fragmentation, _unused(worst)
    if unused < max(TOO_MUCH * held.reserved_bytes, MIN_BYTES):
        return None
    gain = _gain(worst)
    text = (
        f"{size(held.reserved_bytes)} are reserved for tensors of {size(held.allocated_bytes)}: {size(unused)} lie "
        "between them"
    )
    return Finding(
        cost_bytes=unused,
        evidence=(Evidence(text, worst.source), Evidence(_replayed(worst, gain))),
        advice=f"let segments grow: {FLAG}"
        if gain
        else "keep batch and sequence length constant, so that freed pieces fit again",
        flags=(FLAG,) if gain else (),
        gain_bytes=gain,
        certain=gain is not None,
        rank=worst.rank,
    )


def _unused(one: Snapshot) -> int:
    return one.fragmentation.reserved_bytes - one.fragmentation.allocated_bytes


def _gain(one: Snapshot) -> int | None:
    held = one.fragmentation
    if held.expandable or held.replay_reserved_bytes is None:
        return None
    gain = held.reserved_bytes - held.replay_reserved_bytes
    return gain if gain >= HELPS * held.reserved_bytes else None


def _replayed(one: Snapshot, gain: int | None) -> str:
    held = one.fragmentation
    if held.expandable:
        return "expandable segments were on"
    if held.replay_reserved_bytes is None:
        return "the record cannot be replayed, so that nothing is known of expandable segments"
    verdict = f"save {size(gain)}" if gain else "not help"
    return (
        f"replayed with expandable segments {size(held.replay_reserved_bytes)} would be reserved: they would {verdict}"
    )
