"""Gradients are still being reduced when backward is over.

Meaning: buckets are reduced while backward goes on, but the last ones are complete only at its end (with tied
    embeddings the largest one is the very last), and nothing is left to hide them.
Measured: communication that no kernel hides, after backward's last computation, per steady step.
Cost: all of it, on every rank. A part may be waiting for a slower rank: see straggler.
Do: smaller buckets (more of them are through before the end); reduce in 16 bits; more micro-batches per step, which
    reduce less often; a faster network.
Flags: --ddp-bucket-size N (parameters); --grad-reduce-in-bf16 with --bf16; a larger --global-batch-size.
False alarm: a trace of one rank only: whether it waits for others or for the network cannot be told from it.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding, counted, find_lost_time, in_ms, of_step
from megatron_lite.analysis.findings.no_overlap import NEVER_EARLY
from megatron_lite.analysis.findings.step_measurements import measure_reduction
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE, TITLE = "all-reduce-tail", "gradient reduction after backward's end"


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    seen = measure_reduction(one)
    if seen is None or seen.early_share < NEVER_EARLY:
        return None
    text = (
        f"the tail takes {of_step(seen.tail_ms, one)}; {counted(seen.collectives, 'collective')} of together "
        f"{in_ms(seen.communication_ms)} per step, {seen.early_share:.0%} of it begun before backward's end"
    )
    alone = facts.ranks is None or len(facts.ranks.present) < 2
    waiting = Evidence("with one rank's trace alone, waiting for a slower rank is not told apart")
    advice = (
        "smaller buckets (--ddp-bucket-size), 16-bit reduction (--grad-reduce-in-bf16), or more micro-batches per step"
    )
    flags = ("--ddp-bucket-size", "--grad-reduce-in-bf16")
    return find_lost_time(
        one, seen.tail_ms, text, advice, *([waiting] if alone else []), flags=flags, certain=not alone
    )
