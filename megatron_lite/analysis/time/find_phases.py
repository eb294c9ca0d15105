"""The phase of every event: by the range around it (or around its launch), across threads."""

import re
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers, union
from megatron_lite.analysis.time.closures import find_closures, find_rest_of_closures
from megatron_lite.analysis.time.host_steps import NUMBERED, PROFILER_STEP, HostSteps
from megatron_lite.analysis.time.range_names import (
    COMES_INSIDE_ANY,
    NO_PHASE_OF_ITS_OWN,
    drop_numbers,
    find_meaning,
    is_backward,
    is_phase,
    label_phase,
)
from megatron_lite.analysis.time.time_results import PhaseRanges
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.phases import Phase

SENDS = re.compile(r"aten::(to|_to_copy|copy_|cuda)$")
TO_DEVICE = re.compile(r"HtoD|HostToDevice|Host ?-> ?Device", re.IGNORECASE)
REDUCES = re.compile(r"_?c10d(_functional)?::_?(allreduce|all_reduce|reduce)")
CLOSURE = "closure"  # that an optimizer calls in its step: what is neither forward nor backward in it
MAX_NAMES = 100  # of ranges that are phases
WRAPPER_SHARE = 0.9  # a range over so much of its step says nothing: what lies inside it is the phase


def find_phases(
    trace: Trace, steps: HostSteps, thread: Integers, moment: Integers
) -> tuple[tuple[str, ...], Integers, PhaseRanges]:
    """(names, index into names per event; -1: none; the ranges, without their steps). thread, moment [n]: where the
    host was for each event, -1: unknown.

    The innermost phase around the moment on its own thread; else on the thread that drives the steps, which stands in
    backward() while autograd's thread works; else what operators tell: autograd's, or that gradients will be taken.
    """
    events, rows = trace.events, _find_phase_ranges(trace, steps)
    labels = _label_phases(trace, np.unique(events.name[rows]))
    names = list(dict.fromkeys(labels[events.name[row]] for row in rows))
    number_of = np.full(len(trace.names), -1, np.int64)
    for number, label in labels.items():
        number_of[number] = names.index(label)
    columns = (events.start_ns[rows], events.end_ns[rows], events.thread[rows].astype(np.int64))
    ranges = PhaseRanges(*columns, phase=number_of[events.name[rows]])
    phase = _find_phase_at(trace, ranges, steps.thread, thread, moment)
    names, ranges = _add_closures(trace, names, ranges, phase, steps.thread, thread, moment)
    phase = _find_phase_at(trace, ranges, steps.thread, thread, moment)
    for name, is_inside in _told_by_operators(trace, steps.thread):
        unknown = np.flatnonzero((phase < 0) & (thread >= 0))
        hit = unknown[is_inside(thread[unknown], moment[unknown])]
        if len(hit):
            names = names if name in names else [*names, name]
            phase[hit] = names.index(name)
    return tuple(names), phase, ranges


def _find_phase_at(trace: Trace, ranges: PhaseRanges, main_thread: int, thread: Integers, moment: Integers) -> Integers:
    """int16 [n]: the phase of the innermost range around each moment; -1: none."""
    events, nest = trace.events, ranges.nest()
    position = np.where(thread >= 0, nest.position_at(moment, np.maximum(thread, 0)), -1)
    # a range that begins in the same nanosecond as a phase but lasts longer holds the phase, not the other way round
    wider, ends = trace.rows[Kind.ANNOTATION], ranges.end_ns[nest.rows]
    while len(wider := wider[position[wider] >= 0]):
        inner = position[wider]
        same_start = ranges.start_ns[nest.rows[inner]] == moment[wider]
        wider = wider[same_start & (ends[inner] < events.end_ns[wider])]
        position[wider] = nest.parent[position[wider]]
    found = nest.row_of(position)
    if main_thread >= 0:
        elsewhere = np.flatnonzero((found < 0) & (thread >= 0) & (thread != main_thread))
        main = ranges.nest(ranges.thread == main_thread)
        found[elsewhere] = main.row_at(moment[elsewhere], np.full(len(elsewhere), main_thread))
    phase: Integers = np.append(ranges.phase, -1)[found].astype(np.int16)
    return phase


def _add_closures(
    trace: Trace,
    names: list[str],
    ranges: PhaseRanges,
    phase: Integers,
    main_thread: int,
    thread: Integers,
    moment: Integers,
) -> tuple[list[str], PhaseRanges]:
    """(names, ranges) with the passes of the model that an optimizer's step runs, and the rest of its closure."""
    if str(Phase.OPTIMIZER_STEP) not in names:
        return names, ranges
    optimizer = names.index(str(Phase.OPTIMIZER_STEP))
    passes = find_closures(trace, ranges, phase == optimizer, optimizer, main_thread)
    for name, found in zip((str(Phase.FORWARD), str(Phase.BACKWARD)), passes):
        names, ranges = _add_ranges(names, ranges, name, found)
    phase = _find_phase_at(trace, ranges, main_thread, thread, moment)
    numbers = tuple(names.index(str(one)) for one in (Phase.FORWARD, Phase.BACKWARD) if str(one) in names)
    rest = find_rest_of_closures(trace, ranges, numbers, phase == optimizer, optimizer)
    return _add_ranges(names, ranges, CLOSURE, rest)


def _add_ranges(names: list[str], ranges: PhaseRanges, name: str, found: PhaseRanges) -> tuple[list[str], PhaseRanges]:
    if not len(found):
        return names, ranges
    names = names if name in names else [*names, name]
    return names, ranges.join(found, names.index(name))


def _label_phases(trace: Trace, names: Integers) -> dict[int, str]:
    """{name: what a report calls its ranges}. Names that differ in numbers alone are one phase."""
    labels = {name: label_phase(trace.names[name]) for name in names.tolist()}
    common = {name: label if is_phase(trace.names[name]) else drop_numbers(label) for name, label in labels.items()}
    variants = Counter(common.values())
    return {name: common[name] if variants[common[name]] > 1 else label for name, label in labels.items()}


def _find_phase_ranges(trace: Trace, steps: HostSteps) -> Integers:
    """Rows of the ranges that are phases: known ones on any thread, wherever they are, and the outermost under a step
    on its thread. A range that merely wraps a whole step gives way to what it holds."""
    events, rows = trace.events, trace.rows[Kind.ANNOTATION]
    of_step = set(steps.names)
    names = trace.passing(lambda name: name not in of_step and _may_be_phase(name), Kind.ANNOTATION)
    rows = rows[names[events.name[rows]]]
    known = trace.passing(is_phase, Kind.ANNOTATION)[events.name]
    inside = union(steps.start_ns, steps.end_ns)
    own = rows[(events.thread[rows] == steps.thread) & inside.holds(events.start_ns[rows])]
    nest = trace.nest(own)
    top = nest.rows[nest.depth == 0]
    for level in range(3):
        outer = nest.rows[nest.depth == level]
        share = (events.end_ns[outer] - events.start_ns[outer]).sum() > WRAPPER_SHARE * inside.length
        if known[outer].any() or not share or not (nest.depth > level).any():
            top = outer
            break
    rows = np.union1d(_drop_recomputed_forward(trace, rows[known[rows]]), top)
    names, inverse = np.unique(events.name[rows], return_inverse=True)
    if len(names) <= MAX_NAMES:
        return rows
    # too many names (a name per batch, say): those that add up to least are left out
    lengths = np.bincount(inverse, events.end_ns[rows] - events.start_ns[rows])
    return rows[np.isin(inverse, np.argsort(-lengths, kind="stable")[:MAX_NAMES])]


def _may_be_phase(name: str) -> bool:
    """No mark of a step, no bookkeeping, no collective, which come inside any phase."""
    if PROFILER_STEP.match(name) or NUMBERED.match(name) or COMES_INSIDE_ANY.match(name):
        return False
    return find_meaning(name) != NO_PHASE_OF_ITS_OWN


def _drop_recomputed_forward(trace: Trace, rows: Integers) -> Integers:
    """`rows` without the forward ranges inside autograd's engine: activations are recomputed there, for backward."""
    events = trace.events
    engine = trace.nest(np.flatnonzero(is_backward(trace)))
    forward = trace.passing(lambda name: find_meaning(name) == Phase.FORWARD.value, Kind.ANNOTATION)[events.name[rows]]
    return rows[~forward | (engine.position_at(events.start_ns[rows], events.thread[rows]) < 0)]


def _told_by_operators(trace: Trace, main_thread: int) -> Iterator[tuple[str, Callable[[Integers, Integers], Flags]]]:
    """(phase, test of threads and moments): what lies inside operators of autograd, or on a thread of its own; then
    what sends tensors to the device; then what gradients will be taken of. Nothing where there is no backward pass."""
    events, operators, backward = trace.events, trace.rows[Kind.OP], is_backward(trace)
    if not backward.any():
        return
    threads, engine = np.setdiff1d(events.thread[backward], [main_thread]), trace.nest(np.flatnonzero(backward))
    yield (
        str(Phase.BACKWARD),
        lambda thread, moment: (engine.position_at(moment, thread) >= 0) | np.isin(thread, threads),
    )
    # the outermost operators that launch a copy to the device
    nest = trace.nest(operators[trace.matching(SENDS.match)[operators]])
    copies = trace.rows[Kind.MEMCPY]
    calls = trace.launch_of[copies[trace.matching(TO_DEVICE.search)[copies]]]
    calls = calls[calls >= 0]
    found = trace.nest(nest.rows[nest.depth == 0]).row_at(events.start_ns[calls], events.thread[calls])
    sending = trace.nest(np.unique(found[found >= 0]))
    yield str(Phase.DATA_TO_DEVICE), lambda thread, moment: sending.position_at(moment, thread) >= 0
    tracked = operators[~backward[operators] & (events.sequence[operators] >= 0)]
    forward = trace.nest(_drop_reductions_after_backward(trace, tracked, backward))
    yield str(Phase.FORWARD), lambda thread, moment: forward.position_at(moment, thread) >= 0


def _drop_reductions_after_backward(trace: Trace, tracked: Integers, backward: Flags) -> Integers:
    """Leave out gradients' sums by hand, which are no part of forward.

    torch gives an operator that no gradient is taken of the number that the next one will have, so that a reduction
    after backward has the number of the next step's first operator. That one, the last with its number, begins the next
    pass.

    Args:
        trace: all events.
        tracked: rows of the operators with a number, outside of backward.
        backward: [n] whether an event is autograd's.

    Returns:
        The rows without reductions that lie between the end of a backward pass and the next operator that owns its
        number.
    """
    events = trace.events
    reduces = trace.matching(REDUCES.match)[tracked]
    if not reduces.any():
        return tracked
    kept = ~reduces
    for thread in np.unique(events.thread[tracked[reduces]]):
        of_thread = tracked[events.thread[tracked] == thread]
        numbers = events.sequence[of_thread]
        # rows are ordered by start, and numbers only grow
        is_owner = np.append(numbers[1:] != numbers[:-1], True) & ~trace.matching(REDUCES.match)[of_thread]
        owners_ns = events.start_ns[of_thread[is_owner]]
        backward_ns = np.sort(events.start_ns[backward])
        mine = np.flatnonzero(reduces & (events.thread[tracked] == thread))
        moments = events.start_ns[tracked[mine]]
        last_owner = np.append(owners_ns, 0)[np.searchsorted(owners_ns, moments, side="right") - 1]
        last_backward = np.append(backward_ns, 0)[np.searchsorted(backward_ns, moments, side="right") - 1]
        kept[mine] = last_owner > last_backward
    return tracked[kept]
