"""The point about the memory peak."""

import math

from megatron_lite.analysis.audit.figures import Case, Outcome, blamed, not_seen, passed
from megatron_lite.analysis.audit.recording import SNAPSHOT
from megatron_lite.analysis.facts import Facts
from megatron_lite.analysis.findings.base import Evidence
from megatron_lite.analysis.findings.memory_growth import FEWEST_STEPS
from megatron_lite.analysis.memory.figures import Snapshot
from megatron_lite.analysis.run.memory_growth import FEWEST_STEPS as FEWEST_OF_A_RUN
from megatron_lite.units import size

CAUSES = ("memory-growth", "out-of-memory", "logits-peak", "recompute-activations")
MOST_SHOWN = 4


def explained_peak(case: Case) -> Outcome:
    """What holds the peak (a snapshot says it), and that nothing stays from step to step."""
    if found := case.found(*CAUSES):
        return blamed(found)
    facts = case.facts
    most, steady = facts.highest_snapshot, _does_not_grow(facts)
    held = _held(most) if most is not None and most.complete and most.peak_bytes > 0 else ()
    if held and steady:
        return passed(*held, *steady)
    return not_seen(SNAPSHOT, *held, *steady)


def _held(one: Snapshot) -> tuple[Evidence, ...]:
    parts = ", ".join(f"{part.category} {size(part.num_bytes)}" for part in one.held[:MOST_SHOWN])
    kind = "simulated peak" if one.simulated else "peak"
    return (
        Evidence(f"{kind} of {size(one.peak_bytes)} in {one.peak_phase or 'an unknown phase'}: {parts}", one.source),
    )


def _does_not_grow(facts: Facts) -> tuple[Evidence, ...]:
    """() where too few steps were seen to tell."""
    told = [
        Evidence(f"no growth over {len(one.steps)} steps", one.source)
        for one in facts.snapshots
        if len(one.steps) >= FEWEST_STEPS and one.growth is None
    ]
    run = facts.run
    for what, values in (
        (("the GPU's peak", run.peak_memory_bytes), ("the process's memory", run.host_memory_bytes)) if run else ()
    ):
        number = sum(plain and not math.isnan(value) for plain, value in zip(run.ordinary, values))
        if number >= FEWEST_OF_A_RUN:
            told.append(Evidence(f"{what} does not grow over {number} ordinary steps", "steps.jsonl"))
    return tuple(told)
