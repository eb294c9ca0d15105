"""Dropout inside attention keeps a CPU from using its fused kernel.

Meaning: PyTorch's fused attention for CPUs knows no dropout. With --attention-dropout above 0 it falls back to the
    formula, with all scores in memory. Megatron-LM's default is 0.1.
Measured: aten::_scaled_dot_product_attention_math in the trace of a run on a CPU whose plan has attention dropout;
    cost is the time of those calls (forward only: backward's share is not marked in the trace).
Cost: at long sequences several times the fused kernel's time, and memory for the scores.
Do: train without attention dropout, as most large models are; try it at your sequence length.
Flags: --attention-dropout 0.
False alarm: short sequences, where the formula may be the faster one.
"""

from megatron_lite.analysis.findings.base import Finding, find_lost_time, of_step
from megatron_lite.analysis.findings.run_settings import argument
from megatron_lite.analysis.findings.step_measurements import covered_ms, per_step, rows_named
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind

CODE, TITLE = "attention-dropout", "attention dropout without a fused kernel"
MATH = "aten::_scaled_dot_product_attention_math"


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    dropout = argument(facts, "attention_dropout")
    rows = rows_named(one, MATH.__eq__, Kind.OP)
    if one.time.on_gpu or not dropout or not len(rows):
        return None
    cost = covered_ms(one, rows)
    text = (
        f"--attention-dropout {dropout:g}: {per_step(one, rows):,.0f} unfused calls, forward alone {of_step(cost, one)}"
    )
    advice = "train without dropout inside attention: --attention-dropout 0"
    return find_lost_time(one, cost, text, advice, row=rows[0], flags=("--attention-dropout 0",), certain=False)
