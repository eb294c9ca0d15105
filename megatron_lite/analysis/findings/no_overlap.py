"""Gradients are reduced only after backward is over.

Meaning: no collective begins before backward's last computation: overlap is off, or there are so few buckets that the
    first is complete only at the end. Nothing is hidden.
Measured: when collectives of steady steps begin, against the end of backward's last kernel (without a GPU: operator),
    and what of them nothing hides.
Cost: all of the reduction, where a part could run beside backward.
Do: several buckets; gradient hooks that reduce as backward goes on (DistributedDataParallel does).
Flags: --ddp-bucket-size N (parameters, 25 MiB of them when left out); in Megatron-LM --overlap-grad-reduce.
False alarm: models so small that one bucket is all there is.
"""

from megatron_lite.analysis.findings.base import Finding, counted, find_lost_time, of_step
from megatron_lite.analysis.findings.run_settings import parameters
from megatron_lite.analysis.findings.step_measurements import measure_reduction
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE, TITLE = "no-overlap", "gradient reduction that overlaps with nothing"
NEVER_EARLY = 0.05  # of the communication: that little begins early by rounding, or is no gradient
BUCKETS = 8  # enough that the last one is a small part


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    seen, number = measure_reduction(one), parameters(facts)
    if seen is None or seen.early_share >= NEVER_EARLY:
        return None
    flag = f"--ddp-bucket-size {number // BUCKETS}" if number else "--ddp-bucket-size"
    text = (
        f"{counted(seen.collectives, 'collective')} per step, none before backward's end; nothing hides "
        f"{of_step(seen.tail_ms, one)}"
    )
    advice = f"several buckets, reduced while backward goes on: {flag}; in Megatron-LM --overlap-grad-reduce"
    return find_lost_time(one, seen.tail_ms, text, advice, flags=(flag,))
