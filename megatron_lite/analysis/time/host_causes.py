"""When the host is busy with what names tell (host_names.py), and what of it is paid once."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import NOTHING, Cover, Flags, Integers, difference, intersection, joined, union
from megatron_lite.analysis.time.host_names import AFTER_SYNCS, CAUSES, name_cause
from megatron_lite.analysis.time.range_names import is_backward, known_phase
from megatron_lite.analysis.time.time_results import NamedWork, Placing, Step
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.phases import Phase

PHASES_OF_CAUSES = {
    "save": (Phase.SAVE, Phase.EVAL),
    "data_wait": (Phase.DATA,),
    "clip_grad": (Phase.CLIP_GRAD,),
    "log": (Phase.LOG,),
}
ON_ANY_THREAD = ("garbage_collector", "process_wait")
PAID_ONCE = ("startup", "compile", "graph_capture", "allocator")  # they may be, and mostly are
SEEN_AS = {
    Kind.RUNTIME: "call",
    Kind.ANNOTATION: "range",
    Kind.OP: "range",
    Kind.OTHER: "range",
    Kind.PYTHON: "frame",
    Kind.OVERHEAD: "overhead",
}


Key = tuple[str, str]  # cause, what it is


@dataclass(frozen=True)
class HostWork:
    """When the host did what the table names."""

    cause: str
    what: str
    start: Integers  # [m]; they may overlap
    end: Integers  # [m]

    @property
    def cover(self) -> Cover:
        """When any of it lasts."""
        return union(self.start, self.end)


def find_host_work(trace: Trace, threads: Integers) -> tuple[HostWork, ...]:
    """All named work of these threads, by cause and kind of work."""
    order = (*CAUSES, *AFTER_SYNCS)
    found = [*_find_named(trace, threads), *_find_captures(trace, threads)]
    return tuple(sorted(found, key=lambda work: order.index(work.cause)))


def _find_named(trace: Trace, threads: Integers) -> Iterator[HostWork]:
    """Work of the threads whose names the table knows."""
    events = trace.events
    is_on_threads = np.isin(events.thread, threads) & (events.device < 0)
    calls = trace.rows[Kind.RUNTIME]
    in_calls = trace.cover(calls[is_on_threads[calls]])
    for (cause, what), rows in _find_rows_of_causes(trace, is_on_threads).items():
        if cause == "data_wait":
            rows = _without_training(trace, rows)
        start = events.start_ns[rows]
        end = events.end_ns[rows]
        if (events.kind[rows] == Kind.OVERHEAD).all():
            # The profiler does not say on which thread; it keeps the host where a call of the host stands in it.
            inside = intersection(union(start, end), in_calls)
            start = inside.start
            end = inside.end
        if len(start):
            yield HostWork(cause, what, start, end)


def _find_rows_of_causes(trace: Trace, is_on_threads: Flags) -> dict[Key, Integers]:
    """Find the rows of the events of each (cause, what it is) that names tell.

    is_on_threads: [n], on the threads that matter.
    """
    pieces: dict[Key, list[Integers]] = {}
    for kind, seen_as in SEEN_AS.items():
        rows = trace.rows[kind]
        for key, names in _find_names_of_causes(trace, kind, seen_as).items():
            is_named = np.zeros(len(trace.names), bool)
            is_named[names] = True
            mine = rows[is_named[trace.events.name[rows]]]
            cause, _ = key
            if kind != Kind.OVERHEAD and cause not in ON_ANY_THREAD:
                mine = mine[is_on_threads[mine]]
            pieces.setdefault(key, []).append(mine)
    return {key: np.sort(np.concatenate(of_key)) for key, of_key in pieces.items()}


def _find_names_of_causes(
    trace: Trace,
    kind: Kind,
    seen_as: str,
) -> dict[Key, list[int]]:
    """Find the numbers of names of each (cause, what it is) of a kind's events, in the order of names."""
    found: dict[Key, list[int]] = {}
    for name in trace.names_of[kind].tolist():
        key = name_cause(trace.names[name], seen_as)
        if key:
            found.setdefault(key, []).append(name)
    return found


def _without_training(trace: Trace, rows: Integers) -> Integers:
    """Leave out of `rows` those that hold a backward pass: an iterator may as well yield the steps of training."""
    events = trace.events
    backward = np.sort(events.start_ns[is_backward(trace)])
    first = np.searchsorted(backward, events.start_ns[rows])
    beyond = np.searchsorted(backward, events.end_ns[rows])
    kept: Integers = rows[first == beyond]
    return kept


BEGINS_CAPTURE = re.compile(r"(cuda|hip|cu|mu|musa)StreamBeginCapture|aclmdlRICaptureBegin")
ENDS_CAPTURE = re.compile(r"(cuda|hip|cu|mu|musa)StreamEndCapture|aclmdlRICaptureEnd")


def _find_captures(trace: Trace, threads: Integers) -> Iterator[HostWork]:
    """The time from each beginning of a capture to its end: what is launched meanwhile does not run."""
    events = trace.events
    begins = trace.find_named(BEGINS_CAPTURE.match, Kind.RUNTIME)
    ends = trace.find_named(ENDS_CAPTURE.match, Kind.RUNTIME)
    starts = []
    stops = []
    begins = begins[np.isin(events.thread[begins], threads)]
    for begin in begins.tolist():
        after = trace.on_thread(ends, events.thread[begin])
        is_later = events.start_ns[after] >= events.end_ns[begin]
        after = after[is_later]
        if len(after):
            starts.append(events.start_ns[begin])
            stops.append(events.end_ns[after[0]])
    if starts:
        yield HostWork("graph_capture", "capturing", np.array(starts), np.array(stops))


def cover_causes(
    trace: Trace,
    placing: Placing,
    threads: Integers,
    works: tuple[HostWork, ...],
) -> dict[str, Cover]:
    """Find when each cause kept the host busy: named work, the ranges of its phases, and updates that run on the CPU.

    Args:
        trace: the trace.
        placing: where its events belong.
        threads: those that drive the device.
        works: named work of these threads.

    Returns:
        {cause: when}.
    """
    events = trace.events
    on_threads = np.isin(events.thread, threads)
    is_range = on_threads & (events.kind == Kind.ANNOTATION)
    covers = {cause: _join_works(works, cause) for cause in (*CAUSES, *AFTER_SYNCS)}
    for cause, phases in PHASES_OF_CAUSES.items():
        meanings = [known_phase(name) in phases for name in trace.names]
        is_of_cause = np.array(meanings, bool)[events.name]
        in_phases = trace.cover(is_range & is_of_cause)
        covers[cause] = joined(covers[cause], in_phases)
    updates = _find_cpu_updates(trace, placing, threads)
    covers["cpu_optimizer"] = joined(covers["cpu_optimizer"], updates)
    return covers


UPDATES = re.compile(r"aten::(_foreach_|_fused_\w+_$|(add|mul|div|sub|lerp|addcmul|addcdiv|sqrt|copy|neg|sign)_?$)")
MIN_UPDATE_NS = 50_000  # an operator that only launches takes 5 us; a step counter's addition, too


def _find_cpu_updates(trace: Trace, placing: Placing, threads: Integers) -> Cover:
    """When operators of the optimizer compute on the CPU, although the trace has a GPU.

    They are the innermost ones, launch nothing and take long.
    """
    name = str(Phase.OPTIMIZER_STEP)
    has_launches = (trace.launch_of[trace.device_rows] >= 0).any()
    if name not in placing.phases or not has_launches:
        return NOTHING
    events = trace.events
    operators = trace.rows[Kind.OP]
    is_parent = np.zeros(len(events) + 1, bool)
    # the last entry takes those without a parent
    is_parent[placing.operator[operators]] = True
    rows = trace.find_named(UPDATES.match, Kind.OP)
    in_phase = placing.phase[rows] == placing.phases.index(name)
    on_threads = np.isin(events.thread[rows], threads)
    rows = rows[in_phase & on_threads & ~is_parent[rows]]
    rows = rows[trace.lengths_ns(rows) >= MIN_UPDATE_NS]
    calls = trace.rows[Kind.RUNTIME]
    covers = [NOTHING]
    for thread in np.unique(events.thread[rows]):
        mine = trace.on_thread(rows, thread)
        launches_ns = events.start_ns[trace.on_thread(calls, thread)]
        before_start = np.searchsorted(launches_ns, events.start_ns[mine])
        before_end = np.searchsorted(launches_ns, events.end_ns[mine])
        covers.append(trace.cover(mine[before_start == before_end]))
    return joined(*covers)


# --- one-time costs, and not by every step

NOTABLE = 0.05  # of a step of the host
FEW_STEPS = 0.25  # of the steps: what so few have is not every step's
STILL = 0.10  # of the third with most: what the last third of a whole trace has, if it goes on
WHY_NOT = {
    "startup": "CUDA or a library starts in it",
    "compile": "something is compiled in it",
    "graph_capture": "a graph is captured in it",
    "allocator": "memory is first taken from the driver in it",
}


def find_steps_that_pay(cover: Cover, start: Integers, end: Integers) -> Flags:
    """Tell for each step of the host (bool [k]) whether some work takes a notable part of it.

    Args:
        cover: When the work is done.
        start: [k], ns, of the steps.
        end: [k], ns.
    """
    lengths = np.maximum(end - start, 1)
    pays: Flags = cover.within(start, end) > NOTABLE * lengths
    return pays


def is_paid_once(
    cause: str,
    cover: Cover,
    start: Integers,
    end: Integers,
) -> bool:
    """Decide whether work comes in few steps, or stops early, so that it is no cost of each step.

    The last third of a single step says so. An allocator that has grown early may be done with it; one that asks the
    driver later may ask again.

    Args:
        cause: why the host was busy.
        cover: when it was.
        start: [k], ns, of the host's steps.
        end: [k], ns.
    """
    if len(start) == 1:
        edges = np.linspace(start[0], end[0], num=4)
        edges = edges.astype(np.int64)
        thirds = cover.within(edges[:-1], edges[1:])
        return bool(thirds[-1] <= STILL * thirds.max())
    pays = np.flatnonzero(find_steps_that_pay(cover, start, end))
    if not len(pays):
        return True
    if pays[-1] < len(start) / 2:
        return True
    few = max(1, int(FEW_STEPS * len(start)))
    return cause != "allocator" and len(pays) <= few


def explain_paying_steps(
    trace: Trace,
    thread: int,
    start: Integers,
    end: Integers,
) -> list[str]:
    """Explain why each step of the host is no typical one, by one-time costs.

    Args:
        trace: the trace.
        thread: the thread that drives the steps; -1 for none.
        start: [k], ns, of the host's steps.
        end: [k], ns.

    Returns:
        [k], "" where a step may be a typical one.
    """
    why_not = [""] * len(start)
    if thread < 0 or len(start) < 2:
        return why_not
    works = find_host_work(trace, np.array([thread]))
    for cause in PAID_ONCE:
        cover = _join_works(works, cause)
        if not is_paid_once(cause, cover, start, end):
            continue
        pays = find_steps_that_pay(cover, start, end)
        for step in np.flatnonzero(pays).tolist():
            why_not[step] = why_not[step] or WHY_NOT[cause]
    return why_not


def _join_works(works: tuple[HostWork, ...], cause: str) -> Cover:
    """When any of the work of that cause lasts."""
    covers = [work.cover for work in works if work.cause == cause]
    return joined(NOTHING, *covers)


def measure_host_work(
    works: tuple[HostWork, ...],
    steps: tuple[Step, ...],
) -> tuple[NamedWork, ...]:
    """Measure what each kind of named work took of the host, the longest first."""
    start = np.array([step.host_start_ns for step in steps], np.int64)
    end = np.array([step.host_end_ns for step in steps], np.int64)
    is_steady = np.array([step.steady for step in steps], bool)
    found = []
    # what is named already: nothing counts twice
    before = NOTHING
    for work in works:
        cover = difference(work.cover, before)
        before = joined(before, work.cover)
        if not cover.length:
            continue
        is_once = False
        if work.cause in PAID_ONCE:
            of_cause = _join_works(works, work.cause)
            is_once = is_paid_once(work.cause, of_cause, start, end)
        per_step = cover.within(start, end)
        of_steady = per_step[is_steady]
        named = NamedWork(
            cause=work.cause,
            what=work.what,
            calls=len(work.start),
            trace_ms=cover.length / 1e6,
            step_ms=float(of_steady.mean()) / 1e6 if len(of_steady) else 0.0,
            once=is_once,
            step=steps[int(per_step.argmax())].name if per_step.any() else "",
            in_steps=int((per_step > 0).sum()),
        )
        found.append(named)
    found.sort(key=lambda one: -one.trace_ms)
    return tuple(found)
