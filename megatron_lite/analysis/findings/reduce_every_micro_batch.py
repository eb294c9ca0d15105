"""Gradients are reduced in every micro-batch instead of once per step.

Meaning: while gradients are accumulated, only the sum after the last micro-batch is needed on all ranks. Reducing
    each micro-batch's gradients sends the same bytes once per micro-batch.
Measured: collectives that begin in the backward of micro-batches other than the last (or before the next one begins);
    cost is what of them nothing hides.
Cost: that exposed time, and a network that is busy for nothing.
Do: DistributedDataParallel.no_sync() around all micro-batches but the last.
Flags: none here: this trainer reduces after the last micro-batch. Fewer, larger micro-batches reduce less in any
    trainer.
False alarm: collectives in backward that are no gradients (tensor, context or expert parallelism).
"""

import numpy as np

from megatron_lite.analysis.findings.base import MIN_SHARE_SHOWN, Finding, find_lost_time, in_ms, of_step, share
from megatron_lite.analysis.findings.step_measurements import backward_ranges, exposed_ms, per_step_ms, reduction_rows
from megatron_lite.analysis.run_facts import Facts, RankFacts

CODE, TITLE = "reduce-every-micro-batch", "gradient reduction in every micro-batch"
AS_MANY = 0.5  # of the last micro-batch's collectives, in each of the others: a stray one is something else


def find_in_trace(facts: Facts, one: RankFacts) -> Finding | None:
    starts, steps = one.trace.events.start_ns, one.placing.step
    ranges, rows = backward_ranges(one), reduction_rows(one)
    if not len(rows) or len(ranges) < 2:
        return None
    launches = one.trace.launch_of[rows]
    begins = starts[np.where(launches >= 0, launches, rows)]  # by the host
    at = np.searchsorted(starts[ranges], begins, side="right") - 1  # the backward that the collective follows
    same = (at >= 0) & (steps[ranges[np.maximum(at, 0)]] == steps[rows])
    last = np.append(steps[ranges][1:] != steps[ranges][:-1], True)
    counts = np.bincount(at[same], minlength=len(ranges))
    if last.all() or counts[~last].mean() < AS_MANY * counts[last].mean() or not counts[~last].any():
        return None
    early, batches = rows[same & ~last[np.maximum(at, 0)]], len(ranges) / last.sum()
    if share(per_step_ms(one, early), one) < MIN_SHARE_SHOWN:
        return None
    cost = exposed_ms(one, early)
    text = (
        f"{batches:.3g} micro-batches per step, and all reduce: those before the last one communicate "
        f"{in_ms(per_step_ms(one, early))} per step; nothing hides {of_step(cost, one)}"
    )
    advice = "reduce after the last micro-batch only: model.no_sync() around the others"
    return find_lost_time(one, cost, text, advice, row=early[0], at_least=0.0)
