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


@dataclass(frozen=True)
class HostWork:
    """When the host did what the table names."""

    cause: str
    what: str
    start: Integers  # [m] each; they may overlap
    end: Integers

    @property
    def cover(self) -> Cover:
        return union(self.start, self.end)


def find_host_work(trace: Trace, threads: Integers) -> tuple[HostWork, ...]:
    """All named work of these threads, by cause and kind of work."""
    found = [*_find_named(trace, threads), *_find_captures(trace, threads)]
    return tuple(sorted(found, key=lambda work: (*CAUSES, *AFTER_SYNCS).index(work.cause)))


def _find_named(trace: Trace, threads: Integers) -> Iterator[HostWork]:
    events = trace.events
    on_threads = np.isin(events.thread, threads) & (events.device < 0)
    rows_of: dict[tuple[str, str], list[Integers]] = {}
    for kind, seen_as in SEEN_AS.items():
        rows = trace.rows[kind]
        causes = {int(name): name_cause(trace.names[name], seen_as) for name in trace.names_of[kind]}
        # in the order of names: that of a set differs from run to run
        for key in dict.fromkeys(cause for cause in causes.values() if cause):
            named = np.zeros(len(trace.names), bool)
            named[[name for name, cause in causes.items() if cause == key]] = True
            mine = rows[named[events.name[rows]]]
            if kind != Kind.OVERHEAD and key[0] not in ON_ANY_THREAD:
                mine = mine[on_threads[mine]]
            rows_of.setdefault(key, []).append(mine)
    calls = trace.rows[Kind.RUNTIME]
    calls = calls[on_threads[calls]]
    for (cause, what), pieces in rows_of.items():
        rows = np.sort(np.concatenate(pieces))
        if cause == "data_wait":
            rows = _without_training(trace, rows)
        start, end = events.start_ns[rows], events.end_ns[rows]
        if len(rows) and (events.kind[rows] == Kind.OVERHEAD).all():
            # The profiler does not say on which thread; it keeps the host where a call of the host stands in it.
            inside = intersection(union(start, end), trace.cover(calls))
            start, end = inside.start, inside.end
        if len(start):
            yield HostWork(cause, what, start, end)


def _without_training(trace: Trace, rows: Integers) -> Integers:
    """Those of `rows` that hold no backward pass: an iterator may as well yield the steps of training."""
    events = trace.events
    backward = np.sort(events.start_ns[is_backward(trace)])
    first = np.searchsorted(backward, events.start_ns[rows])
    beyond = np.searchsorted(backward, events.end_ns[rows])
    kept: Integers = rows[first == beyond]
    return kept


BEGINS_CAPTURE = re.compile(r"(cuda|hip|cu|mu|musa)StreamBeginCapture|aclmdlRICaptureBegin")
ENDS_CAPTURE = re.compile(r"(cuda|hip|cu|mu|musa)StreamEndCapture|aclmdlRICaptureEnd")


def _find_captures(trace: Trace, threads: Integers) -> Iterator[HostWork]:
    """From each beginning of a capture to its end: what is launched meanwhile does not run."""
    events, calls = trace.events, trace.rows[Kind.RUNTIME]
    calls = calls[np.isin(events.thread[calls], threads)]
    begins = calls[trace.matching(BEGINS_CAPTURE.match)[calls]]
    ends = calls[trace.matching(ENDS_CAPTURE.match)[calls]]
    starts, stops = [], []
    for begin in begins.tolist():
        after = ends[(events.thread[ends] == events.thread[begin]) & (events.start_ns[ends] >= events.end_ns[begin])]
        if len(after):
            starts.append(int(events.start_ns[begin]))
            stops.append(int(events.end_ns[after[0]]))
    if starts:
        yield HostWork("graph_capture", "capturing", np.array(starts, np.int64), np.array(stops, np.int64))


def cover_causes(trace: Trace, placing: Placing, threads: Integers, works: tuple[HostWork, ...]) -> dict[str, Cover]:
    """{cause: when}: named work, the ranges of its phases, and updates that run on the CPU."""
    events = trace.events
    ranges = (events.kind == Kind.ANNOTATION) & np.isin(events.thread, threads)
    covers = {}
    for cause in (*CAUSES, *AFTER_SYNCS):
        phases = PHASES_OF_CAUSES.get(cause, ())
        of_cause = np.array([known_phase(name) in phases for name in trace.names], bool)
        in_phase = ranges & of_cause[events.name]
        pieces = [trace.cover(in_phase), *(work.cover for work in works if work.cause == cause)]
        if cause == "cpu_optimizer":
            pieces.append(_find_cpu_updates(trace, placing, threads))
        covers[cause] = joined(*pieces)
    return covers


UPDATES = re.compile(r"aten::(_foreach_|_fused_\w+_$|(add|mul|div|sub|lerp|addcmul|addcdiv|sqrt|copy|neg|sign)_?$)")
MIN_UPDATE_NS = 50_000  # an operator that only launches takes 5 us; a step counter's addition, too


def _find_cpu_updates(trace: Trace, placing: Placing, threads: Integers) -> Cover:
    """When operators of the optimizer compute on the CPU, although the trace has a GPU:
    they launch nothing and take long."""
    name, events = str(Phase.OPTIMIZER_STEP), trace.events
    calls = trace.rows[Kind.RUNTIME]
    if name not in placing.phases or not (trace.launch_of[trace.device_rows] >= 0).any():
        return NOTHING
    operators = trace.rows[Kind.OP]
    parents = np.zeros(len(events) + 1, bool)
    parents[placing.operator[operators]] = True  # the last entry takes those without a parent
    rows = operators[(placing.phase[operators] == placing.phases.index(name)) & ~parents[operators]]
    rows = rows[trace.matching(UPDATES.match)[rows] & np.isin(events.thread[rows], threads)]
    rows = rows[events.end_ns[rows] - events.start_ns[rows] >= MIN_UPDATE_NS]
    alone = np.ones(len(rows), bool)
    for thread in np.unique(events.thread[rows]):
        mine = events.thread[rows] == thread
        moments = events.start_ns[calls[events.thread[calls] == thread]]
        first = np.searchsorted(moments, events.start_ns[rows[mine]])
        alone[mine] = first == np.searchsorted(moments, events.end_ns[rows[mine]])
    return trace.cover(rows[alone])


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
    """bool per step [start, end) of the host: does the work of `cover` take a notable part of it?"""
    pays: Flags = cover.within(start, end) > NOTABLE * np.maximum(end - start, 1)
    return pays


def is_paid_once(cause: str, cover: Cover, start: Integers, end: Integers) -> bool:
    """Does the work come in few steps, or stop early? Of a single step its last third says so. An allocator that has
    grown early may be done with it; one that asks the driver later may ask again."""
    if len(start) == 1:
        edges = np.linspace(start[0], end[0], 4).astype(np.int64)
        thirds = cover.within(edges[:-1], edges[1:])
        return bool(thirds[-1] <= STILL * thirds.max())
    pays = np.flatnonzero(find_steps_that_pay(cover, start, end))
    if not len(pays):
        return True
    if pays[-1] < len(start) / 2:
        return True
    return cause != "allocator" and len(pays) <= max(1, int(FEW_STEPS * len(start)))


def explain_paying_steps(trace: Trace, thread: int, start: Integers, end: Integers) -> list[str]:
    """Why each step [start, end) of the host is no typical one, by one-time costs; "" where it may be."""
    why_not = [""] * len(start)
    if thread < 0 or len(start) < 2:
        return why_not
    works = find_host_work(trace, np.array([thread]))
    for cause in PAID_ONCE:
        covers = [work.cover for work in works if work.cause == cause]
        cover = joined(NOTHING, *covers)
        if not is_paid_once(cause, cover, start, end):
            continue
        for step in np.flatnonzero(find_steps_that_pay(cover, start, end)).tolist():
            why_not[step] = why_not[step] or WHY_NOT[cause]
    return why_not


def measure_host_work(works: tuple[HostWork, ...], steps: tuple[Step, ...]) -> tuple[NamedWork, ...]:
    """What each kind of named work took of the host, the longest first."""
    start = np.array([step.host_start_ns for step in steps], np.int64)
    end = np.array([step.host_end_ns for step in steps], np.int64)
    steady = np.array([step.steady for step in steps], bool)
    found = []
    before = NOTHING  # named already: nothing counts twice
    for work in works:
        cover = difference(work.cover, before)
        before = joined(before, work.cover)
        whole = [one.cover for one in works if one.cause == work.cause]
        once = work.cause in PAID_ONCE and is_paid_once(work.cause, joined(*whole), start, end)
        per_step = cover.within(start, end)
        if not cover.length:
            continue
        found.append(
            NamedWork(
                cause=work.cause,
                what=work.what,
                calls=len(work.start),
                trace_ms=cover.length / 1e6,
                step_ms=float(per_step[steady].mean()) / 1e6 if steady.any() else 0.0,
                once=once,
                step=steps[int(per_step.argmax())].name if per_step.any() else "",
            )
        )
    return tuple(sorted(found, key=lambda one: -one.trace_ms))
