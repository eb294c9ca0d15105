"""Time of adding gradients up over micro-batches: work that a single, larger micro-batch does not have."""

import numpy as np

from megatron_lite.analysis.findings.seen.gradient_reduction import backward_ranges
from megatron_lite.analysis.findings.seen.hidden import covered
from megatron_lite.analysis.findings.seen.steady import rows_named, steady_steps, work_rows
from megatron_lite.analysis.run_facts import RankFacts
from megatron_lite.analysis.trace.columns import Kind

NODE = "AccumulateGrad"


def micro_batches_seen(one: RankFacts) -> float:
    """Backward ranges per steady step; 0 where the trace has none."""
    return len(backward_ranges(one)) / steady_steps(one)


def accumulation_ms(one: RankFacts) -> float:
    """Per step: device work (without a GPU: host time) under AccumulateGrad nodes that add to a gradient."""
    nodes = rows_named(one, lambda name: NODE in name, Kind.OP)
    adding = rows_named(one, lambda name: name in ("aten::add_", "aten::add"), Kind.OP)
    inside = adding[_within(one, adding, nodes)]
    if not one.time.on_gpu:
        return covered(one, inside).length / 1e6 / steady_steps(one)
    rows = work_rows(one)
    return covered(one, rows[np.isin(one.placing.operator[rows], inside)]).length / 1e6 / steady_steps(one)


def _within(one: RankFacts, rows: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """bool [k]: does one of `outer`, which follow each other on a thread, hold the row?"""
    events = one.trace.events
    held = np.zeros(len(rows), bool)
    for thread in np.unique(events.thread[outer]):
        mine = outer[events.thread[outer] == thread]
        here = np.flatnonzero(events.thread[rows] == thread)
        held[here] = covered(one, mine).holds(events.start_ns[rows[here]])
    return held
