"""The predicted peak of tensors beside the measured one."""

import math

from megatron_lite.analysis.facts import Facts
from megatron_lite.analysis.findings.seen.planned import part
from megatron_lite.analysis.memory.figures import Snapshot
from megatron_lite.analysis.predicted.figures import Compared, ComparedMemory
from megatron_lite.estimate.memory_categories import CATEGORIES
from megatron_lite.estimate.prediction import MemoryPrediction, Moment
from megatron_lite.run_folder import STEPS_FILE
from megatron_lite.units import size


def compared_memory(facts: Facts, predicted: MemoryPrediction) -> tuple[ComparedMemory | None, list[str]]:
    """(the comparison, why there is none or what it lacks). A snapshot tells most; the allocator's counter knows the peak."""
    snapshot, peak = facts.highest_snapshot, predicted.peak
    if snapshot is not None and snapshot.oom is not None:
        return None, [
            f"memory ran out before its peak, which was predicted as {size(peak.num_bytes)} at {where(peak)}."
        ]
    if snapshot is not None:
        return _with_snapshot(snapshot, peak)
    return _with_counter(facts, peak)


def where(moment: Moment) -> str:
    """'cross entropy (forward)'."""
    return f"{moment.where} ({moment.phase})"


def _with_snapshot(snapshot: Snapshot, peak: Moment) -> tuple[ComparedMemory, list[str]]:
    measured = {held.category: held.requested_bytes for held in snapshot.held}
    whole = sum(measured.values())
    notes = (
        []
        if snapshot.complete
        else [
            f"{snapshot.source} began late, and does not know the categories of all that it holds: only the peaks are compared."
        ]
    )
    return ComparedMemory(
        peak=Compared("peak of tensors", peak.num_bytes, whole),
        categories=_categories(peak, measured) if snapshot.complete else (),
        source=snapshot.source,
        rank=snapshot.rank,
        predicted_at=where(peak),
        measured_in=snapshot.peak_phase,
    ), notes


def _categories(peak: Moment, measured: dict[str, int]) -> tuple[Compared, ...]:
    expected = {
        category: sum(row.num_bytes for row in peak.rows if row.category == category) for category in CATEGORIES
    }
    return tuple(
        Compared(category, expected[category], measured.get(category, 0))
        for category in CATEGORIES
        if expected[category] or measured.get(category)
    )


def _with_counter(facts: Facts, peak: Moment) -> tuple[ComparedMemory | None, list[str]]:
    run = facts.run
    if facts.plan.get("device") != "cuda":
        return None, [
            "predicted memory is that of tensors, which a run on CPUs measures with --record-memory-history only."
        ]
    known = [value for value in run.peak_memory_bytes if math.isfinite(value) and value > 0]
    if not known:
        return None, [f"{STEPS_FILE} holds no peak of GPU memory: nothing to hold the prediction against."]
    rank = part(facts, "world", "rank")
    return ComparedMemory(
        peak=Compared("peak of tensors", peak.num_bytes, max(known)),
        categories=(),
        source=STEPS_FILE,
        rank=rank if isinstance(rank, int) else None,
        predicted_at=where(peak),
        measured_in="",
    ), []
