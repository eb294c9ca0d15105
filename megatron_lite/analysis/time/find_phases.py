"""The phase of every event: by the range around it (or around its launch), across threads."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers, Nesting, union
from megatron_lite.analysis.time.closures import find_closures, find_rest_of_closures
from megatron_lite.analysis.time.host_steps import NUMBERED, PROFILER_STEP, HostSteps
from megatron_lite.analysis.time.range_names import (
    COMES_INSIDE_ANY,
    drop_numbers,
    is_backward,
    is_phase,
    label_phase,
)
from megatron_lite.analysis.time.time_results import PhaseRanges
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.phase_names import NO_PHASE_OF_ITS_OWN, find_meaning
from megatron_lite.phases import Phase

SENDS = re.compile(r"aten::(to|_to_copy|copy_|cuda)$")
TO_DEVICE = re.compile(r"HtoD|HostToDevice|Host ?-> ?Device", re.IGNORECASE)
REDUCES = re.compile(r"_?c10d(_functional)?::_?(allreduce|all_reduce|reduce)")
CLOSURE = "closure"  # that an optimizer calls in its step: what is neither forward nor backward in it
MAX_NAMES = 100  # of ranges that are phases
MAX_WRAPPERS = 3  # such ranges inside each other
WRAPPER_SHARE = 0.9  # a range over so much of its step says nothing: what lies inside it is the phase
Test = Callable[[Integers, Integers], Flags]  # of threads and moments


@dataclass(frozen=True)
class _Places:
    """Where the host was for each of the n events of a trace."""

    trace: Trace
    thread: Integers  # [n], index into Trace.threads; -1: unknown
    moment: Integers  # [n], ns
    main_thread: int  # that drives the steps; -1: no host event

    def find_phase(self, ranges: PhaseRanges) -> Integers:
        """Find the phase of the innermost range around each moment: int16 [n]; -1: none."""
        nest = ranges.nest()
        position = nest.position_at(self.moment, np.maximum(self.thread, 0))
        position = np.where(self.thread >= 0, position, -1)
        _leave_inner_phases(self.trace, ranges, nest, position)
        found = nest.row_of(position)
        if self.main_thread >= 0:
            on_other_thread = (self.thread >= 0) & (self.thread != self.main_thread)
            elsewhere = np.flatnonzero((found < 0) & on_other_thread)
            main = ranges.nest(ranges.thread == self.main_thread)
            main_thread = np.full(len(elsewhere), self.main_thread)
            found[elsewhere] = main.row_at(self.moment[elsewhere], main_thread)
        # index -1 finds the last entry
        phase_of_range = np.append(ranges.phase, -1)
        phase: Integers = phase_of_range[found].astype(np.int16)
        return phase


def find_phases(
    trace: Trace,
    steps: HostSteps,
    thread: Integers,
    moment: Integers,
) -> tuple[tuple[str, ...], Integers, PhaseRanges]:
    """Find the phase of every event.

    It is the innermost phase around the moment on its own thread; else on the thread that drives the steps, which
    stands in backward() while autograd's thread works; else what operators tell: autograd's, or that gradients will be
    taken.

    Args:
        trace: all events.
        steps: the steps on the host.
        thread: [n], where the host was for each event; -1: unknown.
        moment: [n], when it was there.

    Returns:
        Names of the phases; int16 [n], index into the names (-1: none); the ranges, without their steps.
    """
    places = _Places(trace, thread, moment, steps.thread)
    names, ranges = _make_ranges(trace, _find_phase_ranges(trace, steps))
    names, ranges = _add_closures(places, names, ranges)
    phase = places.find_phase(ranges)
    for name, is_inside in _told_by_operators(trace, steps.thread):
        unknown = np.flatnonzero((phase < 0) & (thread >= 0))
        hit = unknown[is_inside(thread[unknown], moment[unknown])]
        if len(hit):
            names = _add_name(names, name)
            phase[hit] = names.index(name)
    return tuple(names), phase, ranges


def _make_ranges(trace: Trace, rows: Integers) -> tuple[list[str], PhaseRanges]:
    """Make the names of the phases and their ranges of the events `rows`."""
    events = trace.events
    number = events.name[rows]
    labels = _label_phases(trace, np.unique(number))
    # each label once, in the order of the first range with it
    names = list(dict.fromkeys(map(labels.__getitem__, number.tolist())))
    phase_of_name = np.full(len(trace.names), -1, np.int64)
    for name, label in labels.items():
        phase_of_name[name] = names.index(label)
    ranges = PhaseRanges(
        start_ns=events.start_ns[rows],
        end_ns=events.end_ns[rows],
        thread=events.thread[rows].astype(np.int64),
        phase=phase_of_name[number],
    )
    return names, ranges


def _leave_inner_phases(
    trace: Trace,
    ranges: PhaseRanges,
    nest: Nesting,
    position: Integers,
) -> None:
    """Leave the phases that begin with a longer range: that one holds the phase, not the other way round.

    Args:
        trace: all events.
        ranges: the phases' ranges.
        nest: the same as stacks.
        position: [n], position in the stack around the start of each event; is changed.
    """
    events = trace.events
    start = ranges.start_ns[nest.rows]
    end = ranges.end_ns[nest.rows]
    wider = trace.rows[Kind.ANNOTATION]
    wider = wider[position[wider] >= 0]
    while len(wider):
        inner = position[wider]
        starts_with_it = start[inner] == events.start_ns[wider]
        is_longer = end[inner] < events.end_ns[wider]
        wider = wider[starts_with_it & is_longer]
        position[wider] = nest.parent[position[wider]]
        wider = wider[position[wider] >= 0]


def _add_closures(
    places: _Places,
    names: list[str],
    ranges: PhaseRanges,
) -> tuple[list[str], PhaseRanges]:
    """Add the passes of the model that an optimizer's step runs, and the rest of its closure, to names and ranges."""
    if str(Phase.OPTIMIZER_STEP) not in names:
        return names, ranges
    optimizer = names.index(str(Phase.OPTIMIZER_STEP))
    in_optimizer = places.find_phase(ranges) == optimizer
    passes = find_closures(places.trace, ranges, in_optimizer, optimizer, places.main_thread)
    kinds = (str(Phase.FORWARD), str(Phase.BACKWARD))
    for name, found in zip(kinds, passes):
        names, ranges = _add_ranges(names, ranges, name, found)
    in_optimizer = places.find_phase(ranges) == optimizer
    numbers = []
    for name in kinds:
        if name in names:
            numbers.append(names.index(name))
    rest = find_rest_of_closures(places.trace, ranges, tuple(numbers), in_optimizer, optimizer)
    return _add_ranges(names, ranges, CLOSURE, rest)


def _add_ranges(
    names: list[str],
    ranges: PhaseRanges,
    name: str,
    found: PhaseRanges,
) -> tuple[list[str], PhaseRanges]:
    """Add what was found of the phase `name` to names and ranges."""
    if not len(found):
        return names, ranges
    names = _add_name(names, name)
    return names, ranges.join(found, names.index(name))


def _add_name(names: list[str], name: str) -> list[str]:
    return names if name in names else [*names, name]


def _label_phases(trace: Trace, numbers: Integers) -> dict[int, str]:
    """Label names by what a report calls their ranges: {number of a name: label}.

    Names that differ in numbers alone are one phase.
    """
    labels = {}
    common = {}
    for number in numbers.tolist():
        name = trace.names[number]
        label = label_phase(name)
        labels[number] = label
        common[number] = label if is_phase(name) else drop_numbers(label)
    variants = Counter(common.values())
    for number, label in common.items():
        if variants[label] > 1:
            labels[number] = label
    return labels


def _find_phase_ranges(trace: Trace, steps: HostSteps) -> Integers:
    """Find the rows of the ranges that are phases.

    They are known ones on any thread, wherever they are, and the outermost under a step on its thread.
    """
    names_of_steps = set(steps.names)

    def may_be_phase(name: str) -> bool:
        return name not in names_of_steps and _may_be_phase(name)

    rows = trace.find_named(may_be_phase, Kind.ANNOTATION)
    is_known = trace.passing(is_phase, Kind.ANNOTATION)[trace.events.name]
    known = _drop_recomputed_forward(trace, rows[is_known[rows]])
    top = _find_outermost(trace, steps, rows, is_known)
    return _keep_longest_names(trace, np.union1d(known, top))


def _find_outermost(
    trace: Trace,
    steps: HostSteps,
    rows: Integers,
    is_known: Flags,
) -> Integers:
    """Find the outermost of the ranges `rows` under a step.

    One that merely wraps a whole step gives way to what it holds. is_known: [n], whether an event's name is a phase's.
    """
    inside = union(steps.start_ns, steps.end_ns)
    own = trace.on_thread(rows, steps.thread)
    begins_inside = inside.holds(trace.events.start_ns[own])
    own = own[begins_inside]
    nest = trace.nest(own)
    for level in range(MAX_WRAPPERS):
        outer: Integers = nest.rows[nest.depth == level]
        outer_ns = trace.lengths_ns(outer).sum()
        is_wrapper = outer_ns > WRAPPER_SHARE * inside.length
        holds_others = (nest.depth > level).any()
        if is_known[outer].any() or not is_wrapper or not holds_others:
            return outer
    outermost: Integers = nest.rows[nest.depth == 0]
    return outermost


def _keep_longest_names(trace: Trace, rows: Integers) -> Integers:
    """`rows` without the ranges of names beyond MAX_NAMES (a name per batch, say): those that add up to least."""
    number = trace.events.name[rows]
    names, name_of_row = np.unique(number, return_inverse=True)
    if len(names) <= MAX_NAMES:
        return rows
    lengths = np.bincount(name_of_row, trace.lengths_ns(rows))
    longest = np.argsort(-lengths, kind="stable")[:MAX_NAMES]
    return rows[np.isin(name_of_row, longest)]


def _may_be_phase(name: str) -> bool:
    """Whether it is no mark of a step, no bookkeeping and no collective, which come inside any phase."""
    if PROFILER_STEP.match(name) or NUMBERED.match(name):
        return False
    if COMES_INSIDE_ANY.match(name):
        return False
    return find_meaning(name) != NO_PHASE_OF_ITS_OWN


def _drop_recomputed_forward(trace: Trace, rows: Integers) -> Integers:
    """`rows` without the forward ranges inside autograd's engine: activations are recomputed there, for backward."""
    engine = trace.nest(np.flatnonzero(is_backward(trace)))
    is_inside = trace.position_in(engine, rows) >= 0
    means_forward = trace.passing(_means_forward, Kind.ANNOTATION)
    is_forward = means_forward[trace.events.name[rows]]
    return rows[~(is_forward & is_inside)]


def _means_forward(name: str) -> bool:
    return find_meaning(name) == Phase.FORWARD.value


def _told_by_operators(trace: Trace, main_thread: int) -> Iterator[tuple[str, Test]]:
    """Yield phases that operators tell, each with what lies in it; nothing where there is no backward pass.

    These are: what lies inside operators of autograd, or on a thread of its own; then what sends tensors to the device;
    then what gradients will be taken of.
    """
    events = trace.events
    backward = is_backward(trace)
    if not backward.any():
        return
    engine_threads = np.setdiff1d(events.thread[backward], [main_thread])
    is_in_engine = _make_test(trace, np.flatnonzero(backward))

    def is_in_backward(thread: Integers, moment: Integers) -> Flags:
        return is_in_engine(thread, moment) | np.isin(thread, engine_threads)

    yield str(Phase.BACKWARD), is_in_backward
    yield str(Phase.DATA_TO_DEVICE), _make_test(trace, _find_sending(trace))
    operators = trace.rows[Kind.OP]
    is_tracked = events.sequence[operators] >= 0
    tracked = operators[is_tracked & ~backward[operators]]
    forward = _drop_reductions_after_backward(trace, tracked, backward)
    yield str(Phase.FORWARD), _make_test(trace, forward)


def _make_test(trace: Trace, rows: Integers) -> Test:
    """Make the test of whether moments of threads lie inside the events `rows`."""
    nest = trace.nest(rows)

    def is_inside(thread: Integers, moment: Integers) -> Flags:
        inside: Flags = nest.position_at(moment, thread) >= 0
        return inside

    return is_inside


def _find_sending(trace: Trace) -> Integers:
    """Rows of the outermost operators that launch a copy to the device."""
    senders = trace.nest(trace.find_named(SENDS.match, Kind.OP))
    outermost = trace.nest(senders.rows[senders.depth == 0])
    copies = trace.find_named(TO_DEVICE.search, Kind.MEMCPY)
    calls = trace.launch_of[copies]
    calls = calls[calls >= 0]
    around = trace.position_in(outermost, calls)
    return np.unique(outermost.rows[around[around >= 0]])


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
    reduces = trace.matching(REDUCES.match)
    reductions = tracked[reduces[tracked]]
    if not len(reductions):
        return tracked
    backward_ns = np.sort(events.start_ns[backward])
    left_out = []
    for thread in np.unique(events.thread[reductions]):
        of_thread = trace.on_thread(tracked, thread)
        numbers = events.sequence[of_thread]
        # rows are ordered by start, and numbers only grow
        is_followed_by_next = numbers[1:] != numbers[:-1]
        is_last = np.append(is_followed_by_next, True)
        owners = of_thread[is_last & ~reduces[of_thread]]
        mine = trace.on_thread(reductions, thread)
        moments = events.start_ns[mine]
        last_owner = _find_last_before(events.start_ns[owners], moments)
        last_backward = _find_last_before(backward_ns, moments)
        left_out.append(mine[last_owner <= last_backward])
    return np.setdiff1d(tracked, np.concatenate(left_out))


def _find_last_before(times: Integers, moments: Integers) -> Integers:
    """The last of the sorted times up to each moment; 0 where there is none."""
    begun = np.searchsorted(times, moments, side="right")
    # index -1 finds the last entry
    return np.append(times, 0)[begun - 1]
