"""Memory that stays after each step: a leak.

Meaning: something keeps tensors or objects that the next step does not need: losses with their
    graph in a list, outputs kept by a hook, a validation without no_grad, a cache without a
    limit.
Measured: by a snapshot, blocks that outlive their step and where they were made; without one, the
    process's memory or the device's peak in steps.jsonl, which must grow from each quarter of the
    run to the next.
Cost: memory per step, until it is full. Reserved memory that stays is no leak.
Do: keep numbers, not tensors (loss.item() at the log interval, or .detach()); look at the growing
    lines.
Flags: --record-memory-history over a window of several steps names the lines.
False alarm: caches that fill up once, such as those of the allocator or of compiled code; they
    stop.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.run.run_results import Growth
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import MIB, size

CODE = "memory-growth"
TITLE = "memory that grows with every step"
MIN_BYTES_PER_STEP = MIB  # in a snapshot: less takes thousands of steps to fill a gigabyte
MIN_STEPS = 3
MAX_SHOWN = 3
ADVICE = "keep numbers instead of tensors that hold their graph: .item() at the log interval, or .detach()"


def find(facts: Facts) -> Finding | None:
    leaks = [one for one in facts.snapshots if _leaks(one)]
    if leaks:
        return _of_snapshot(max(leaks, key=lambda one: one.growth.bytes_per_step))
    if facts.run is None:
        return None
    grown = [(one, "the GPU's peak") for one in facts.run.gpu_growths]
    grown += [(one, "the process's memory") for one in facts.run.growths]
    return _of_run(*max(grown, key=lambda pair: pair[0].bytes_per_step)) if grown else None


def _leaks(one: Snapshot) -> bool:
    grown = one.growth
    return grown is not None and grown.steps >= MIN_STEPS and grown.bytes_per_step >= MIN_BYTES_PER_STEP


def _of_snapshot(one: Snapshot) -> Finding:
    grown = one.growth
    first = Evidence(f"{size(grown.bytes_per_step)} more after each of {grown.steps} steps", one.source)
    sites = [
        Evidence(
            f"{size(site.num_bytes)} per step of {site.category} made in {site.phase or 'an unknown phase'}", site.site
        )
        for site in grown.sites[:MAX_SHOWN]
    ]
    total = int(grown.bytes_per_step * grown.steps)
    return Finding(
        cost_bytes=total,
        evidence=(first, *sites),
        advice=ADVICE,
        flags=("--record-memory-history",),
        gain_bytes=total,
        rank=one.rank,
    )


def _of_run(grown: Growth, what: str) -> Finding:
    text = (
        f"{what} grew by {size(grown.bytes_per_step)} per step, {size(grown.num_bytes)} in all, to {size(grown.at_end)}"
    )
    where = "steps.jsonl" if grown.rank is None else f"rank {grown.rank}, steps.jsonl"
    return Finding(
        cost_bytes=grown.num_bytes,
        evidence=(Evidence(text, where),),
        advice=ADVICE,
        flags=("--record-memory-history",),
        gain_bytes=grown.num_bytes,
        certain=False,
        rank=grown.rank,
    )
