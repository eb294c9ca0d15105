"""Memory that stays after each step: a leak.

Meaning: something keeps tensors or objects that the next step does not need: losses with their graph in a list,
    outputs kept by a hook, a validation without no_grad, a cache without a limit.
Measured: by a snapshot, blocks that outlive their step and where they were made; without one, the process's memory or
    the device's peak in steps.jsonl, which must grow from each quarter of the run to the next.
Cost: memory per step, until it is full. Reserved memory that stays is no leak.
Do: keep numbers, not tensors (loss.item() at the log interval, or .detach()); look at the growing lines.
Flags: --record-memory-history over a window of several steps names the lines.
False alarm: caches that fill up once, such as those of the allocator or of compiled code; they stop.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, find_lost_memory
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.units import MIB, size

CODE, TITLE = "memory-growth", "memory that grows with every step"
MIN_BYTES_PER_STEP = MIB  # in a snapshot: less takes thousands of steps to fill a gigabyte
MIN_STEPS = 3
MAX_SHOWN = 3
ADVICE = "keep numbers instead of tensors that hold their graph: .item() at the log interval, or .detach()"
FLAGS = ("--record-memory-history",)


def find(facts: Facts) -> Finding | None:
    grown = [(one.growth, one) for one in facts.snapshots if one.growth is not None]
    leaks = [pair for pair in grown if pair[0].steps >= MIN_STEPS and pair[0].bytes_per_step >= MIN_BYTES_PER_STEP]
    if leaks:
        leak, most = max(leaks, key=lambda pair: pair[0].bytes_per_step)
        total = int(leak.bytes_per_step * leak.steps)
        text = f"{size(leak.bytes_per_step)} more after each of {leak.steps} steps"
        sites = (
            Evidence(
                f"{size(site.num_bytes)} per step of {site.category} made in {site.phase or 'an unknown phase'}",
                site.site,
            )
            for site in leak.sites[:MAX_SHOWN]
        )
        return find_lost_memory(most, total, total, text, ADVICE, *sites, flags=FLAGS)
    run = facts.run
    measured = [(one, "the GPU's peak") for one in run.gpu_growths] if run else []
    measured += [(one, "the process's memory") for one in run.growths] if run else []
    if not measured:
        return None
    leak, what = max(measured, key=lambda pair: pair[0].bytes_per_step)
    text = f"{what} grew by {size(leak.bytes_per_step)} per step, {size(leak.num_bytes)} in all, to {size(leak.at_end)}"
    seen = Evidence(text, "steps.jsonl" if leak.rank is None else f"rank {leak.rank}, steps.jsonl")
    return Finding(
        cost_bytes=leak.num_bytes,
        evidence=(seen,),
        advice=ADVICE,
        flags=FLAGS,
        gain_bytes=leak.num_bytes,
        certain=False,
        rank=leak.rank,
    )
