"""Gradients are reduced only after backward is over.

Meaning: no collective begins before backward's last computation: overlap is off, or there are so
    few buckets that the first is complete only at the end. Nothing is hidden.
Measured: when collectives of steady steps begin, against the end of backward's last kernel
    (without a GPU: operator), and what of them nothing hides.
Cost: all of the reduction, where a part could run beside backward.
Do: several buckets; gradient hooks that reduce as backward goes on (DistributedDataParallel
    does).
Flags: --ddp-bucket-size N (parameters, 25 MiB of them when left out); in Megatron-LM
    --overlap-grad-reduce.
False alarm: models so small that one bucket is all there is.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import whole
from megatron_lite.analysis.findings.step_measurements import MATTERS, counted, measure_reduction, of_step, share, where
from megatron_lite.analysis.run_facts import Facts

CODE = "no-overlap"
TITLE = "gradient reduction that overlaps with nothing"
NEVER_EARLY = 0.05  # of the communication: that little begins early by rounding, or is no gradient
BUCKETS = 8  # enough that the last one is a small part


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    seen = measure_reduction(one) if one is not None else None
    if seen is None or seen.early_share >= NEVER_EARLY or share(seen.tail_ms, one) < MATTERS:
        return None
    parameters = whole(facts.run.record.get("parameters")) if facts.run else None
    flag = f"--ddp-bucket-size {parameters // BUCKETS}" if parameters else "--ddp-bucket-size"
    text = (
        f"{counted(seen.collectives, 'collective')} per step, none before backward's end; nothing hides "
        f"{of_step(seen.tail_ms, one)}"
    )
    return Finding(
        cost_ms=seen.tail_ms,
        evidence=(Evidence(text, where(one)),),
        advice=f"several buckets, reduced while backward goes on: {flag}; in Megatron-LM --overlap-grad-reduce",
        flags=(flag,),
        gain_ms=seen.tail_ms,
        rank=one.time.rank,
    )
