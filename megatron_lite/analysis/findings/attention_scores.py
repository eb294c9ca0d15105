"""Attention writes its scores to memory.

Meaning: queries times keys, the mask, softmax and dropout each read and write a tensor of batch x
    heads x T x T. Fused attention (flash, memory-efficient, cuDNN) keeps the scores inside the
    kernel.
Measured: device time (without a GPU: operators' time) of all operators that read a tensor whose
    last two dimensions are the T x T of a softmax; needs --pytorch-profiler-collect-shapes. The
    product that writes the scores is not in it.
Cost: up to that time, and memory: the scores of every layer wait for backward.
Do: torch.nn.functional.scaled_dot_product_attention with a causal flag instead of a mask tensor.
Flags: --attention-backend auto (or flash); not unfused or local; --explain-attention says why a
    kernel was rejected.
False alarm: on a CPU at short sequences explicit attention can be the faster one: try both.
"""

import numpy as np

from megatron_lite.analysis.findings.base import Evidence, Finding
from megatron_lite.analysis.findings.step_measurements import (
    MATTERS,
    covered,
    of_step,
    rows_named,
    share,
    steady_steps,
    where,
    work_rows,
)
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind

CODE = "attention-scores"
TITLE = "attention that writes its scores"
SHORTEST = 128  # tokens: below, the scores are no larger than the activations around them
SHORTEST_ON_CPU = 512  # at 256 explicit attention was measured to be the faster one


def find(facts: Facts) -> Finding | None:
    one = facts.critical
    if one is None or not one.trace.with_shapes:
        return None
    lengths = _softmax_lengths(one)
    if not lengths:
        return None
    cost, row = _cost_ms(one, lengths)
    if row is None or share(cost, one) < MATTERS:
        return None
    text = f"operators on {' and '.join(f'{t} x {t}' for t in sorted(lengths))} scores take {of_step(cost, one)}"
    return Finding(
        cost_ms=cost,
        evidence=(Evidence(text, where(one, row)),),
        advice="fused attention: --attention-backend auto, or torch's scaled_dot_product_attention(is_causal=True)",
        flags=("--attention-backend auto",),
        gain_ms=cost,
        certain=one.time.on_gpu,
        rank=one.time.rank,
    )


def find_score_tensors(dims: tuple) -> set[int]:
    """T of every argument [..., T, T] with batch or heads in front."""
    return {
        arg[-1] for arg in dims if len(arg) >= 3 and all(isinstance(size, int) for size in arg) and arg[-1] == arg[-2]
    }


def _softmax_lengths(one: RankFacts) -> set[int]:
    """T of all softmax operators of steady steps."""
    rows = rows_named(one, lambda name: "softmax" in name and "log_softmax" not in name, Kind.OP)
    indices = np.unique(one.trace.events.shapes[rows])
    found = set().union(*(find_score_tensors(one.trace.shapes[index].dims) for index in indices if index >= 0))
    return {length for length in found if length >= (SHORTEST if one.time.on_gpu else SHORTEST_ON_CPU)}


def _cost_ms(one: RankFacts, lengths: set[int]) -> tuple[float, int | None]:
    """(time per step of what operators on scores do, the first of them)."""
    events = one.trace.events
    on_scores = np.array([bool(find_score_tensors(shape.dims) & lengths) for shape in one.trace.shapes] + [False])
    rows = work_rows(one)
    operators = one.placing.operator[rows] if one.time.on_gpu else rows
    shapes = np.where(operators >= 0, events.shapes[np.maximum(operators, 0)], -1)
    rows = rows[on_scores[shapes]]
    return covered(one, rows).length / 1e6 / steady_steps(one), int(rows[0]) if len(rows) else None
