"""Attention writes its scores to memory.

Meaning: queries times keys, the mask, softmax and dropout each read and write a tensor of batch x heads x T x T.
    Fused attention (flash, memory-efficient, cuDNN) keeps the scores inside the kernel.
Measured: device time (without a GPU: operators' time) of all operators that read a tensor whose last two dimensions
    are the T x T of a softmax; needs --pytorch-profiler-collect-shapes. The product that writes the scores is not in
    it.
Cost: up to that time, and memory: the scores of every layer wait for backward.
Do: torch.nn.functional.scaled_dot_product_attention with a causal flag instead of a mask tensor.
Flags: --attention-backend auto (or flash); not unfused or local; --explain-attention says why a kernel was rejected.
False alarm: on a CPU at short sequences explicit attention can be the faster one: try both.
"""

import numpy as np

from megatron_lite.analysis.findings.base import Finding, find_lost_time, of_step
from megatron_lite.analysis.findings.step_measurements import covered_ms, rows_named, work_rows
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.trace.columns import Kind

CODE, TITLE = "attention-scores", "attention that writes its scores"
MIN_TOKENS = 128  # below, the scores are no larger than the activations around them
MIN_TOKENS_ON_CPU = 512  # at 256 explicit attention was measured to be the faster one


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    if not one.trace.with_shapes:
        return None
    events, shapes = one.trace.events, one.trace.shapes
    softmax = rows_named(one, lambda name: "softmax" in name and "log_softmax" not in name, Kind.OP)
    found = (find_score_tensors(shapes[index].dims) for index in np.unique(events.shapes[softmax]) if index >= 0)
    least = MIN_TOKENS if one.time.on_gpu else MIN_TOKENS_ON_CPU
    lengths = {length for length in set().union(*found) if length >= least}
    on_scores = np.array([bool(find_score_tensors(shape.dims) & lengths) for shape in shapes] + [False])
    rows = work_rows(one)
    operators = one.placing.operator[rows] if one.time.on_gpu else rows
    rows = rows[on_scores[np.where(operators >= 0, events.shapes[np.maximum(operators, 0)], -1)]]
    if not len(rows):
        return None
    cost = covered_ms(one, rows)
    text = f"operators on {' and '.join(f'{t} x {t}' for t in sorted(lengths))} scores take {of_step(cost, one)}"
    advice = "fused attention: --attention-backend auto, or torch's scaled_dot_product_attention(is_causal=True)"
    return find_lost_time(
        one, cost, text, advice, row=int(rows[0]), flags=("--attention-backend auto",), certain=one.time.on_gpu
    )


def find_score_tensors(dims: tuple) -> set[int]:
    """T of every argument [..., T, T] with batch or heads in front."""
    return {
        arg[-1] for arg in dims if len(arg) >= 3 and all(isinstance(size, int) for size in arg) and arg[-1] == arg[-2]
    }
