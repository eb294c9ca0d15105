"""Forward and backward passes that an optimizer runs inside its own step.

Lightning's automatic optimization, L-BFGS, SAM and others hand the optimizer a closure: `optimizer.step(closure)`. The
range around the step then holds passes of the model, which are no update. What the optimizer does itself is the rest of
the range.
"""

import re

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.time.range_names import is_backward
from megatron_lite.analysis.time.time_results import NEVER_NS, PhaseRanges
from megatron_lite.analysis.trace.columns import Kind, Trace

COMPILED_FORWARD = re.compile(r"CompiledFunction$")


def find_closures(
    trace: Trace,
    ranges: PhaseRanges,
    in_optimizer: Flags,
    optimizer: int,
    main_thread: int,
) -> tuple[PhaseRanges, PhaseRanges]:
    """Find the passes inside the optimizer's ranges.

    A pass lasts from its first operator to its last. Operators of autograd's engine are backward. Operators of which
    gradients will be taken are forward, if backward follows. The engine may work on a thread of its own, while the
    thread of the step waits for it.

    Args:
        trace: the trace.
        ranges: the ranges of all phases.
        in_optimizer: bool [n], whether the innermost phase of the event is the optimizer's.
        optimizer: the number of the optimizer's phase in `ranges`.
        main_thread: the thread that drives the steps.

    Returns:
        Forward passes and backward passes; empty ones where no optimizer calls the model.
    """
    engine = is_backward(trace)
    updates = ranges.nest(ranges.phase == optimizer)
    forward = _find_forward(trace, engine, in_optimizer)
    step_of_forward = updates.row_of(trace.position_in(updates, forward))
    backward = np.flatnonzero(engine & in_optimizer)
    own_step = updates.row_of(trace.position_in(updates, backward))
    main_threads = np.full(len(backward), max(main_thread, 0))
    step_on_main = updates.row_at(trace.events.start_ns[backward], main_threads)
    main_waits = _find_idle(trace, main_thread, backward)
    is_on_engine_thread = (own_step < 0) & main_waits
    step_of_backward = np.where(is_on_engine_thread, step_on_main, own_step)
    return _join_passes(
        trace,
        ranges,
        rows=np.concatenate((forward, backward)),
        step=np.concatenate((step_of_forward, step_of_backward)),
        is_back=np.repeat([False, True], [len(forward), len(backward)]),
    )


def _find_idle(trace: Trace, thread: int, rows: Integers) -> Flags:
    """Tell for each event of `rows` (bool [k]) whether it waits: no operator begins on the thread while it lasts."""
    events = trace.events
    operators = trace.on_thread(trace.rows[Kind.OP], thread)
    begins = events.start_ns[operators]
    before = np.searchsorted(begins, events.start_ns[rows])
    until_end = np.searchsorted(begins, events.end_ns[rows])
    idle: Flags = before == until_end
    return idle


def _find_forward(trace: Trace, engine: Flags, in_optimizer: Flags) -> Integers:
    """Rows of the optimizer's operators that record how to take gradients, without those that the engine recomputes."""
    operators = trace.rows[Kind.OP]
    is_compiled = trace.matching(COMPILED_FORWARD.match)
    records = is_compiled | (trace.events.sequence >= 0)
    is_chosen = records & in_optimizer & ~engine
    rows = operators[is_chosen[operators]]
    backward = trace.nest(np.flatnonzero(engine))
    return rows[trace.position_in(backward, rows) < 0]


def _join_passes(
    trace: Trace,
    ranges: PhaseRanges,
    rows: Integers,  # [k], operators
    step: Integers,  # [k], the range in `ranges` that holds each of them; -1 for none
    is_back: Flags,  # [k], whether each is backward
) -> tuple[PhaseRanges, PhaseRanges]:
    """Join what follows each other in the same range, without one of the other sort between, to passes.

    Returns:
        Passes of forward and of backward.
    """
    events = trace.events
    order = np.lexsort((events.start_ns[rows], step))
    order = order[step[order] >= 0]
    if not len(order):
        return PhaseRanges(), PhaseRanges()
    rows = rows[order]
    step = step[order]
    is_back = is_back[order]
    first = _find_first(_differs(step) | _differs(is_back))
    end = np.maximum.reduceat(events.end_ns[rows], first)
    start = events.start_ns[rows[first]]
    step = step[first]
    is_back = is_back[first]
    # a pass ends where the next one of its step begins, at the latest with its step
    same_step_follows = np.append(~_differs(step), False)
    next_start = np.append(start[1:], 0)
    until = np.where(same_step_follows, next_start, ranges.end_ns[step])
    end = np.minimum(end, until)
    passes = PhaseRanges(start, end, ranges.thread[step])
    # forward without backward is an evaluation, or arithmetic of the optimizer with gradients switched on
    is_forward = ~is_back & same_step_follows
    return _choose(passes, is_forward), _choose(passes, is_back)


def _choose(passes: PhaseRanges, chosen: Flags) -> PhaseRanges:
    """The passes that are chosen."""
    return PhaseRanges(
        start_ns=passes.start_ns[chosen],
        end_ns=passes.end_ns[chosen],
        thread=passes.thread[chosen],
    )


def _differs(values: Integers | Flags) -> Flags:
    """Tell for each value but the first (bool [k - 1]) whether it is another than the one before it."""
    differs: Flags = values[1:] != values[:-1]
    return differs


def _find_first(begins: Flags) -> Integers:
    """Places of the first of each group. begins: [k - 1], whether each but the first begins a group."""
    return np.flatnonzero(np.concatenate(([True], begins)))


def find_rest_of_closures(
    trace: Trace,
    ranges: PhaseRanges,
    passes: tuple[int, ...],
    in_optimizer: Flags,
    optimizer: int,
) -> PhaseRanges:
    """Find what else runs in the closures.

    A closure lasts from the optimizer's last operator before its passes to the first one after them.

    Args:
        trace: the trace.
        ranges: the ranges of all phases.
        passes: the numbers of the phases forward and backward in `ranges`.
        in_optimizer: bool [n], whether the innermost phase of the event is the optimizer's.
        optimizer: the number of the optimizer's phase.

    Returns:
        The closures, without steps and phases.
    """
    events = trace.events
    rows, step = _find_passes(ranges, passes, optimizer)
    if not len(rows):
        return PhaseRanges()
    operators = trace.rows[Kind.OP]
    operators = operators[in_optimizer[operators]]
    on_thread = np.isin(events.thread[operators], ranges.thread[step])
    operators = operators[on_thread]
    starts = events.start_ns[operators]
    before = np.searchsorted(starts, ranges.start_ns[rows])
    # passes with none of the optimizer's operators between them are of one closure
    first = _find_first(_differs(step) | _differs(before))
    first_start = ranges.start_ns[rows[first]]
    last_end = np.maximum.reduceat(ranges.end_ns[rows], first)
    step = step[first]
    before = before[first]
    start = ranges.start_ns[step]
    if len(operators):
        reach = np.maximum.accumulate(events.end_ns[operators])
        after_earlier = np.maximum(start, reach[before - 1])
        start = np.where(before > 0, after_earlier, start)
    after = np.searchsorted(starts, last_end)
    later = np.append(starts, NEVER_NS)[after]
    # where nothing follows, the range may last for other reasons
    follows = later < ranges.end_ns[step]
    return PhaseRanges(
        start_ns=np.minimum(start, first_start),
        end_ns=np.where(follows, later, last_end),
        thread=ranges.thread[step],
    )


def _find_passes(
    ranges: PhaseRanges,
    passes: tuple[int, ...],
    optimizer: int,
) -> tuple[Integers, Integers]:
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
    start = ranges.start_ns[rows]
    step = updates.row_at(start, ranges.thread[rows])
    is_inside = step >= 0
    rows = rows[is_inside]
    step = step[is_inside]
    order = np.lexsort((ranges.start_ns[rows], step))
    return rows[order], step[order]
