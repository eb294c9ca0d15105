"""Micro-batches so small that overhead is a large part of them.

Meaning: a step runs every operator once per micro-batch. With few tokens each, launching, Python
    and adding gradients up take as long as in a large one, and weights are read from memory for
    little work.
Measured: micro-batches per step (backward ranges), tokens in each, and what a larger one would
    not have: gradients that are added up, and the host's time between operators (with a GPU: idle
    time because of the host).
Cost: that time, times the share of micro-batches that could be saved; products gain on top of it.
Do: a larger micro-batch at the same global batch, as far as memory allows.
Flags: --micro-batch-size N at the same --global-batch-size.
False alarm: memory that allows no more (see micro-batch-headroom), or a single micro-batch.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import argument, device_bytes, larger_micro_batch, part, whole
from megatron_lite.analysis.findings.step_measurements import (
    MATTERS,
    accumulation_ms,
    in_ms,
    micro_batches_seen,
    of_step,
    share,
    where,
)
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE = "tiny-micro-batches"
TITLE = "micro-batches too small for their overhead"
MANY = 4  # per step: with fewer, little can be saved
FEW_TOKENS = 2048  # per micro-batch: above, a transformer's products fill a device


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or one.time.launch_bound:
        return None
    number, tokens = micro_batches_seen(one), _tokens(facts)
    if number < MANY or tokens is None or tokens > FEW_TOKENS:
        return None
    added, host = accumulation_ms(one), one.time.rows.get("host", 0.0) + one.time.rows.get("launch", 0.0)
    cost = (added + host) * (1 - 1 / number)
    larger = larger_micro_batch(facts)
    if share(cost, one) < MATTERS or device_bytes(facts) and not larger:
        return None
    return _finding(facts, one, number, tokens, (added, host, cost), larger)


def _finding(facts: Facts, one: RankFacts, number: float, tokens: int, costs, larger) -> Finding:
    added, host, cost = costs
    text = (
        f"{number:.3g} micro-batches per step of {tokens:,} tokens: adding gradients up {in_ms(added)}, the host "
        "between "
        f"operators {in_ms(host)}; saved at most {of_step(cost, one)}"
    )
    now = whole(argument(facts, "micro_batch_size"))
    flag = larger.flag if larger else "--micro-batch-size"  # no number without the memory that it would take
    advice = larger.text if larger else f"fewer, larger micro-batches as far as memory allows: {flag} above {now}"
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, where(one)),),
        advice=advice,
        flags=(flag,),
        gain_ms=cost,
        certain=False,
        rank=one.time.rank,
    )


def _tokens(facts: Facts) -> int | None:
    size, length = whole(argument(facts, "micro_batch_size")), whole(part(facts, "shape", "seq_length"))
    return size * length if size and length else None
