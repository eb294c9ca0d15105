"""Threads of the host as lanes: cut where something is launched, waited for or handed over, and where a phase, a step
or an operator begins or ends."""

import re
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.graph.graph import ActivityKind, EdgeKind
from megatron_lite.analysis.graph.parts import ALL_NS, Parts
from megatron_lite.analysis.graph.rank_input import RankInput
from megatron_lite.analysis.intervals import NOTHING, Cover, Flags, Integers, joined, union
from megatron_lite.analysis.trace.columns import Kind

FROM_WORKERS = re.compile(r"enumerate\(DataLoader\)#_MultiProcessing")


@dataclass(frozen=True)
class HostWaits:
    """Stretches in which a thread does nothing but wait, w of them."""

    thread: Integers  # [w], index into Trace.threads
    start_ns: Integers  # [w]
    end_ns: Integers  # [w]
    base_ns: Integers  # [w], what the thread's own part of it takes at least

    def __len__(self) -> int:
        return len(self.thread)

    @classmethod
    def join(cls, several: "list[HostWaits]") -> "HostWaits":
        """Join the waits of several into one."""
        return cls(
            thread=np.concatenate([one.thread for one in several]),
            start_ns=np.concatenate([one.start_ns for one in several]),
            end_ns=np.concatenate([one.end_ns for one in several]),
            base_ns=np.concatenate([one.base_ns for one in several]),
        )


@dataclass(frozen=True)
class HostLane:
    """The activities of one thread, k in order."""

    start_ns: Integers  # [k]
    end_ns: Integers  # [k]
    number: Integers  # [k], of the activity


@dataclass(frozen=True)
class HostLanes:
    """The threads of one rank."""

    of_thread: dict[int, HostLane]

    def ending_at(
        self,
        thread: Integers,
        moment: Integers,
    ) -> Integers:
        """Find the last activity of each thread that has ended by each moment: int64 [k]; -1: none."""
        found = np.full(len(thread), -1, np.int64)
        for one, lane in self.of_thread.items():
            here = np.flatnonzero(thread == one)
            last = np.searchsorted(lane.end_ns, moment[here], side="right") - 1
            number = lane.number[np.maximum(last, 0)]
            found[here] = np.where(last >= 0, number, -1)
        return found

    def starting_at(
        self,
        thread: Integers,
        moment: Integers,
    ) -> Integers:
        """Find the first activity of each thread that starts at or after each moment: int64 [k]; -1: none."""
        found = np.full(len(thread), -1, np.int64)
        for one, lane in self.of_thread.items():
            here = np.flatnonzero(thread == one)
            first = np.searchsorted(lane.start_ns, moment[here], side="left")
            numbers = np.append(lane.number, -1)
            found[here] = numbers[first]
        return found


def find_host_threads(one: RankInput) -> Integers:
    """The threads that run operators or launch work, without those of a backend of communication."""
    events = one.trace.events
    operators = one.trace.rows[Kind.OP]
    threads = [events.thread[operators], events.thread[one.launches]]
    if one.placing.main_thread >= 0:
        threads.append(np.array([one.placing.main_thread]))
    found = np.unique(np.concatenate(threads))
    return np.setdiff1d(found, one.backend_threads)


def add_host_lanes(
    parts: Parts,
    one: RankInput,
    threads: Integers,
    waits: HostWaits,
    handovers: "Handovers",
) -> HostLanes:
    """Add the threads of a rank.

    Args:
        parts: all activities and edges; they grow.
        one: the rank.
        threads: indices into Trace.threads.
        waits: stretches in which they wait.
        handovers: where threads work for each other.

    Returns:
        The lanes, to find their activities by time.
    """
    lanes = {}
    for thread in threads.tolist():
        lane = _add_lane(parts, one, thread, waits, handovers)
        if lane is not None:
            lanes[thread] = lane
    return HostLanes(lanes)


def _add_lane(
    parts: Parts,
    one: RankInput,
    thread: int,
    waits: HostWaits,
    handovers: "Handovers",
) -> HostLane | None:
    """Add the lane of one thread; None for a thread without events."""
    cuts = _find_cuts(one, thread, waits, handovers)
    if len(cuts) < 2:
        return None
    is_mine = waits.thread == thread
    waiting = union(waits.start_ns[is_mine], waits.end_ns[is_mine])
    start_ns = cuts[:-1]
    end_ns = cuts[1:]
    is_work = ~waiting.holds(start_ns)
    # an empty activity at the end, for what the last one waits for
    start_ns = np.append(start_ns[is_work], cuts[-1])
    end_ns = np.append(end_ns[is_work], cuts[-1])
    found = _describe(one, thread, start_ns, end_ns)
    lane = parts.add_lane(one.at, f"thread {thread}")
    recomputing = one.recomputing.get(thread, NOTHING)
    filling_buckets = one.filling_buckets.get(thread, NOTHING)
    number = parts.add(
        lane,
        start_ns + one.clock_ns,
        end_ns + one.clock_ns,
        found.kind,
        step=one.find_step(found.middle_ns),
        phase=one.number_phases(found.phase),
        name=found.name,
        row=found.row,
        cause=found.cause,
        again_ns=recomputing.within(start_ns, end_ns),
        bucket_ns=filling_buckets.within(start_ns, end_ns),
    )
    base_ns = _find_own_part(waits, is_mine, start_ns[1:], end_ns[:-1])
    parts.chain(number, EdgeKind.THREAD, base_ns)
    return HostLane(start_ns, end_ns, number)


def _find_own_part(
    waits: HostWaits,
    is_mine: Flags,
    resumed_ns: Integers,
    stopped_ns: Integers,
) -> Integers:
    """Find what of each hole between two activities of a thread is the thread's own.

    Args:
        waits: all waits.
        is_mine: [w], those of the thread.
        resumed_ns: [k], ends of the holes.
        stopped_ns: [k], their starts.

    Returns:
        int64 [k], ns; ALL_NS where there is no wait.
    """
    base_ns = np.full(len(resumed_ns), ALL_NS)
    order = np.argsort(waits.end_ns[is_mine], kind="stable")
    ends = waits.end_ns[is_mine][order]
    own = waits.base_ns[is_mine][order]
    holes = np.flatnonzero(resumed_ns > stopped_ns)
    if not len(ends):
        return base_ns
    last = np.searchsorted(ends, resumed_ns[holes], side="right") - 1
    base_ns[holes] = own[np.maximum(last, 0)]
    return base_ns


def _find_cuts(
    one: RankInput,
    thread: int,
    waits: HostWaits,
    handovers: "Handovers",
) -> Integers:
    """Find the moments at which a thread's lane is cut, in order; int64 [k]."""
    events = one.trace.events
    is_mine = waits.thread == thread
    moments = [waits.start_ns[is_mine], waits.end_ns[is_mine]]
    operators = one.find_outermost(thread)
    moments += [events.start_ns[operators], events.end_ns[operators]]
    launches = one.trace.on_thread(one.launches, thread)
    moments.append(events.start_ns[launches])
    moments.append(one.called_ns[one.called_on == thread])
    ranges = one.placing.ranges
    in_ranges = ranges.thread == thread
    moments += [ranges.start_ns[in_ranges], ranges.end_ns[in_ranges]]
    moments.append(handovers.find_moments(thread))
    if thread == one.placing.main_thread:
        for step in one.placing.steps:
            moments.append(np.array([step.host_start_ns, step.host_end_ns]))
            if not one.on_gpu:
                moments.append(np.array([step.start_ns, step.end_ns]))
        if one.on_gpu:
            moments.append(np.array([one.first_steady_ns]))
    cuts = np.unique(np.concatenate(moments)).astype(np.int64)
    if not len(cuts):
        return cuts
    # named work cuts what there is; it does not make the lane longer
    named = joined(one.loading, one.named)
    inner = np.concatenate([named.start, named.end])
    is_inside = (inner > cuts[0]) & (inner < cuts[-1])
    return np.union1d(cuts, inner[is_inside])


@dataclass(frozen=True)
class _Described:
    """Traits of k activities of a thread; int64 [k] each."""

    kind: Integers
    middle_ns: Integers
    phase: Integers  # index into the placing's phases; -1: none
    name: Integers  # index into Graph.names; -1: none
    row: Integers
    cause: Integers  # index into CAUSES; -1: none


def _describe(
    one: RankInput,
    thread: int,
    start_ns: Integers,
    end_ns: Integers,
) -> _Described:
    """Describe what the host does in each stretch of time on a thread."""
    middle_ns = (start_ns + end_ns) // 2
    operators = one.find_outermost(thread)
    row = _find_around(one, operators, middle_ns)
    in_operator = row >= 0
    kind = np.where(in_operator, ActivityKind.OPERATOR, ActivityKind.PYTHON)
    cause = one.find_cause(middle_ns)
    kind = np.where(cause >= 0, ActivityKind.NAMED, kind)
    if thread == one.placing.main_thread:
        is_loading = one.loading.holds(middle_ns)
        kind = np.where(is_loading, ActivityKind.LOADER, kind)
        cause = np.where(is_loading, -1, cause)
    of_operator = one.placing.phase[row]
    phase = np.where(in_operator, of_operator, one.find_phase_of_range(middle_ns))
    name = one.number_names(row)
    return _Described(kind, middle_ns, _fill_between(phase), name, row, cause)


def _find_around(
    one: RankInput,
    operators: Integers,
    moment: Integers,
) -> Integers:
    """Find the operator around each moment, of those that stand apart on a thread; int64 [k]; -1: none."""
    if not len(operators):
        return np.full(len(moment), -1, np.int64)
    events = one.trace.events
    begun = np.searchsorted(events.start_ns[operators], moment, side="right") - 1
    last = operators[np.maximum(begun, 0)]
    is_inside = (begun >= 0) & (moment < events.end_ns[last])
    return np.where(is_inside, last, -1)


def _fill_between(phase: Integers) -> Integers:
    """Give what stands between two activities of one phase that phase; [k]; -1: none."""
    known = np.flatnonzero(phase >= 0)
    if not len(known):
        return phase
    at = np.searchsorted(known, np.arange(len(phase)))
    earlier = known[np.maximum(at - 1, 0)]
    later = known[np.minimum(at, len(known) - 1)]
    before = phase[earlier]
    after = phase[later]
    has_both = (at > 0) & (at < len(known))
    is_between = (phase < 0) & has_both & (before == after)
    return np.where(is_between, before, phase)


# --- threads that work for each other, as autograd's does for the main thread


@dataclass(frozen=True)
class Handovers:
    """Runs of work, h of them, that threads do for the main one."""

    main: int  # the main thread
    thread: Integers  # [h], that works
    start_ns: Integers  # [h]
    end_ns: Integers  # [h]
    awaited: Flags  # [h], the main thread does nothing meanwhile
    idle_since_ns: Integers  # [h], end of the thread's run before it

    def find_moments(self, thread: int) -> Integers:
        """Moments at which a thread hands work over or takes it up again."""
        if thread == self.main:
            return np.concatenate([self.start_ns, self.end_ns[self.awaited]])
        is_mine = self.thread == thread
        return np.concatenate([self.start_ns[is_mine], self.end_ns[is_mine]])

    def list_waits(self) -> HostWaits:
        """List when the main thread waits for runs, and when the other threads wait for the next one."""
        awaited = self.awaited
        of_main = HostWaits(
            thread=np.full(int(awaited.sum()), self.main),
            start_ns=self.start_ns[awaited],
            end_ns=self.end_ns[awaited],
            base_ns=np.zeros(int(awaited.sum()), np.int64),
        )
        begins = self.idle_since_ns >= 0
        of_others = HostWaits(
            thread=self.thread[begins],
            start_ns=self.idle_since_ns[begins],
            end_ns=self.start_ns[begins],
            base_ns=np.zeros(int(begins.sum()), np.int64),
        )
        return HostWaits.join([of_main, of_others])


def find_handovers(one: RankInput, threads: Integers) -> Handovers:
    """Find the runs of work of all threads but the main one: between two, the main thread has done something."""
    main = one.placing.main_thread
    of_main = NOTHING
    if main in threads:
        of_main = _cover_events(one, main)
    moments = np.sort(np.concatenate([of_main.start, of_main.end]))
    others = [thread for thread in threads.tolist() if thread != main]
    if not len(moments):
        others = []
    runs = [_find_runs(one, thread, moments) for thread in others]
    none = np.empty(0, np.int64)
    lengths = [len(run) for run in runs]
    thread_of = np.repeat(np.array(others, np.int64), lengths)
    starts = [run.start for run in runs]
    ends = [run.end for run in runs]
    start_ns = np.concatenate([none, *starts])
    end_ns = np.concatenate([none, *ends])
    # the main thread does nothing between the two, and something before and behind
    first = np.searchsorted(moments, start_ns, side="right")
    last = np.searchsorted(moments, end_ns, side="left")
    is_between = (first > 0) & (first < len(moments))
    is_same = np.zeros(len(thread_of), bool)
    is_same[1:] = thread_of[1:] == thread_of[:-1]
    earlier_ns = np.roll(end_ns, 1)
    return Handovers(
        main=main,
        thread=thread_of,
        start_ns=start_ns,
        end_ns=end_ns,
        awaited=(first == last) & is_between,
        idle_since_ns=np.where(is_same, earlier_ns, -1),
    )


def _find_runs(
    one: RankInput,
    thread: int,
    moments: Integers,
) -> Cover:
    """Find the runs of work of a thread; moments: when the main thread begins or ends something, in order."""
    busy = _cover_events(one, thread)
    if not len(busy):
        return busy
    before = np.searchsorted(moments, busy.end[:-1], side="left")
    until = np.searchsorted(moments, busy.start[1:], side="right")
    is_new = until > before
    begins = np.concatenate(([True], is_new))
    ends = np.concatenate((is_new, [True]))
    return Cover(busy.start[begins], busy.end[ends])


def _cover_events(one: RankInput, thread: int) -> Cover:
    """When operators or calls of the runtime are under way on a thread."""
    trace = one.trace
    operators = one.find_outermost(thread)
    calls = trace.on_thread(trace.rows[Kind.RUNTIME], thread)
    return trace.cover(np.concatenate([operators, calls]))


def connect_handovers(
    parts: Parts,
    lanes: HostLanes,
    handovers: Handovers,
) -> None:
    """Let runs wait for what hands them over, and the main thread for their ends.

    Args:
        parts: all activities and edges; they grow.
        lanes: the threads of the rank.
        handovers: the runs of work.
    """
    main = np.full(len(handovers.thread), handovers.main)
    gives = lanes.ending_at(main, handovers.start_ns)
    begins = lanes.starting_at(handovers.thread, handovers.start_ns)
    parts.connect(gives, begins, EdgeKind.HANDOVER)
    ends = lanes.ending_at(handovers.thread, handovers.end_ns)
    takes = lanes.starting_at(main, handovers.end_ns)
    awaited = handovers.awaited
    parts.connect(ends[awaited], takes[awaited], EdgeKind.HANDOVER)


# --- the loader's workers

MIN_LOADER_WAIT = 0.05  # of the mean step: less is taking a batch that is ready
MIN_LATE_BATCHES = 0.5  # of the batches: else workers are fast enough, and how fast is not known


def find_loader_waits(one: RankInput) -> HostWaits:
    """Find when the main thread waits for a batch of workers; none where most batches are ready."""
    trace = one.trace
    rows = trace.find_named(FROM_WORKERS.match, Kind.ANNOTATION)
    rows = trace.on_thread(rows, one.placing.main_thread)
    lengths_ns = trace.lengths_ns(rows)
    is_late = lengths_ns > MIN_LOADER_WAIT * one.step_ns
    if len(rows) and is_late.mean() < MIN_LATE_BATCHES:
        is_late[:] = False
    quick = lengths_ns[~is_late]
    own_ns = int(quick.min()) if len(quick) else 0
    rows = rows[is_late]
    return HostWaits(
        thread=trace.events.thread[rows].astype(np.int64),
        start_ns=trace.events.start_ns[rows],
        end_ns=trace.events.end_ns[rows],
        base_ns=np.full(len(rows), own_ns),
    )


def add_workers(
    parts: Parts,
    one: RankInput,
    lanes: HostLanes,
    waits: HostWaits,
) -> None:
    """Add the loader's workers: a batch takes from the batch before it to the moment at which the host gets it.

    Args:
        parts: all activities and edges; they grow.
        one: the rank.
        lanes: its threads.
        waits: when the main thread waits for a batch.
    """
    if len(waits) < 2:
        return
    ready_ns = waits.end_ns
    lane = parts.add_lane(one.at, "loader")
    batches = parts.add(
        lane,
        ready_ns[:-1] + one.clock_ns,
        ready_ns[1:] + one.clock_ns,
        ActivityKind.WORKER,
        step=one.find_step(ready_ns[1:] - 1),
    )
    parts.chain(batches, EdgeKind.THREAD)
    takes = lanes.starting_at(waits.thread[1:], ready_ns[1:])
    parts.connect(batches, takes, EdgeKind.BATCH)
