"""Where in the program the host waited for the device, and what it did while the device waited for it."""

import re
from collections import Counter

import numpy as np

from megatron_lite.analysis.intervals import Cover, Flags, Integers, Numbers, difference, intersection, union
from megatron_lite.analysis.time.host_names import AFTER_SYNCS, INSIDE
from megatron_lite.analysis.time.idle_gaps import Gaps, HostActivity, find_pageable_copies
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
    """Whether it is a line of the program itself: no frame of torch, of Python's own library or of C."""
    found = FRAME.match(name)
    return found is not None and not NOT_THE_PROGRAM.search(found["path"])


class CallSites:
    """Operator, line of the program and phase around each moment. Names are numbers; -1: none."""

    def __init__(self, trace: Trace, placing: Placing):
        self.trace = trace
        self.placing = placing
        self.main_thread = max(placing.main_thread, 0)
        self.steps = int(placing.steady.sum())
        self.top_operators = _find_top_operators(trace, placing)
        is_custom = trace.matching(CUSTOM_FUNCTION.fullmatch)
        self.custom_functions = self.top_operators[is_custom[self.top_operators]]
        self.frames = trace.find_named(is_program_frame, Kind.PYTHON)
        on_main = placing.ranges.thread == placing.main_thread
        self._phases = placing.ranges.nest(on_main)
        self._operators = trace.nest(self.top_operators)
        self._frames = trace.nest(self.frames)

    def operator(self, moment: Integers, thread: Integers) -> Integers:
        """Names of the outermost operators around each moment of its thread."""
        return self._name(self._operators.row_at(moment, thread))

    def frame(self, moment: Integers, thread: Integers) -> Integers:
        """Names of the innermost lines of the program around each moment; for autograd's thread the main one's."""
        own = self._frames.row_at(moment, thread)
        on_main = self._frames.row_at(moment, self._on_main(moment))
        return self._name(np.where(own >= 0, own, on_main))

    def phase(self, moment: Integers) -> Integers:
        """Phases of the moments, by the main thread's ranges."""
        around = self._phases.row_at(moment, self._on_main(moment))
        # index -1 finds the last entry
        phase_of_range = np.append(self.placing.ranges.phase, -1)
        return phase_of_range[around]

    def _on_main(self, moment: Integers) -> Integers:
        return np.full(len(moment), self.main_thread)

    def _name(self, rows: Integers) -> Integers:
        names = self.trace.events.name[rows]
        return np.where(rows >= 0, names, -1)

    def text(self, name: int) -> str:
        """The name with that number; '' for none. Numbers below -1 are of custom functions: see _add_thread."""
        if name == -1:
            return ""
        if name < -1:
            return INSIDE + self.trace.names[-2 - name]
        return self.trace.names[name]

    def phase_text(self, phase: int) -> str:
        """The phase with that number; '' for none."""
        if phase < 0:
            return ""
        return self.placing.phases[phase]

    # --- where the host waited for the device

    def find_sync_sites(self, activity: HostActivity, gaps: Gaps) -> tuple[SyncSite, ...]:
        """Find the places in the program where the host waited for the device.

        Args:
            activity: what the host did, with the calls in which it waited.
            gaps: the idle time of the device, some of which they caused.

        Returns:
            For each place calls and host ms per steady step, and the idle time that they caused; most idle first.
        """
        caused_ns = self._sum_by_wait(gaps, gaps.amounts["sync"])
        work_ns = self._sum_by_wait(gaps, gaps.behind.within(gaps.start, gaps.end))
        # a wait of the step before may have made a steady step wait
        calls = activity.waits
        has_caused = caused_ns[calls] > 0
        calls = calls[has_caused | self.placing.counts[calls]]
        if not len(calls):
            return ()
        places, place_of_call = self._find_sync_places(calls, activity.covers)
        is_counted = self.placing.counts[calls]
        waited_ns = np.where(is_counted, self.trace.lengths_ns(calls), 0)

        def sum_by_place(amounts: Integers | Flags) -> Integers | Numbers:
            return np.bincount(place_of_call, amounts, len(places))

        per_step = sum_by_place(is_counted) / self.steps
        host_ms = sum_by_place(waited_ns) / 1e6 / self.steps
        idle_ms = sum_by_place(caused_ns[calls]) / 1e6 / self.steps
        work_ms = sum_by_place(work_ns[calls]) / 1e6 / self.steps
        figures = np.stack((per_step, host_ms, idle_ms, work_ms), axis=1)
        sites = []
        for place, of_place in zip(places.tolist(), figures.tolist()):
            site = self._make_sync_site(place, *of_place)
            sites.append(site)
        sites.sort(key=lambda site: (-site.idle_ms, -site.host_ms))
        return tuple(sites[:MAX_SITES])

    def _sum_by_wait(self, gaps: Gaps, amounts_ns: Integers) -> Integers:
        """Sum what belongs to the gaps by the event in which the host waited: int64 [n].

        Args:
            gaps: the idle time of the device.
            amounts_ns: [g], of each gap.
        """
        events = len(self.trace.events)
        summed_ns = np.zeros(events, np.int64)
        has_waited = gaps.waited >= 0
        # several gaps may be due to one call: `summed_ns[calls] += amounts_ns` would count the last of them only
        np.add.at(summed_ns, gaps.waited[has_waited], amounts_ns[has_waited])
        return summed_ns

    def _find_sync_places(
        self,
        calls: Integers,
        covers: dict[str, Cover],
    ) -> tuple[Integers, Integers]:
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
            is_cause = covers[name].holds(moment)
            cause[is_cause] = number
        columns: tuple[Integers | Flags, ...] = (
            events.name[calls],
            np.isin(calls, find_pageable_copies(self.trace)),
            self.operator(moment, thread),
            self.frame(moment, thread),
            cause,
            self.placing.phase[calls],
        )
        table = np.stack(columns)
        places, place_of_call = np.unique(table, axis=1, return_inverse=True)
        # older versions of numpy give the inverse the shape of the table
        return places.T.astype(np.int64), place_of_call.ravel()

    def _make_sync_site(
        self,
        place: list[int],  # a row of _find_sync_places
        per_step: float,
        host_ms: float,
        idle_ms: float,
        work_ms: float,
    ) -> SyncSite:
        call, is_pageable, operator, frame, cause, phase = place
        memory = " (pageable memory)" if is_pageable else ""
        return SyncSite(
            call=self.text(call) + memory,
            operator=self.text(operator),
            frame=self.text(frame),
            phase=self.phase_text(phase),
            per_step=per_step,
            host_ms=host_ms,
            idle_ms=idle_ms,
            cause=("", *AFTER_SYNCS)[cause],
            work_ms=work_ms,
        )

    # --- what the host did while the device waited for it

    def find_host_sites(self, gaps: Gaps, host: Cover) -> tuple[HostSite, ...]:
        """Find what the launching threads did while the host was the cause, by outermost operator, else by line.

        Args:
            gaps: the idle time of the device.
            host: when the host was the cause, inside of the gaps.

        Returns:
            The sites, most idle first.
        """
        total: SiteTimes = Counter()
        is_late = gaps.late > 0
        is_known = gaps.thread >= 0
        threads = np.unique(gaps.thread[is_late & is_known])
        for thread in threads.tolist():
            mine = is_late & (gaps.thread == thread)
            start = gaps.start[mine]
            until = start + gaps.late[mine]
            idle = intersection(host, union(start, until))
            self._add_thread(total, thread, idle)
        return self._make_host_sites(total)

    def _add_thread(self, total: SiteTimes, thread: int, idle: Cover) -> None:
        """Add to `total` what the thread did during `idle`."""
        trace = self.trace
        phases = self.placing.phase
        operators = trace.on_thread(self.top_operators, thread)
        custom = trace.on_thread(self.custom_functions, thread)
        own_idle = self._find_own_idle(custom, idle)
        others_idle = difference(idle, own_idle)
        names = trace.events.name[operators]
        others_ns = trace.within(others_idle, operators)
        _add(total, names, phases[operators], others_ns)
        # what a custom function does itself is a site of its own: its name's number counts from -2 downwards
        own_names = -2 - trace.events.name[custom]
        own_ns = trace.within(own_idle, custom)
        _add(total, own_names, phases[custom], own_ns)
        between = difference(idle, trace.cover(operators))
        self._add_python(total, between, thread)

    def _find_own_idle(self, custom: Integers, idle: Cover) -> Cover:
        """Find the part of `idle` inside the custom functions and outside of the operators that they call."""
        operators = self.trace.rows[Kind.OP]
        is_inner = np.isin(self.placing.operator[operators], custom)
        inner = self.trace.cover(operators[is_inner])
        inside = intersection(idle, self.trace.cover(custom))
        return difference(inside, inner)

    def find_python_sites(self, host: Cover) -> tuple[HostSite, ...]:
        """Find what the host did between operators, in a trace without a GPU.

        Args:
            host: when no operator ran.

        Returns:
            The sites by line of the program, where the trace has stacks; longest first.
        """
        total: SiteTimes = Counter()
        self._add_python(total, host, self.placing.main_thread)
        return self._make_host_sites(total)

    def _make_host_sites(self, total: SiteTimes) -> tuple[HostSite, ...]:
        """Make a site of each text and phase, most idle first."""
        by_text: Counter[tuple[str, str]] = Counter()
        between = BETWEEN if self.trace.with_stack else UNSEEN
        for (name, phase), ns in total.items():
            what = self.text(name) or between
            by_text[what, self.phase_text(phase)] += ns
        sites = []
        for (what, phase_text), ns in by_text.items():
            if ns > 0:
                idle_ms = float(ns) / 1e6 / self.steps
                sites.append(HostSite(what, phase_text, idle_ms))
        sites.sort(key=lambda site: -site.idle_ms)
        return tuple(sites[:MAX_SITES])

    def _add_python(self, total: SiteTimes, between: Cover, thread: int) -> None:
        """Add to `total` what no operator covers, cut where a phase or a line of the program begins or ends."""
        edges = self._find_edges(between)
        start = edges[:-1]
        end = edges[1:]
        is_between = between.holds(start)
        start = start[is_between]
        end = end[is_between]
        phase = self.phase(start)
        following = self._find_phase_that_follows(start, end, thread)
        phase = np.where(phase >= 0, phase, following)
        threads = np.full(len(start), max(thread, 0))
        frame = self.frame(start, threads)
        _add(total, frame, phase, end - start)

    def _find_edges(self, between: Cover) -> Integers:
        """Moments in order at which `between`, a phase or a line of the program begins or ends."""
        events = self.trace.events
        ranges = self.placing.ranges
        of_main = self._phases.rows
        edges = (
            between.start,
            between.end,
            ranges.start_ns[of_main],
            ranges.end_ns[of_main],
            events.start_ns[self.frames],
            events.end_ns[self.frames],
        )
        return np.unique(np.concatenate(edges))

    def _find_phase_that_follows(
        self,
        start: Integers,  # [k], of pieces of time outside of all operators
        end: Integers,  # [k]
        thread: int,
    ) -> Integers:
        """Find the phase of what follows each piece on the thread: int64 [k]; -1 unless only operators told it."""
        trace = self.trace
        events = trace.events
        is_call = np.isin(events.kind, (Kind.OP, Kind.RUNTIME))
        calls = trace.on_thread(np.flatnonzero(is_call), thread)
        if not len(calls):
            return np.full(len(start), -1)
        at = np.searchsorted(events.start_ns[calls], end)
        at = np.minimum(at, len(calls) - 1)
        following = calls[at]
        follows_at = events.start_ns[following]
        is_told_by_range = self.phase(follows_at) >= 0
        # behind the last call nothing follows
        is_nothing = follows_at < end
        phase = self.placing.phase[following]
        return np.where(is_told_by_range | is_nothing, -1, phase)

    # --- without a GPU: the time between operators by its length

    def measure_short_stretches(self, host: Cover) -> ShortGaps:
        """Measure the pieces of `host` below MIN_STRETCH_MS that are longer than calling an operator takes.

        Args:
            host: when no operator ran.

        Returns:
            Their number and ms in the median step.
        """
        lengths = host.end - host.start
        is_below = lengths < MIN_STRETCH_MS * 1e6
        is_short = is_below & (lengths >= MIN_SHORT_MS * 1e6)
        step = self._find_step(host.start[is_short])
        return ShortGaps(
            number=self._find_median_step(step, np.ones(len(step))),
            host_ms=self._find_median_step(step, lengths[is_short]) / 1e6,
            launch_ms=0.0,
            graph_ms=0.0,
            queued_ms=0.0,
        )

    def find_long_stretches(self, host: Cover) -> tuple[Stretch, ...]:
        """Find the pieces of `host` that are long.

        Args:
            host: when no operator ran.

        Returns:
            One stretch per phase, with its ms in the median step; longest first.
        """
        lengths = host.end - host.start
        is_long = lengths >= MIN_STRETCH_MS * 1e6
        pieces = _choose(host, is_long)
        phase = self.phase(_find_middle(pieces))
        found = []
        for number in np.unique(phase):
            of_phase = _choose(pieces, phase == number)
            stretch = self._make_stretch(number, of_phase)
            if stretch.ms > 0:
                found.append(stretch)
        found.sort(key=lambda one: -one.ms)
        return tuple(found)

    def _make_stretch(self, phase: int, pieces: Cover) -> Stretch:
        """Make the stretch of a phase of its long pieces of time without an operator."""
        lengths = pieces.end - pieces.start
        middle = _find_middle(pieces)
        frame = self.frame(middle, self._on_main(middle))
        lines, line_of_piece = np.unique(frame, return_inverse=True)
        ns_of_line = np.bincount(line_of_piece, lengths)
        step = self._find_step(middle)
        longest = lengths.argmax()
        return Stretch(
            phase=self.phase_text(phase),
            ms=self._find_median_step(step, lengths) / 1e6,
            line=self.text(lines[ns_of_line.argmax()]),
            after=self._name_operator_before(pieces.start[longest]),
        )

    def _name_operator_before(self, moment: int) -> str:
        """The name of the operator that ended last before the moment; '' for none."""
        ends = self.trace.events.end_ns[self.top_operators]
        by_end = np.argsort(ends, kind="stable")
        earlier = np.searchsorted(ends[by_end], moment, side="right")
        if not earlier:
            return ""
        last = by_end[earlier - 1]
        return self.trace.name_of(self.top_operators[last])

    def _find_step(self, moment: Integers) -> Integers:
        """The step that each moment lies in; moments lie in steps."""
        starts = [step.start_ns for step in self.placing.steps]
        return np.searchsorted(starts, moment, side="right") - 1

    def _find_median_step(self, step: Integers, amounts: Integers | Numbers) -> float:
        """The median of the steady steps' sums of the amounts, each of which belongs to a step."""
        steps = len(self.placing.steps)
        sums = np.bincount(step, amounts, minlength=steps)
        is_steady = self.placing.steady[:-1]
        return float(np.median(sums[is_steady]))


def _find_top_operators(trace: Trace, placing: Placing) -> Integers:
    """Rows of the operators that stand in no other operators but wrappers; wrappers themselves are left out."""
    is_wrapper = trace.matching(WRAPPER.match)
    operators = trace.rows[Kind.OP]
    operators = operators[~is_wrapper[operators]]
    around = placing.operator[operators]
    while True:
        in_wrapper = (around >= 0) & is_wrapper[around]
        if not in_wrapper.any():
            return operators[around < 0]
        outer = placing.operator[around]
        around = np.where(in_wrapper, outer, around)


def _choose(cover: Cover, chosen: Flags) -> Cover:
    """The intervals that are chosen."""
    return Cover(cover.start[chosen], cover.end[chosen])


def _find_middle(cover: Cover) -> Integers:
    """Find the moment in the middle of each interval: int64 [m]."""
    return cover.start + (cover.end - cover.start) // 2


def _add(total: SiteTimes, names: Integers, phases: Integers, amounts: Integers) -> None:
    """Add the amounts to `total` by (name, phase)."""
    hit = amounts > 0
    pairs = np.stack((names, phases))[:, hit]
    keys, key_of_amount = np.unique(pairs, axis=1, return_inverse=True)
    # older versions of numpy give the inverse the shape of the pairs
    sums = np.bincount(key_of_amount.ravel(), amounts[hit])
    for key, ns in zip(keys.T.tolist(), sums):
        total[tuple(key)] += int(ns)
