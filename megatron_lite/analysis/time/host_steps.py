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
    is_backward,
    is_phase,
)
from megatron_lite.analysis.trace.columns import HOST_KINDS, Kind, Trace
from megatron_lite.phase_names import find_meaning, find_step_family
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


@dataclass(frozen=True)
class HostSteps:
    """Steps of the host, k in order, none overlapping another."""

    names: tuple[str, ...]
    numbers: tuple[int | None, ...]
    start_ns: Integers  # int64 [k]
    end_ns: Integers  # int64 [k]
    thread: int  # that drives them; -1: no host event
    notes: tuple[str, ...] = ()

    def follows(self) -> Flags:
        """Tell for each step (bool [k]) whether it comes right after the one before.

        Two windows in one file leave a hole.
        """
        follows = np.zeros(len(self.names), bool)
        for k in range(1, len(self.names)):
            before = self.numbers[k - 1]
            number = self.numbers[k]
            if before is None or number is None:
                # steps without numbers are taken to follow each other
                follows[k] = True
            else:
                follows[k] = number == before + 1
        return follows


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
    events = trace.events
    for pattern in (PROFILER_STEP, NUMBERED):
        marks = trace.find_named(pattern.match, Kind.ANNOTATION)
        if not len(marks):
            continue
        thread = _find_main_thread_of(trace, marks)
        rows = _find_siblings(trace, trace.on_thread(marks, thread))
        names = tuple(trace.name_of(row) for row in rows)
        return HostSteps(
            names,
            numbers=tuple(int(pattern.sub(r"\1", name)) for name in names),
            start_ns=events.start_ns[rows],
            end_ns=events.end_ns[rows],
            thread=thread,
        )
    return None


def _find_main_thread_of(trace: Trace, rows: Integers) -> int:
    """The thread of most of the events `rows`; there is at least one."""
    return int(np.bincount(trace.events.thread[rows]).argmax())


def _find_siblings(trace: Trace, rows: Integers) -> Integers:
    """Find those of the ranges `rows` of one thread, by start, that begin after all earlier ones have ended."""
    if not len(rows):
        return rows
    start = trace.events.start_ns[rows]
    reach = np.maximum.accumulate(trace.events.end_ns[rows])
    is_apart = start[1:] >= reach[:-1]
    return rows[np.concatenate(([True], is_apart))]


# --- ranges that repeat


def _find_families(trace: Trace) -> HostSteps | None:
    """The steps by ranges whose names the table knows as steps, whatever numbers stand in them."""
    ranges = trace.rows[Kind.ANNOTATION]
    family_of_name = np.full(len(trace.names), -1)
    for number in trace.names_of[Kind.ANNOTATION].tolist():
        family_of_name[number] = find_step_family(trace.names[number])
    family_of_range = family_of_name[trace.events.name[ranges]]
    for family in np.unique(family_of_range[family_of_range >= 0]):
        rows = ranges[family_of_range == family]
        rows = trace.on_thread(rows, _find_main_thread_of(trace, rows))
        rows = _leave_warm_up_out(trace, _find_siblings(trace, rows))
        if len(rows) >= MIN_TIMES:
            return _take_ranges(trace, rows)
    return None


def _is_no_step(name: str) -> bool:
    """Whether the range is known to be something else: a loader's, a checkpoint, a collective."""
    return bool(NOT_A_STEP.match(name)) or name_cause(name, "range") is not None


def _find_repeating(
    trace: Trace,
    may_be_step: Callable[[str], bool],
    most: int | None,
) -> HostSteps | None:
    """The steps by the range that comes back and covers most of its thread; None if it covers too little.

    A range inside another of its own name does not come back. Names that differ in numbers alone count as one name
    where no whole name comes back.

    Args:
        may_be_step: The test of a name.
        most: So many steps at most, where the trace tells; a range that comes more often is a part of one.
    """
    rows = trace.find_named(may_be_step, Kind.ANNOTATION)
    is_no_step = trace.passing(_is_no_step, Kind.ANNOTATION)
    rows = rows[~is_no_step[trace.events.name[rows]]]
    rows = _leave_warm_up_out(trace, rows)
    for spell in (str, drop_numbers):
        found = _choose_repeating(trace, rows, spell)
        if len(found) and (most is None or len(found) <= most):
            return _take_ranges(trace, found)
    return None


def _choose_repeating(trace: Trace, rows: Integers, spell: Callable[[str], str]) -> Integers:
    """Choose the outermost range that comes back and covers most of its thread.

    Args:
        trace: the trace.
        rows: the ranges that may be steps.
        spell: what a range's name counts as.

    Returns:
        Its rows; none if it covers too little.
    """
    key = _number_by_thread_and_name(trace, rows, spell)
    rows = _drop_nested_in_own(trace, rows, key)
    times = np.bincount(key[rows])
    comes_back = times[key[rows]] >= MIN_TIMES
    nest = trace.nest(rows[comes_back])
    top: Integers = nest.rows[nest.depth == 0]
    none = top[:0]
    if not len(top):
        return none
    covered_ns = np.bincount(key[top], trace.lengths_ns(top))
    covers_most = key[top] == covered_ns.argmax()
    top = np.sort(top[covers_most])
    if len(top) < MIN_TIMES:
        return none
    first_ns = trace.events.start_ns[top].min()
    last_ns = trace.events.end_ns[top].max()
    share = covered_ns.max() / (last_ns - first_ns)
    return top if share >= MIN_COVERED else none


def _number_by_thread_and_name(
    trace: Trace,
    rows: Integers,
    spell: Callable[[str], str],
) -> Integers:
    """Number the events `rows` so that those with one thread and one name as spelled are equal: int64 [n]; else -1."""
    events = trace.events
    number_of_text: dict[str, int] = {}
    number_of_name = np.zeros(len(trace.names), np.int64)
    for name in np.unique(events.name[rows]).tolist():
        text = spell(trace.names[name])
        number_of_name[name] = number_of_text.setdefault(text, len(number_of_text))
    thread = events.thread[rows].astype(np.int64)
    number = number_of_name[events.name[rows]]
    pairs = thread * len(trace.names) + number
    _, number_of_pair = np.unique(pairs, return_inverse=True)
    key = np.full(len(events), -1, np.int64)
    key[rows] = number_of_pair
    return key


def _drop_nested_in_own(trace: Trace, rows: Integers, key: Integers) -> Integers:
    """`rows` without the ranges that lie inside another of the same key. key [n]: by event."""
    nest = trace.nest(rows)
    key = key[nest.rows]
    is_inside = np.zeros(len(nest.rows), bool)
    # all ranges at once go outwards by one range in each turn
    position: Integers = np.arange(len(nest.rows))
    around: Integers = position
    while len(around):
        around = nest.parent[around]
        position = position[around >= 0]
        around = around[around >= 0]
        is_inside[position] |= key[around] == key[position]
    return np.sort(nest.rows[~is_inside])


def _leave_warm_up_out(trace: Trace, rows: Integers) -> Integers:
    """`rows` without those that are named as a warm-up, if there are others."""
    is_warm_up = _is_warm_up(trace, rows)
    return rows if is_warm_up.all() else rows[~is_warm_up]


def _is_warm_up(trace: Trace, rows: Integers) -> Flags:
    """Tell for each of the ranges `rows` (bool [k]) whether it is named as a warm-up."""
    is_named = trace.passing(WARM_UP.search, Kind.ANNOTATION)
    return is_named[trace.events.name[rows]]


def _take_ranges(trace: Trace, rows: Integers) -> HostSteps:
    """The ranges `rows` as steps, with a note."""
    names = tuple(trace.name_of(row) for row in rows)
    spelled = list(dict.fromkeys(map(drop_numbers, names)))
    common = spelled[0] if len(set(names)) > 1 else names[0]
    others = len(spelled) - 1
    kin = f" and {others} more names" if others else ""
    times = counted(len(rows), "time")
    return _make_steps(
        names,
        start=trace.events.start_ns[rows],
        end=trace.events.end_ns[rows],
        thread=int(trace.events.thread[rows[0]]),
        note=f"steps are taken from the range '{common}'{kin}, which comes {times}",
    )


def _make_steps(
    names: tuple[str, ...],
    start: Integers,
    end: Integers,
    thread: int,
    note: str,
) -> HostSteps:
    """Steps without numbers, found without marks. note: how they were found."""
    numbers = (None,) * len(names)
    return HostSteps(names, numbers, start, end, thread, (f"{NO_MARKS}: {note}",))


# --- without such ranges: updates, batches


def find_main_thread(trace: Trace) -> int:
    """The thread that runs the loop; -1: no event of a host.

    It draws batches and calls the optimizer. Else the one with most events, without those of autograd's engine: its
    thread may have more than all others.
    """
    events = trace.events
    rows = _find_host_events(trace)
    engine = trace.nest(np.flatnonzero(is_backward(trace)))
    own = rows[trace.position_in(engine, rows) < 0]
    known = trace.passing(lambda name: find_meaning(name) in _OF_THE_LOOP, Kind.ANNOTATION)
    is_range = events.kind[own] == Kind.ANNOTATION
    of_loop = own[is_range & known[events.name[own]]]
    for chosen in (of_loop, own, rows):
        if len(chosen):
            return _find_main_thread_of(trace, chosen)
    return -1


_OF_THE_LOOP = (
    Phase.DATA.value,
    Phase.FORWARD.value,
    Phase.OPTIMIZER_STEP.value,
    "Optimizer.zero_grad",
)


def _find_host_events(trace: Trace) -> Integers:
    """Rows of what ran on the host's threads."""
    is_of_host = np.isin(trace.events.kind, HOST_KINDS)
    return np.flatnonzero(is_of_host & (trace.events.device < 0))


def _find_phase_on_main(trace: Trace, phase: Phase) -> tuple[int, Integers]:
    """Find the main thread, and rows of the outermost ranges there that are the phase."""
    thread = find_main_thread(trace)

    def is_phase_wanted(name: str) -> bool:
        return find_meaning(name) == phase.value

    rows = trace.find_named(is_phase_wanted, Kind.ANNOTATION)
    return thread, _find_siblings(trace, trace.on_thread(rows, thread))


def _find_updates(trace: Trace) -> HostSteps | None:
    """A step from the end of each update by the optimizer to the end of the next.

    Several optimizers that step one after the other, without a backward pass between them, make one update. Where
    batches are drawn more seldom than updates are made (two networks that learn in turns), a step is a batch.
    """
    events = trace.events
    thread, rows = _find_phase_on_main(trace, Phase.OPTIMIZER_STEP)
    if len(rows) < MIN_TIMES:
        return None
    ends = np.maximum.accumulate(events.end_ns[rows])
    ends = ends[_is_last_update(trace, rows)]
    if len(ends) < MIN_TIMES:
        return None
    _, batches = _find_phase_on_main(trace, Phase.DATA)
    if MIN_TIMES <= len(batches) <= len(ends) // 2:
        return _find_batches(trace)
    host = trace.on_thread(_find_host_events(trace), thread)
    first_start = events.start_ns[host[:1]]
    return _make_steps(
        _number_names("update", len(ends)),
        start=np.concatenate((first_start, ends[:-1])),
        end=ends,
        thread=thread,
        note=f"steps are taken from the optimizer's updates, of which there are {len(ends)}",
    )


def _is_last_update(trace: Trace, rows: Integers) -> Flags:
    """Tell for each of the optimizer's ranges `rows` (bool [k]) whether a backward pass follows on it, or nothing does.

    True for all in a trace without backward passes.
    """
    backward_ns = np.sort(trace.events.start_ns[is_backward(trace)])
    if not len(backward_ns):
        return np.ones(len(rows), bool)
    begun = np.searchsorted(backward_ns, trace.events.start_ns[rows])
    return np.append(begun[1:] > begun[:-1], True)


def _find_batches(trace: Trace) -> HostSteps | None:
    """A step from the draw of each batch to the next."""
    events = trace.events
    thread, rows = _find_phase_on_main(trace, Phase.DATA)
    operators = trace.on_thread(trace.rows[Kind.OP], thread)
    # the loader is asked once more than it has batches
    last = events.start_ns[operators].max(initial=-1)
    rows = rows[events.start_ns[rows] < last]
    if len(rows) < MIN_TIMES:
        return None
    starts = events.start_ns[rows]
    is_of_host = events.device < 0
    is_on_thread = events.thread == thread
    last_end = events.end_ns[is_of_host & is_on_thread].max()
    return _make_steps(
        _number_names("batch", len(rows)),
        start=starts,
        end=np.append(starts[1:], last_end),
        thread=thread,
        note=f"steps are taken from the loader's batches, of which there are {len(rows)}",
    )


def _number_names(word: str, count: int) -> tuple[str, ...]:
    """Number names as in "update 1", "update 2"."""
    return tuple(f"{word} {number}" for number in range(1, count + 1))


# --- without any


def _take_whole_trace(trace: Trace) -> HostSteps:
    """Take all that there is as a single step, or what comes after a warm-up that names itself as such."""
    rows = np.concatenate((_find_host_events(trace), trace.device_rows))
    if not len(rows):
        return HostSteps((), (), rows, rows, -1, ("no event of a host or a device",))
    name = WHOLE_TRACE
    note = "the whole trace counts as one step"
    thread = find_main_thread(trace)
    measured = _find_measured(trace, thread)
    if len(measured):
        rows = measured
        name = f"{len(measured)} ranges"
        if len(measured) == 1:
            name = trace.name_of(measured[0])
        note = f"'{name}' counts as one step, without the warm-up before it"
    return _make_steps(
        (name,),
        start=trace.events.start_ns[rows].min(keepdims=True),
        end=trace.events.end_ns[rows].max(keepdims=True),
        thread=thread,
        note=note,
    )


def _find_measured(trace: Trace, thread: int) -> Integers:
    """Rows of the thread's outermost ranges after one that is named as a warm-up; none without a warm-up."""
    ranges = trace.find_named(lambda name: not NOT_A_STEP.match(name), Kind.ANNOTATION)
    top = _find_siblings(trace, trace.on_thread(ranges, thread))
    warm_ups = np.flatnonzero(_is_warm_up(trace, top))
    if not len(warm_ups):
        return top[:0]
    return top[warm_ups[-1] + 1 :]
