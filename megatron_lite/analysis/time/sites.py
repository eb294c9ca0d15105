"""Where in the program the host waited for the device, and what it did while the device waited for it."""

import re

import numpy as np

from megatron_lite.analysis.intervals import Cover, Nesting, difference, intersection, union
from megatron_lite.analysis.time.host_activity import HostActivity, pageable_copies
from megatron_lite.analysis.time.idle_gaps import Gaps
from megatron_lite.analysis.time.time_results import MIN_STRETCH_MS, HostSite, Placing, Stretch, SyncSite
from megatron_lite.analysis.trace.columns import Kind, Trace

# autograd's wrappers and bookkeeping say nothing: what they hold does
WRAPPER = re.compile(r"autograd::engine::evaluate_function|record_param_comms|Torch-Compiled Region")
FRAME = re.compile(r"(?P<path>[^()<>]*\.pyx?)\(\d+\): ")
NOT_THE_PROGRAM = re.compile(
    r"(^|/)(torch|numpy|site-packages/torch|lib/python3[^/]*/(?!site-packages|dist-packages)[^/]+)/"
    r"|^(threading|contextlib|runpy|functools|enum|typing|random|copy|queue|selectors|socket|inspect|logging/__init__)\.py"
    r"|(^|/)lib/python3[^/]*/[^/]+\.py$"
)
BETWEEN = "Python between operators"
MAX_SITES = 50


def is_program_frame(name: str) -> bool:
    """A line of the program itself: no frame of torch, of Python's own library or of C."""
    found = FRAME.match(name)
    return bool(found) and not NOT_THE_PROGRAM.search(found["path"])


class CallSites:
    """Which operator and which line of the program stand around a moment."""

    def __init__(self, trace: Trace, placing: Placing):
        events, self.trace = trace.events, trace
        top = _outermost_operators(trace, placing)
        frames = trace.rows[Kind.PYTHON]
        frames = frames[trace.matching(is_program_frame)[frames]]
        self.top_operators, self.frames = top, frames
        self._operators, self._frames = (
            Nesting(rows, events.start_ns[rows], events.end_ns[rows], events.thread[rows]) for rows in (top, frames)
        )

    def operator(self, moment, thread) -> np.ndarray:
        """Rows of the outermost operators there; -1: none."""
        return self._operators.row_at(moment, thread)

    def frame(self, moment, thread, main_thread: int) -> np.ndarray:
        """Rows of the innermost lines of the program there; on autograd's thread those of the main one. -1: none."""
        own = self._frames.row_at(moment, thread)
        return np.where(own >= 0, own, self._frames.row_at(moment, np.full(np.shape(moment), max(main_thread, 0))))


def _outermost_operators(trace: Trace, placing: Placing) -> np.ndarray:
    """Rows of operators that stand in no other but wrappers."""
    operators, wrapper = trace.rows[Kind.OP], trace.matching(WRAPPER.match)
    operators = operators[~wrapper[operators]]
    around = placing.operator[operators]
    while (through := (around >= 0) & wrapper[np.maximum(around, 0)]).any():
        around = np.where(through, placing.operator[np.maximum(around, 0)], around)
    return operators[around < 0]


def sync_sites(
    trace: Trace, placing: Placing, activity: HostActivity, gaps: Gaps, sites: CallSites, steady
) -> tuple[SyncSite, ...]:
    """Per place: calls and host ms per steady step, and the idle time that they caused; most idle first."""
    events, steps = trace.events, int(steady.sum())
    caused = np.zeros(len(events), np.int64)
    np.add.at(caused, gaps.waited[gaps.waited >= 0], gaps.amounts["sync"][gaps.waited >= 0])
    calls = activity.waits
    calls = calls[steady[placing.step[calls]] | (caused[calls] > 0)]
    if not len(calls):
        return ()
    operator = sites.operator(events.start_ns[calls], events.thread[calls])
    frame = sites.frame(events.start_ns[calls], events.thread[calls], placing.main_thread)
    unpinned = np.isin(calls, pageable_copies(trace))
    keys = np.stack(
        (
            events.name[calls],
            unpinned,
            _name_or_none(trace, operator),
            _name_or_none(trace, frame),
            placing.phase[calls],
        )
    )
    keys, inverse = np.unique(keys, axis=1, return_inverse=True)
    counted = steady[placing.step[calls]]  # one of the step before may have made a steady step wait
    counts, host, idle = (
        np.bincount(inverse.ravel(), amounts, minlength=keys.shape[1])
        for amounts in (counted, (events.end_ns[calls] - events.start_ns[calls]) * counted, caused[calls])
    )
    found = [
        SyncSite(
            _named(trace, name) + (" (pageable memory)" if pageable else ""),
            _named(trace, op),
            _named(trace, line),
            placing.phases[phase] if phase >= 0 else "",
            *(float(one[k]) / steps for one in (counts, host / 1e6, idle / 1e6)),
        )
        for k, (name, pageable, op, line, phase) in enumerate(keys.T)
    ]
    return tuple(sorted(found, key=lambda site: (-site.idle_ms, -site.host_ms))[:MAX_SITES])


def host_sites(trace: Trace, placing: Placing, gaps: Gaps, sites: CallSites, steps: int) -> tuple[HostSite, ...]:
    """What the launching threads did while the host was the cause, by outermost operator, else by line; most idle first."""
    events, total, late = trace.events, {}, gaps.late > 0
    for thread in np.unique(gaps.thread[late & (gaps.thread >= 0)]):
        mine = late & (gaps.thread == thread)
        idle = intersection(gaps.host, union(gaps.start[mine], gaps.start[mine] + gaps.late[mine]))
        rows = sites.top_operators[events.thread[sites.top_operators] == thread]
        _add(
            total,
            trace,
            events.name[rows],
            placing.phase[rows],
            idle.within(events.start_ns[rows], events.end_ns[rows]),
        )
        between = difference(idle, union(events.start_ns[rows], events.end_ns[rows]))
        _add_python(total, trace, placing, sites, between, int(thread))
    return _host_sites(total, placing, steps)


def python_sites(trace: Trace, placing: Placing, host: Cover, sites: CallSites, steps: int) -> tuple[HostSite, ...]:
    """The same without a GPU: `host` is when no operator ran. By line of the program, where the trace has stacks."""
    total: dict = {}
    _add_python(total, trace, placing, sites, host, placing.main_thread)
    return _host_sites(total, placing, steps)


def long_stretches(trace: Trace, placing: Placing, host: Cover, sites: CallSites, steady) -> tuple[Stretch, ...]:
    """The pieces of `host` that are long, by phase; longest first. `steady`: bool per step, False at [-1]."""
    long = host.end - host.start >= MIN_STRETCH_MS * 1e6
    start, lengths = host.start[long], (host.end - host.start)[long]
    middle, main = start + lengths // 2, np.full(len(start), max(placing.main_thread, 0))
    around = _phase_ranges(trace, placing).row_at(middle, main)
    phase = np.where(around >= 0, placing.phase[np.maximum(around, 0)], -1)
    frame = _name_or_none(trace, sites.frame(middle, main, placing.main_thread))
    step = np.searchsorted([one.start_ns for one in placing.steps], middle, side="right") - 1
    ends = trace.events.end_ns[sites.top_operators]
    order = np.argsort(ends, kind="stable")
    before = np.searchsorted(ends[order], start, side="right") - 1
    found = []
    for number in np.unique(phase):
        mine = np.flatnonzero(phase == number)
        per_step = np.bincount(step[mine], lengths[mine], minlength=len(placing.steps))[steady[:-1]]
        most, longest = frame[mine[_dearest(frame[mine], lengths[mine])]], mine[lengths[mine].argmax()]
        after = trace.name_of(sites.top_operators[order[before[longest]]]) if before[longest] >= 0 else ""
        found.append(
            Stretch(
                placing.phases[number] if number >= 0 else "",
                float(np.median(per_step)) / 1e6,
                _named(trace, most),
                after,
            )
        )
    return tuple(sorted((one for one in found if one.ms > 0), key=lambda one: -one.ms))


def _dearest(keys: np.ndarray, amounts: np.ndarray) -> int:
    """The position of a key whose amounts add up to most."""
    _, inverse = np.unique(keys, return_inverse=True)
    return int(np.bincount(inverse, amounts)[inverse].argmax())


def _phase_ranges(trace: Trace, placing: Placing) -> Nesting:
    """The main thread's ranges that have a phase."""
    events = trace.events
    rows = np.flatnonzero(
        (placing.phase >= 0) & (events.kind == Kind.ANNOTATION) & (events.thread == placing.main_thread)
    )
    return Nesting(rows, events.start_ns[rows], events.end_ns[rows], events.thread[rows])


def _add_python(total: dict, trace: Trace, placing: Placing, sites: CallSites, between: Cover, thread: int):
    """What no operator covers, cut where a phase or a line of the program begins or ends."""
    events, nest = trace.events, _phase_ranges(trace, placing)
    rows = np.concatenate((nest.rows, sites.frames))
    edges = np.unique(np.concatenate((between.start, between.end, events.start_ns[rows], events.end_ns[rows])))
    start, end = edges[:-1], edges[1:]
    inside = between.holds(start)
    start, end = start[inside], end[inside]
    around = nest.row_at(start, np.full(len(start), max(placing.main_thread, 0)))
    phase = np.where(around >= 0, placing.phase[np.maximum(around, 0)], _phase_told(trace, placing, nest, end, thread))
    frame = sites.frame(start, np.full(len(start), max(thread, 0)), placing.main_thread)
    _add(total, trace, _name_or_none(trace, frame), phase, end - start)


def _phase_told(trace: Trace, placing: Placing, ranges: Nesting, moment: np.ndarray, thread: int) -> np.ndarray:
    """Outside of all ranges: the phase of the first operator or call on the thread at the moment or later, if only
    operators told it."""
    events = trace.events
    rows = np.flatnonzero((events.thread == thread) & np.isin(events.kind, (Kind.OP, Kind.RUNTIME)))
    if not len(rows):
        return np.full(len(moment), -1)
    following = rows[np.minimum(np.searchsorted(events.start_ns[rows], moment), len(rows) - 1)]
    in_range = ranges.row_at(events.start_ns[following], np.full(len(moment), max(placing.main_thread, 0))) >= 0
    return np.where(in_range | (events.start_ns[following] < moment), -1, placing.phase[following])


def _host_sites(total: dict, placing: Placing, steps: int) -> tuple[HostSite, ...]:
    found = [
        HostSite(what, placing.phases[phase] if phase >= 0 else "", float(ns) / 1e6 / steps)
        for (what, phase), ns in total.items()
    ]
    return tuple(sorted((site for site in found if site.idle_ms > 0), key=lambda site: -site.idle_ms)[:MAX_SITES])


def _add(total: dict, trace: Trace, names: np.ndarray, phases: np.ndarray, amounts: np.ndarray):
    hit = amounts > 0
    keys, inverse = np.unique(np.stack((names[hit], phases[hit])), axis=1, return_inverse=True)
    for (name, phase), ns in zip(keys.T, np.bincount(inverse.ravel(), amounts[hit]), strict=True):
        key = (_named(trace, name) or BETWEEN, int(phase))
        total[key] = total.get(key, 0) + ns


def _name_or_none(trace: Trace, rows: np.ndarray) -> np.ndarray:
    return np.where(rows >= 0, trace.events.name[np.maximum(rows, 0)], -1)


def _named(trace: Trace, name: int) -> str:
    return trace.names[name] if name >= 0 else ""
