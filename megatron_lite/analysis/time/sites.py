"""Where in the program the host waited for the device, and what it did while the device waited for it."""

import re
from collections import Counter

import numpy as np

from megatron_lite.analysis.intervals import Cover, Flags, Integers, difference, intersection, union
from megatron_lite.analysis.time.host_names import AFTER_SYNCS, INSIDE
from megatron_lite.analysis.time.idle_gaps import Gaps, find_pageable_copies
from megatron_lite.analysis.time.time_results import MIN_STRETCH_MS, HostSite, Placing, ShortGaps, Stretch, SyncSite
from megatron_lite.analysis.trace.columns import Kind, Trace

# autograd's wrappers and bookkeeping say nothing: what they hold does
WRAPPER = re.compile(r"autograd::engine::evaluate_function|record_param_comms|Torch-Compiled Region")
FRAME = re.compile(r"(?P<path>[^()<>]*\.pyx?)\(\d+\): ")
NOT_THE_PROGRAM = re.compile(
    r"(^|/)(torch|numpy|site-packages/torch|lib/python3[^/]*/(?!site-packages|dist-packages)[^/]+)/"
    r"|^(threading|contextlib|runpy|functools|enum|typing|random"
    r"|copy|queue|selectors|socket|inspect|logging/__init__)\.py"
    r"|(^|/)lib/python3[^/]*/[^/]+\.py$"
)
BETWEEN = "Python between operators"
UNSEEN = "unnamed work between operators"  # without stacks it may be Python or anything else
# A Python class of autograd.Function gives its operators its name; those of PyTorch have "::", or a digit at the end.
# but for what torch itself runs in Python: compiled graphs, and modes that record every operator
CUSTOM_FUNCTION = re.compile(r"(?!CompiledFunction|PythonDispatchMode|PythonTLSSnapshot)[A-Za-z_]\w*[A-Za-z_]$")
MAX_SITES = 50
MIN_SHORT_MS = 0.1  # calling an operator takes half of that, with a profiler and stacks too
SiteTimes = Counter[tuple[int, int]]  # ns by (name, phase)


def is_program_frame(name: str) -> bool:
    """A line of the program itself: no frame of torch, of Python's own library or of C."""
    found = FRAME.match(name)
    return found is not None and not NOT_THE_PROGRAM.search(found["path"])


class CallSites:
    """Which operator, line of the program and phase stand around a moment. Names are numbers; -1: none."""

    def __init__(self, trace: Trace, placing: Placing):
        frames = trace.rows[Kind.PYTHON]
        self.trace, self.placing, self.main_thread = trace, placing, max(placing.main_thread, 0)
        self.steps = int(placing.steady.sum())
        # operators that stand in no other but wrappers
        operators, wrapper = trace.rows[Kind.OP], trace.matching(WRAPPER.match)
        operators = operators[~wrapper[operators]]
        around = placing.operator[operators]
        while (through := (around >= 0) & wrapper[around]).any():
            around = np.where(through, placing.operator[around], around)
        self.top_operators = operators[around < 0]
        is_custom = trace.matching(CUSTOM_FUNCTION.fullmatch)
        self.custom_functions = self.top_operators[is_custom[self.top_operators]]
        self.frames = frames[trace.matching(is_program_frame)[frames]]
        self._phases = placing.ranges.nest(placing.ranges.thread == placing.main_thread)
        self._operators, self._frames = trace.nest(self.top_operators), trace.nest(self.frames)

    def operator(self, moment: Integers, thread: Integers) -> Integers:
        """Names of the outermost operators there."""
        return self._name(self._operators.row_at(moment, thread))

    def frame(self, moment: Integers, thread: Integers) -> Integers:
        """Names of the innermost lines of the program there; on autograd's thread those of the main one."""
        own = self._frames.row_at(moment, thread)
        return self._name(np.where(own >= 0, own, self._frames.row_at(moment, self._on_main(moment))))

    def phase(self, moment: Integers) -> Integers:
        """Phases by the main thread's ranges."""
        around = self._phases.row_at(moment, self._on_main(moment))
        return np.append(self.placing.ranges.phase, -1)[around]

    def _on_main(self, moment: Integers) -> Integers:
        return np.full(len(moment), self.main_thread)

    def _name(self, rows: Integers) -> Integers:
        return np.where(rows >= 0, self.trace.events.name[rows], -1)

    def text(self, name: int) -> str:
        if name < -1:  # find_host_sites
            return INSIDE + self.trace.names[-2 - name]
        return self.trace.names[name] if name >= 0 else ""

    def phase_text(self, phase: int) -> str:
        return self.placing.phases[phase] if phase >= 0 else ""

    def find_sync_sites(self, calls: Integers, gaps: Gaps, covers: dict[str, Cover]) -> tuple[SyncSite, ...]:
        """Find the places in the program where the host waited for the device.

        Args:
            calls: rows of the calls in which the host waits.
            gaps: the idle time of the device, some of which they caused.
            covers: when each of AFTER_SYNCS was the cause.

        Returns:
            For each place calls and host ms per steady step, and the idle time that they caused; most idle first.
        """
        caused_ns = np.zeros(len(self.trace.events), np.int64)
        has_waited = gaps.waited >= 0
        np.add.at(caused_ns, gaps.waited[has_waited], gaps.amounts["sync"][has_waited])
        calls = calls[self.placing.counts[calls] | (caused_ns[calls] > 0)]
        if not len(calls):
            return ()
        places, place_of_call = self._find_sync_places(calls, covers)
        count = len(places)
        # a wait of the step before may have made a steady step wait
        counted = self.placing.counts[calls]
        waited_ns = (self.trace.events.end_ns[calls] - self.trace.events.start_ns[calls]) * counted
        per_step = np.bincount(place_of_call, counted, count) / self.steps
        host_ms = np.bincount(place_of_call, waited_ns, count) / 1e6 / self.steps
        idle_ms = np.bincount(place_of_call, caused_ns[calls], count) / 1e6 / self.steps
        sites = [
            SyncSite(
                call=self.text(call) + (" (pageable memory)" if is_pageable else ""),
                operator=self.text(operator),
                frame=self.text(frame),
                phase=self.phase_text(phase),
                per_step=float(per_step[at]),
                host_ms=float(host_ms[at]),
                idle_ms=float(idle_ms[at]),
                cause=("", *AFTER_SYNCS)[cause],
            )
            for at, (call, is_pageable, operator, frame, cause, phase) in enumerate(places.tolist())
        ]
        return tuple(sorted(sites, key=lambda site: (-site.idle_ms, -site.host_ms))[:MAX_SITES])

    def _find_sync_places(self, calls: Integers, covers: dict[str, Cover]) -> tuple[Integers, Integers]:
        """Find the distinct places of the waiting `calls`.

        Returns:
            int64 [p, 6]: the call's name, is its memory pageable, the operator's and the frame's name, which of
            AFTER_SYNCS was the cause (from 1 on; 0: none), the phase; and int64 [calls]: the place of each call.
        """
        events = self.trace.events
        moment = events.start_ns[calls]
        thread = events.thread[calls]
        cause = np.zeros(len(calls), np.int64)
        for number, name in enumerate(AFTER_SYNCS, 1):
            cause[covers[name].holds(moment)] = number
        columns: tuple[Integers | Flags, ...] = (
            events.name[calls],
            np.isin(calls, find_pageable_copies(self.trace)),
            self.operator(moment, thread),
            self.frame(moment, thread),
            cause,
            self.placing.phase[calls],
        )
        places, place_of_call = np.unique(np.stack(columns), axis=1, return_inverse=True)
        return places.T.astype(np.int64), place_of_call.ravel()

    def find_host_sites(self, gaps: Gaps) -> tuple[HostSite, ...]:
        """What the launching threads did while the host was the cause, by outermost operator, else by line;
        most idle first."""
        events, late = self.trace.events, gaps.late > 0
        total: SiteTimes = Counter()
        for thread in np.unique(gaps.thread[late & (gaps.thread >= 0)]).tolist():
            mine = late & (gaps.thread == thread)
            idle = intersection(gaps.host, union(gaps.start[mine], gaps.start[mine] + gaps.late[mine]))
            rows = self.top_operators[events.thread[self.top_operators] == thread]
            within = idle.within(events.start_ns[rows], events.end_ns[rows])
            custom = self.custom_functions[events.thread[self.custom_functions] == thread]
            own = self._find_own_idle(custom, idle)
            within = within - own.within(events.start_ns[rows], events.end_ns[rows])
            _add(total, events.name[rows], self.placing.phase[rows], within)
            inside = own.within(events.start_ns[custom], events.end_ns[custom])
            _add(total, -2 - events.name[custom], self.placing.phase[custom], inside)
            self._add_python(total, difference(idle, self.trace.cover(rows)), thread)
        return self._make_host_sites(total)

    def _find_own_idle(self, custom: Integers, idle: Cover) -> Cover:
        """`idle` inside the custom functions, outside of the operators that they call."""
        inner = self.trace.rows[Kind.OP]
        inner = inner[np.isin(self.placing.operator[inner], custom)]
        return difference(intersection(idle, self.trace.cover(custom)), self.trace.cover(inner))

    def find_python_sites(self, host: Cover) -> tuple[HostSite, ...]:
        """The same without a GPU: `host` is when no operator ran.

        By line of the program, where the trace has stacks.
        """
        total: SiteTimes = Counter()
        self._add_python(total, host, self.placing.main_thread)
        return self._make_host_sites(total)

    def _make_host_sites(self, total: SiteTimes) -> tuple[HostSite, ...]:
        by_text: Counter[tuple[str, str]] = Counter()
        between = BETWEEN if self.trace.with_stack else UNSEEN
        for (name, phase), ns in total.items():
            by_text[self.text(name) or between, self.phase_text(phase)] += ns
        found = [HostSite(what, phase, float(ns) / 1e6 / self.steps) for (what, phase), ns in by_text.items()]
        return tuple(sorted((site for site in found if site.idle_ms > 0), key=lambda site: -site.idle_ms)[:MAX_SITES])

    def _add_python(self, total: SiteTimes, between: Cover, thread: int) -> None:
        """What no operator covers, cut where a phase or a line of the program begins or ends."""
        events = self.trace.events
        ranges, numbers, rows = self.placing.ranges, self._phases.rows, self.frames
        borders = (ranges.start_ns[numbers], ranges.end_ns[numbers], events.start_ns[rows], events.end_ns[rows])
        edges = np.unique(np.concatenate((between.start, between.end, *borders)))
        start, end = edges[:-1], edges[1:]
        inside = between.holds(start)
        start, end = start[inside], end[inside]
        phase = self.phase(start)
        # outside of all ranges: the phase of what follows on the thread, if only operators told it
        calls = np.flatnonzero((events.thread == thread) & np.isin(events.kind, (Kind.OP, Kind.RUNTIME)))
        if len(calls):
            following = calls[np.minimum(np.searchsorted(events.start_ns[calls], end), len(calls) - 1)]
            told_by_range = self.phase(events.start_ns[following]) >= 0
            told = np.where(told_by_range | (events.start_ns[following] < end), -1, self.placing.phase[following])
            phase = np.where(phase >= 0, phase, told)
        _add(total, self.frame(start, np.full(len(start), max(thread, 0))), phase, end - start)

    def measure_short_stretches(self, host: Cover) -> ShortGaps:
        """The pieces of `host` below MIN_STRETCH_MS that are longer than calling an operator takes,
        in the median step."""
        steps, lengths = self.placing.steps, host.end - host.start
        short = (lengths < MIN_STRETCH_MS * 1e6) & (lengths >= MIN_SHORT_MS * 1e6)
        step = np.searchsorted([one.start_ns for one in steps], host.start[short], side="right") - 1
        steady = self.placing.steady[:-1]
        per_step = np.bincount(step, lengths[short], minlength=len(steps))[steady]
        numbers = np.bincount(step, minlength=len(steps))[steady]
        return ShortGaps(float(np.median(numbers)), float(np.median(per_step)) / 1e6, 0.0, 0.0, 0.0)

    def find_long_stretches(self, host: Cover) -> tuple[Stretch, ...]:
        """The pieces of `host` that are long, by phase; longest first."""
        trace, steps = self.trace, self.placing.steps
        long = host.end - host.start >= MIN_STRETCH_MS * 1e6
        start, lengths = host.start[long], (host.end - host.start)[long]
        middle = start + lengths // 2
        phase, frame = self.phase(middle), self.frame(middle, np.full(len(middle), self.main_thread))
        step = np.searchsorted([one.start_ns for one in steps], middle, side="right") - 1
        by_end = self.top_operators[np.argsort(trace.events.end_ns[self.top_operators], kind="stable")]
        before = np.searchsorted(trace.events.end_ns[by_end], start, side="right") - 1
        found = []
        for number in np.unique(phase):
            mine = np.flatnonzero(phase == number)
            per_step = np.bincount(step[mine], lengths[mine], minlength=len(steps))[self.placing.steady[:-1]]
            lines, inverse = np.unique(frame[mine], return_inverse=True)
            line, longest = lines[np.bincount(inverse, lengths[mine]).argmax()], mine[lengths[mine].argmax()]
            after = trace.name_of(by_end[before[longest]]) if before[longest] >= 0 else ""
            ms = float(np.median(per_step)) / 1e6
            found.append(Stretch(self.phase_text(number), ms, self.text(line), after))
        return tuple(sorted((one for one in found if one.ms > 0), key=lambda one: -one.ms))


def _add(total: SiteTimes, names: Integers, phases: Integers, amounts: Integers) -> None:
    """Add the amounts to `total` by (name, phase)."""
    hit = amounts > 0
    keys, inverse = np.unique(np.stack((names[hit], phases[hit])), axis=1, return_inverse=True)
    for key, ns in zip(keys.T.tolist(), np.bincount(inverse.ravel(), amounts[hit])):
        total[tuple(key)] += int(ns)
