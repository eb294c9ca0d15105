"""Dropout inside attention keeps a CPU from using its fused kernel.

Meaning: PyTorch's fused attention for CPUs knows no dropout. With --attention-dropout above 0 it
    falls back to the formula, with all scores in memory. Megatron-LM's default is 0.1.
Measured: aten::_scaled_dot_product_attention_math in the trace of a run on a CPU whose plan has
    attention dropout; cost is the time of those calls (forward only: backward's share is not
    marked in the trace).
Cost: at long sequences several times the fused kernel's time, and memory for the scores.
Do: train without attention dropout, as most large models are; try it at your sequence length.
Flags: --attention-dropout 0.
False alarm: short sequences, where the formula may be the faster one.
"""

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.run_settings import argument
from megatron_lite.analysis.findings.step_measurements import (
    MATTERS,
    covered,
    of_step,
    rows_named,
    share,
    steady_steps,
    where,
)
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.analysis.trace.columns import Kind

CODE = "attention-dropout"
TITLE = "attention dropout without a fused kernel"
MATH = "aten::_scaled_dot_product_attention_math"


def find(facts: Facts) -> Finding | None:
    one, dropout = facts.critical, argument(facts, "attention_dropout")
    if one is None or one.time.on_gpu or not dropout:
        return None
    rows = rows_named(one, lambda name: name == MATH, Kind.OP)
    cost = covered(one, rows).length / 1e6 / steady_steps(one)
    if not len(rows) or share(cost, one) < MATTERS:
        return None
    text = (
        f"--attention-dropout {dropout:g}: {len(rows) / steady_steps(one):,.0f} unfused calls, forward alone "
        f"{of_step(cost, one)}"
    )
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, where(one, rows[0])),),
        advice="train without dropout inside attention: --attention-dropout 0",
        flags=("--attention-dropout 0",),
        gain_ms=cost,
        certain=False,
        rank=one.time.rank,
    )
