"""How much memory is left, and whether a larger micro-batch fits into it. Says nothing without both numbers."""

import math
from dataclasses import dataclass

from megatron_lite.analysis.findings.seen.planned import argument, hardware, micro_batches, whole
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import size

USABLE = 0.92  # of the device's memory: the CUDA context, NCCL and the allocator's gaps take the rest
GROWS_WITH_BATCH = ("activations", "logits and loss")


@dataclass(frozen=True)
class Peak:
    """The most that tensors took on one device."""

    num_bytes: int
    grows_bytes: int  # the part that is proportional to the micro-batch; all of it, where that is not known
    where: str


@dataclass(frozen=True)
class Larger:
    """A micro-batch that fits."""

    size: int
    flag: str
    text: str


def peak(facts: Facts) -> Peak | None:
    """By a snapshot if there is one that is no simulation, else by the allocator's own counter."""
    real = [one for one in facts.snapshots if not one.simulated and one.complete]
    if real:
        most = max(real, key=lambda one: one.peak_bytes)
        grows = sum(part.num_bytes for part in most.held if part.category in GROWS_WITH_BATCH)
        return Peak(most.peak_bytes, grows or most.peak_bytes, most.source)
    counted = [int(value) for value in (facts.run.peak_memory_bytes if facts.run else ()) if not math.isnan(value)]
    return Peak(max(counted), max(counted), "steps.jsonl") if counted and max(counted) > 0 else None


def device_bytes(facts: Facts) -> int | None:
    """Memory of the run's GPU, by its own record."""
    return whole(hardware(facts, "memory_bytes"))


def larger_micro_batch(facts: Facts) -> Larger | None:
    """Twice the micro-batch (or more) at the same global batch, if the peak then still fits; else None."""
    now, number = whole(argument(facts, "micro_batch_size")), micro_batches(facts)
    held, room = peak(facts), device_bytes(facts)
    if not (now and number and held and room) or number < 2:
        return None
    fixed, factor = held.num_bytes - held.grows_bytes, 1
    while number % (2 * factor) == 0 and fixed + 2 * factor * held.grows_bytes <= USABLE * room:
        factor *= 2
    if factor == 1:
        return None
    then = fixed + factor * held.grows_bytes
    text = (
        f"--micro-batch-size {factor * now} (now {now}): the peak of {size(held.num_bytes)} would be at most "
        f"{size(then)} "
        f"of {size(room)}"
    )
    return Larger(factor * now, f"--micro-batch-size {factor * now}", text)
