"""Forward and backward passes that an optimizer runs inside its own step.

Lightning's automatic optimization, L-BFGS, SAM and others hand the optimizer a closure: `optimizer.step(closure)`. The
range around the step then holds passes of the model, which are no update. What the optimizer does itself is the rest of
the range.
"""

import re

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.time.range_names import is_backward
from megatron_lite.analysis.time.time_results import PhaseRanges
from megatron_lite.analysis.trace.columns import Kind, Trace

COMPILED_FORWARD = re.compile(r"CompiledFunction$")


def find_closures(
    trace: Trace, ranges: PhaseRanges, in_optimizer: Flags, optimizer: int, main_thread: int
) -> tuple[PhaseRanges, PhaseRanges]:
    """(forward passes, backward passes) inside the optimizer's ranges; empty ones where no optimizer calls the model.

    A pass lasts from its first operator to its last. Operators of autograd's engine are backward. Operators of which
    gradients will be taken are forward, if backward follows. The engine may work on a thread of its own, while the
    thread of the step waits for it.

    Args:
        in_optimizer: bool [n], whether the innermost phase of the event is the optimizer's.
        optimizer: The number of the optimizer's phase in `ranges`.
        main_thread: The thread that drives the steps.
    """
    events, engine = trace.events, is_backward(trace)
    backward = np.flatnonzero(engine & in_optimizer)
    updates = ranges.nest(ranges.phase == optimizer)
    own = updates.row_at(events.start_ns[backward], events.thread[backward])
    on_main = updates.row_at(events.start_ns[backward], np.full(len(backward), max(main_thread, 0)))
    waits = _find_idle(trace, main_thread, backward)
    step_of_backward = np.where((own < 0) & waits, on_main, own)
    forward = _find_forward(trace, engine, in_optimizer)
    step_of_forward = updates.row_at(events.start_ns[forward], events.thread[forward])
    return _join_passes(
        trace,
        ranges,
        rows=np.concatenate((forward, backward)),
        step=np.concatenate((step_of_forward, step_of_backward)),
        is_back=np.repeat([False, True], [len(forward), len(backward)]),
    )


def _find_idle(trace: Trace, thread: int, rows: Integers) -> Flags:
    """bool [k]: whether no operator begins on the thread while the event of `rows` lasts;
    else it does not wait for it."""
    events, operators = trace.events, trace.rows[Kind.OP]
    begins = events.start_ns[operators[events.thread[operators] == thread]]
    idle: Flags = np.searchsorted(begins, events.start_ns[rows]) == np.searchsorted(begins, events.end_ns[rows])
    return idle


def _find_forward(trace: Trace, engine: Flags, in_optimizer: Flags) -> Integers:
    """Rows of the optimizer's operators that record how to take gradients, without those that the engine recomputes."""
    events = trace.events
    records = (events.sequence >= 0) | trace.matching(COMPILED_FORWARD.match)
    rows = np.flatnonzero((events.kind == Kind.OP) & in_optimizer & records & ~engine)
    inside = trace.nest(np.flatnonzero(engine)).position_at(events.start_ns[rows], events.thread[rows]) >= 0
    return rows[~inside]


def _join_passes(
    trace: Trace, ranges: PhaseRanges, rows: Integers, step: Integers, is_back: Flags
) -> tuple[PhaseRanges, PhaseRanges]:
    """(forward, backward) passes: what follows each other in the same range without one of the other sort between.

    Args:
        rows: Operators.
        step: [k] the number of the range in `ranges` that holds each of them; -1 for none.
        is_back: [k] whether each is backward.
    """
    events = trace.events
    order = np.lexsort((events.start_ns[rows], step))
    order = order[step[order] >= 0]
    rows, step, is_back = rows[order], step[order], is_back[order]
    if not len(rows):
        return PhaseRanges(), PhaseRanges()
    begins = np.concatenate(([True], (step[1:] != step[:-1]) | (is_back[1:] != is_back[:-1])))
    first = np.flatnonzero(begins)
    end = np.maximum.reduceat(events.end_ns[rows], first)
    start, step, is_back = events.start_ns[rows][first], step[first], is_back[first]
    same_step = np.append(step[1:] == step[:-1], False)
    until = np.where(same_step, np.append(start[1:], 0), ranges.end_ns[step])
    end, thread = np.minimum(end, until), ranges.thread[step]
    # forward without backward is an evaluation, or arithmetic of the optimizer with gradients switched on
    is_forward = ~is_back & same_step
    forward, backward = (PhaseRanges(start[some], end[some], thread[some]) for some in (is_forward, is_back))
    return forward, backward


def find_rest_of_closures(
    trace: Trace, ranges: PhaseRanges, passes: tuple[int, ...], in_optimizer: Flags, optimizer: int
) -> PhaseRanges:
    """Find what else runs in the closures.

    A closure lasts from the optimizer's last operator before its passes to the first one after them.

    Args:
        trace: the trace.
        ranges: the ranges of all phases.
        passes: the numbers of the phases forward and backward in `ranges`.
        in_optimizer: bool [n], whether the innermost phase of the event is the optimizer's.
        optimizer: the number of the optimizer's phase.
    """
    events = trace.events
    rows, step = _find_passes(ranges, passes, optimizer)
    if not len(rows):
        return PhaseRanges()
    operators = trace.rows[Kind.OP]
    operators = operators[in_optimizer[operators] & np.isin(events.thread[operators], ranges.thread[step])]
    starts = events.start_ns[operators]
    before = np.searchsorted(starts, ranges.start_ns[rows])
    # passes with none of the optimizer's operators between them are of one closure
    first = np.flatnonzero(np.concatenate(([True], (step[1:] != step[:-1]) | (before[1:] != before[:-1]))))
    first_start = ranges.start_ns[rows][first]
    last_end = np.maximum.reduceat(ranges.end_ns[rows], first)
    step = step[first]
    before = before[first]
    start = ranges.start_ns[step]
    if len(operators):
        earlier = np.append(np.maximum.accumulate(events.end_ns[operators]), 0)[before - 1]
        start = np.where(before > 0, np.maximum(start, earlier), start)
    later = np.append(starts, np.iinfo(np.int64).max)[np.searchsorted(starts, last_end)]
    # where nothing follows, the range may last for other reasons
    end = np.where(later < ranges.end_ns[step], later, last_end)
    return PhaseRanges(np.minimum(start, first_start), end, ranges.thread[step])


def _find_passes(ranges: PhaseRanges, passes: tuple[int, ...], optimizer: int) -> tuple[Integers, Integers]:
    """Find the passes inside the optimizer's ranges, by range and time.

    Args:
        ranges: the ranges of all phases.
        passes: the numbers of the phases forward and backward in `ranges`.
        optimizer: the number of the optimizer's phase.

    Returns:
        [k] rows of `ranges` that are passes, and the row of the optimizer's range around each.
    """
    updates = ranges.nest(ranges.phase == optimizer)
    rows = np.flatnonzero(np.isin(ranges.phase, passes))
    step = updates.row_at(ranges.start_ns[rows], ranges.thread[rows])
    rows = rows[step >= 0]
    step = step[step >= 0]
    order = np.lexsort((ranges.start_ns[rows], step))
    return rows[order], step[order]
