"""Where the steps of a trace are, on the host: by the profiler's marks, else by ranges that are steps,
else by updates."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.time.host_names import name_cause
from megatron_lite.analysis.time.range_names import (
    WARM_UP,
    drop_numbers,
    find_meaning,
    find_step_family,
    is_backward,
    is_phase,
)
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.phases import Phase
from megatron_lite.units import counted

PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")
NUMBERED = re.compile(r"(?:train(?:ing)?[ _-]?)?(?:step|iter|iteration)[ _#:=-]*(\d{1,18})$", re.IGNORECASE)
NOT_A_STEP = re.compile(
    r"nccl|gloo:|c10d::|Optimizer\.|enumerate\(DataLoader\)|nn\.Module|PyTorch Profiler", re.IGNORECASE
)
MIN_COVERED = 0.5  # of its thread's time, by a range that repeats and so may be the step
MIN_TIMES = 2  # a range that comes once repeats nothing
WHOLE_TRACE = "whole trace"  # the name of the only step of a trace without any
NO_MARKS = "no step marks (ProfilerStep#N)"
HOST_KINDS = (Kind.OP, Kind.ANNOTATION, Kind.RUNTIME, Kind.PYTHON)


@dataclass(frozen=True)
class HostSteps:
    """k steps in order, none overlapping another."""

    names: tuple[str, ...]
    numbers: tuple[int | None, ...]
    start_ns: Integers  # int64 [k]
    end_ns: Integers  # int64 [k]
    thread: int  # that drives them; -1: no host event
    notes: tuple[str, ...] = ()

    def follows(self) -> Flags:
        """bool [k]: does the step come right after the one before? Two windows in one file leave a hole."""
        pairs = zip(self.numbers, self.numbers[1:])
        direct = [before is None or number is None or number == before + 1 for before, number in pairs]
        return np.array([False, *direct][: len(self.names)], bool)


def find_host_steps(trace: Trace) -> HostSteps:
    """The steps of the trace; at least one if it has any event."""
    marked = _find_marked(trace)
    if marked:
        return marked
    updates = _find_updates(trace)
    most = len(updates.names) if updates else None
    return (
        _find_families(trace)
        or _find_repeating(trace, lambda name: not is_phase(name), most)
        or updates
        or _find_batches(trace)
        or _find_repeating(trace, is_phase, None)
        or _take_whole_trace(trace)
    )


# --- marks


def _find_marked(trace: Trace) -> HostSteps | None:
    """The steps by ranges that name and number themselves as such."""
    events, ranges = trace.events, trace.rows[Kind.ANNOTATION]
    for pattern in (PROFILER_STEP, NUMBERED):
        rows = ranges[trace.passing(pattern.match, Kind.ANNOTATION)[events.name[ranges]]]
        if len(rows):
            thread = int(np.bincount(events.thread[rows]).argmax())
            rows = _find_siblings(trace, rows[events.thread[rows] == thread])
            names = tuple(trace.name_of(row) for row in rows)
            numbers = tuple(int(found[1]) for name in names if (found := pattern.match(name)))
            return HostSteps(names, numbers, events.start_ns[rows], events.end_ns[rows], thread)
    return None


def _find_siblings(trace: Trace, rows: Integers) -> Integers:
    """Those of the ranges `rows` of one thread, by start, that begin after all earlier ones have ended."""
    reach = np.maximum.accumulate(trace.events.end_ns[rows])
    return rows[np.concatenate(([True], trace.events.start_ns[rows][1:] >= reach[:-1]))] if len(rows) else rows


# --- ranges that repeat


def _find_families(trace: Trace) -> HostSteps | None:
    """The steps by ranges whose names the table knows as steps, whatever numbers stand in them."""
    events, ranges = trace.events, trace.rows[Kind.ANNOTATION]
    families = np.full(len(trace.names), -1)
    for number in trace.names_of[Kind.ANNOTATION].tolist():
        families[number] = find_step_family(trace.names[number])
    for family in np.unique(families[families >= 0]):
        rows = ranges[families[events.name[ranges]] == family]
        thread = int(np.bincount(events.thread[rows]).argmax())
        rows = _leave_warm_up_out(trace, _find_siblings(trace, rows[events.thread[rows] == thread]))
        if len(rows) >= MIN_TIMES:
            return _take_ranges(trace, rows)
    return None


def _is_no_step(name: str) -> bool:
    """Is the range known to be something else: a loader's, a checkpoint, a collective?"""
    return bool(NOT_A_STEP.match(name)) or name_cause(name, "range") is not None


def _find_repeating(trace: Trace, may_be_step: Callable[[str], bool], most: int | None) -> HostSteps | None:
    """The steps by the range that comes back and covers most of its thread; None if it covers too little.

    A range inside another of its own name does not come back. Names that differ in numbers alone count as one name
    where no whole name comes back.

    Args:
        may_be_step: The test of a name.
        most: So many steps at most, where the trace tells; a range that comes more often is a part of one.
    """
    ranges = trace.rows[Kind.ANNOTATION]
    test = trace.passing(lambda name: not _is_no_step(name) and may_be_step(name), Kind.ANNOTATION)
    rows = _leave_warm_up_out(trace, ranges[test[trace.events.name[ranges]]])
    for spell in (str, drop_numbers):
        found = _choose_repeating(trace, rows, spell)
        if len(found) and (most is None or len(found) <= most):
            return _take_ranges(trace, found)
    return None


def _choose_repeating(trace: Trace, rows: Integers, spell: Callable[[str], str]) -> Integers:
    """Those of `rows` that are the outermost range that comes back and covers most of its thread; none if it covers too
    little. spell: what a range's name counts as."""
    events = trace.events
    spelled = {number: spell(trace.names[number]) for number in np.unique(events.name[rows]).tolist()}
    numbers = {text: number for number, text in enumerate(dict.fromkeys(spelled.values()))}
    number_of = np.zeros(len(trace.names), np.int64)
    for name, text in spelled.items():
        number_of[name] = numbers[text]
    keys = events.thread[rows].astype(np.int64) * len(trace.names) + number_of[events.name[rows]]
    key = np.full(len(events), -1, np.int64)
    key[rows] = np.unique(keys, return_inverse=True)[1]
    rows = _drop_nested_in_own(trace, rows, key)
    nest = trace.nest(rows[np.bincount(key[rows])[key[rows]] >= MIN_TIMES])
    top: Integers = nest.rows[nest.depth == 0]
    if not len(top):
        return top
    covered = np.bincount(key[top], events.end_ns[top] - events.start_ns[top])
    top = np.sort(top[key[top] == covered.argmax()])
    share = covered.max() / (events.end_ns[top].max() - events.start_ns[top].min())
    return top if len(top) >= MIN_TIMES and share >= MIN_COVERED else top[:0]


def _drop_nested_in_own(trace: Trace, rows: Integers, key: Integers) -> Integers:
    """`rows` without the ranges that lie inside another of the same key. key [n]: by event."""
    nest = trace.nest(rows)
    inside = np.zeros(len(nest.rows), bool)
    position: Integers = np.arange(len(nest.rows))
    around: Integers = position
    while len(around):
        around = nest.parent[around]
        position, around = position[around >= 0], around[around >= 0]
        inside[position] |= key[nest.rows[around]] == key[nest.rows[position]]
    return np.sort(nest.rows[~inside])


def _leave_warm_up_out(trace: Trace, rows: Integers) -> Integers:
    """`rows` without those that are named as a warm-up, if there are others."""
    warm_up = trace.passing(WARM_UP.search, Kind.ANNOTATION)[trace.events.name[rows]]
    return rows if warm_up.all() else rows[~warm_up]


def _take_ranges(trace: Trace, rows: Integers) -> HostSteps:
    events = trace.events
    names = tuple(trace.name_of(row) for row in rows)
    common = names[0] if len(set(names)) == 1 else drop_numbers(names[0])
    others = len({drop_numbers(name) for name in names}) - 1
    kin = f" and {others} more names" if others else ""
    note = f"{NO_MARKS}: steps are taken from the range '{common}'{kin}, which comes {counted(len(rows), 'time')}"
    thread = int(events.thread[rows[0]])
    return HostSteps(names, (None,) * len(rows), events.start_ns[rows], events.end_ns[rows], thread, (note,))


# --- without such ranges: updates, batches


def find_main_thread(trace: Trace) -> int:
    """The thread that runs the loop; -1: no event of a host.

    It draws batches and calls the optimizer. Else the one with most events, without those of autograd's engine: its
    thread may have more than all others.
    """
    events = trace.events
    rows = np.flatnonzero((events.device < 0) & np.isin(events.kind, HOST_KINDS))
    if not len(rows):
        return -1
    engine = trace.nest(np.flatnonzero(is_backward(trace)))
    own = rows[engine.position_at(events.start_ns[rows], events.thread[rows]) < 0]
    known = trace.passing(lambda name: find_meaning(name) in _OF_THE_LOOP, Kind.ANNOTATION)
    of_loop = own[known[events.name[own]] & (events.kind[own] == Kind.ANNOTATION)]
    for chosen in (of_loop, own, rows):
        if len(chosen):
            return int(np.bincount(events.thread[chosen]).argmax())
    return -1


_OF_THE_LOOP = (Phase.DATA.value, Phase.FORWARD.value, Phase.OPTIMIZER_STEP.value, "Optimizer.zero_grad")


def _find_phase_on_main(trace: Trace, phase: Phase) -> tuple[int, Integers]:
    """(the main thread, rows of the outermost ranges there that are the phase)."""
    events, ranges, thread = trace.events, trace.rows[Kind.ANNOTATION], find_main_thread(trace)
    known = trace.passing(lambda name: find_meaning(name) == phase.value, Kind.ANNOTATION)
    rows = ranges[known[events.name[ranges]] & (events.thread[ranges] == thread)]
    return thread, _find_siblings(trace, rows)


def _find_updates(trace: Trace) -> HostSteps | None:
    """A step from the end of each update by the optimizer to the end of the next.

    Several optimizers that step one after the other, without a backward pass between them, make one update. Where
    batches are drawn more seldom than updates are made (two networks that learn in turns), a step is a batch.
    """
    events = trace.events
    thread, rows = _find_phase_on_main(trace, Phase.OPTIMIZER_STEP)
    _, batches = _find_phase_on_main(trace, Phase.DATA)
    if len(rows) < MIN_TIMES:
        return None
    backward = np.sort(events.start_ns[is_backward(trace)])
    begun = np.searchsorted(backward, events.start_ns[rows])
    is_last = np.append(begun[1:] > begun[:-1], True) if len(backward) else np.ones(len(rows), bool)
    ends = np.maximum.accumulate(events.end_ns[rows])[is_last]
    if len(ends) < MIN_TIMES:
        return None
    if MIN_TIMES <= len(batches) <= len(ends) // 2:
        return _find_batches(trace)
    host = np.flatnonzero((events.thread == thread) & (events.device < 0) & np.isin(events.kind, HOST_KINDS))
    start = np.concatenate((events.start_ns[host[:1]], ends[:-1]))
    note = f"{NO_MARKS}: steps are taken from the optimizer's updates, of which there are {len(ends)}"
    return HostSteps(_number_names("update", len(ends)), (None,) * len(ends), start, ends, thread, (note,))


def _find_batches(trace: Trace) -> HostSteps | None:
    """A step from the draw of each batch to the next."""
    events, operators = trace.events, trace.rows[Kind.OP]
    thread, rows = _find_phase_on_main(trace, Phase.DATA)
    # the loader is asked once more than it has batches
    last = events.start_ns[operators[events.thread[operators] == thread]].max(initial=-1)
    rows = rows[events.start_ns[rows] < last]
    if len(rows) < MIN_TIMES:
        return None
    on_thread = (events.thread == thread) & (events.device < 0)
    starts = events.start_ns[rows]
    ends = np.append(starts[1:], events.end_ns[on_thread].max())
    note = f"{NO_MARKS}: steps are taken from the loader's batches, of which there are {len(rows)}"
    return HostSteps(_number_names("batch", len(rows)), (None,) * len(rows), starts, ends, thread, (note,))


def _number_names(word: str, count: int) -> tuple[str, ...]:
    return tuple(f"{word} {number}" for number in range(1, count + 1))


# --- without any


def _take_whole_trace(trace: Trace) -> HostSteps:
    """One step: all that there is, or what comes after a warm-up that names itself as such."""
    events = trace.events
    host = np.flatnonzero((events.device < 0) & np.isin(events.kind, HOST_KINDS))
    rows = np.concatenate((host, trace.device_rows))
    if not len(rows):
        return HostSteps((), (), rows, rows, -1, ("no event of a host or a device",))
    thread = find_main_thread(trace)
    measured = _find_measured(trace, thread)
    if len(measured):
        name = trace.name_of(measured[0]) if len(measured) == 1 else f"{len(measured)} ranges"
        note = f"{NO_MARKS}: '{name}' counts as one step, without the warm-up before it"
        start, end = events.start_ns[measured].min(keepdims=True), events.end_ns[measured].max(keepdims=True)
        return HostSteps((name,), (None,), start, end, thread, (note,))
    start, end = events.start_ns[rows].min(keepdims=True), events.end_ns[rows].max(keepdims=True)
    note = f"{NO_MARKS}: the whole trace counts as one step"
    return HostSteps((WHOLE_TRACE,), (None,), start, end, thread, (note,))


def _find_measured(trace: Trace, thread: int) -> Integers:
    """Rows of the thread's outermost ranges after one that is named as a warm-up; none without a warm-up."""
    events, ranges = trace.events, trace.rows[Kind.ANNOTATION]
    test = trace.passing(lambda name: not NOT_A_STEP.match(name), Kind.ANNOTATION)
    top = _find_siblings(trace, ranges[test[events.name[ranges]] & (events.thread[ranges] == thread)])
    warm_up = trace.passing(WARM_UP.search, Kind.ANNOTATION)[events.name[top]]
    if not warm_up.any():
        return top[:0]
    return top[np.flatnonzero(warm_up)[-1] + 1 :]
