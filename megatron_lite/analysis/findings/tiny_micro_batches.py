"""Micro-batches so small that overhead is a large part of them.

Meaning: a step runs every operator once per micro-batch. With few tokens each, launching, Python and adding gradients
    up take as long as in a large one, and weights are read from memory for little work.
Measured: micro-batches per step (backward ranges), tokens in each, and what a larger one would not have: gradients
    that are added up, and the host's time between operators (with a GPU: idle time because of the host).
Cost: that time, times the share of micro-batches that could be saved; products gain on top of it.
Do: a larger micro-batch at the same global batch, as far as memory allows.
Flags: --micro-batch-size N at the same --global-batch-size.
False alarm: memory that allows no more (see micro-batch-headroom), or a single micro-batch.
"""

from megatron_lite.analysis.findings.base import Finding, find_lost_time, in_ms, of_step
from megatron_lite.analysis.findings.run_settings import argument, device_bytes, micro_batch_tokens, suggest_micro_batch
from megatron_lite.analysis.findings.step_measurements import accumulation_ms, backward_ranges, per_step
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE, TITLE = "tiny-micro-batches", "micro-batches too small for their overhead"
MANY = 4  # per step: with fewer, little can be saved
FEW_TOKENS = 2048  # per micro-batch: above, a transformer's products fill a device


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    number, tokens = per_step(one, backward_ranges(one)), micro_batch_tokens(facts)
    larger, now = suggest_micro_batch(facts), argument(facts, "micro_batch_size")
    if one.time.launch_bound or number < MANY or tokens is None or tokens > FEW_TOKENS:
        return None
    if device_bytes(facts) and not larger:
        return None
    added, host = accumulation_ms(one), one.time.rows.get("host", 0.0) + one.time.rows.get("launch", 0.0)
    cost = (added + host) * (1 - 1 / number)
    flag = "--micro-batch-size"  # no number without the memory that it would take
    advice = f"fewer, larger micro-batches as far as memory allows: {flag} above {now}"
    text = (
        f"{number:.3g} micro-batches per step of {tokens:,} tokens: adding gradients up {in_ms(added)}, the host between "
        f"operators {in_ms(host)}; saved at most {of_step(cost, one)}"
    )
    return find_lost_time(
        one, cost, text, larger[1] if larger else advice, flags=larger[:1] if larger else (flag,), certain=False
    )
