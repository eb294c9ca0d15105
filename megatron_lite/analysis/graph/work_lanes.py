"""Streams of a device and threads of a backend as lanes, and why each piece of work began when it did."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.graph.graph import ActivityKind, EdgeKind
from megatron_lite.analysis.graph.host_lanes import HostLanes, HostWaits
from megatron_lite.analysis.graph.parts import ALL_NS, Parts
from megatron_lite.analysis.graph.rank_input import RankInput
from megatron_lite.analysis.intervals import Cover, Flags, Integers
from megatron_lite.analysis.ranks.calls import POINT_TO_POINT, What
from megatron_lite.analysis.trace.columns import Kind

WAITS_FOR_EVENT = re.compile(r"(cuda|hip|cu|mu|musa)StreamWaitEvent")


@dataclass(frozen=True)
class WorkActivities:
    """Activities of k pieces of work: where ranks meet, a piece is two, the arrival and the transfer."""

    begin: Integers  # int64 [k], number of the first one; -1: none
    finish: Integers  # int64 [k], number of the last one


@dataclass(frozen=True)
class WorkLane:
    """The work of one stream or thread, k pieces in order, on the trace's own clock."""

    device: int
    stream: int
    rows: Integers  # [k]
    place: Integers  # [k], in the rank's list of all work
    launched_ns: Integers  # [k], running maximum: no later work was launched before

    @property
    def name(self) -> str:
        """The name of its lane in the graph."""
        if self.device < 0:
            return f"backend {self.stream}"
        return f"GPU {self.device} stream {self.stream}"


@dataclass(frozen=True)
class RankWork:
    """All work of one rank beside its threads, w pieces."""

    rows: Integers  # [w], of the trace, by start
    activities: WorkActivities
    lanes: tuple[WorkLane, ...]
    of_calls: WorkActivities  # of the rank's collectives


def add_work(
    parts: Parts,
    one: RankInput,
    last_arrival_ns: Integers,
) -> RankWork:
    """Add what a rank's device and its backend of communication do, in the order of their streams and threads.

    Args:
        parts: all activities and edges; they grow.
        one: the rank.
        last_arrival_ns: by collective of the rank, when the last rank came, on the clock of all; -1: not known.
    """
    calls = one.calls
    rows = one.trace.device_rows if one.on_gpu else calls.rows
    called_ns = _find_launch_moments(one, rows) if one.on_gpu else one.called_ns
    nowhere = np.full(len(rows), -1)
    activities = WorkActivities(nowhere.copy(), nowhere.copy())
    place_of_call = np.searchsorted(rows, calls.rows)
    traits = _describe_work(one, rows, place_of_call, last_arrival_ns)
    lanes = []
    for device, number, place in _sort_by_lane(one, rows):
        launched_ns = np.maximum.accumulate(called_ns[place])
        lane = WorkLane(device, number, rows[place], place, launched_ns)
        _add_lane(parts, one, lane, activities, traits.choose(place))
        lanes.append(lane)
    of_calls = WorkActivities(activities.begin[place_of_call], activities.finish[place_of_call])
    return RankWork(rows, activities, tuple(lanes), of_calls)


def _sort_by_lane(one: RankInput, rows: Integers) -> Iterator[tuple[int, int, Integers]]:
    """Sort work by device and stream, or -1 and the backend's thread: each with the places of its work in `rows`."""
    events = one.trace.events
    number = events.stream if one.on_gpu else events.thread
    device_of_row = events.device[rows].astype(np.int64)
    number_of_row = number[rows].astype(np.int64)
    keys = np.stack([device_of_row, number_of_row])
    found, key_of_row = np.unique(keys, axis=1, return_inverse=True)
    key_of_row = key_of_row.ravel()
    for key, (device, of_device) in enumerate(found.T.tolist()):
        place: Integers = np.flatnonzero(key_of_row == key)
        yield device, of_device, place


def _find_launch_moments(one: RankInput, rows: Integers) -> Integers:
    """When each piece of device work was launched: int64 [k]; 0: before the trace."""
    launch = one.trace.launch_of[rows]
    return np.where(launch >= 0, one.trace.events.start_ns[launch], 0)


def _find_steps(one: RankInput, rows: Integers) -> Integers:
    """Number the steps of pieces of work, by their launches."""
    if one.on_gpu:
        return one.number_steps(one.placing.step[rows].astype(np.int64))
    return one.find_step(one.called_ns)


def _find_launched_within(
    one: RankInput,
    rows: Integers,
    covers: Mapping[int, Cover],
) -> Flags:
    """Tell for each piece of device work (bool [k]) whether it was launched at certain times.

    Args:
        one: the rank.
        rows: [k], of the trace.
        covers: the times, by thread.
    """
    launch = one.trace.launch_of[rows]
    events = one.trace.events
    found = np.zeros(len(rows), bool)
    for thread, cover in covers.items():
        is_mine = (launch >= 0) & (events.thread[launch] == thread)
        found |= is_mine & cover.holds(events.start_ns[launch])
    return found


@dataclass(frozen=True)
class _Traits:
    """Traits of k pieces of work."""

    is_call: Flags  # [k], collectives
    met_ns: Integers  # [k], when the last rank came; -1: not known
    step: Integers  # [k], numbers of steps; -1: none
    phase: Integers  # [k], index into Graph.phases; -1: none
    is_again: Flags  # [k], launched where forward is computed once more
    fills_bucket: Flags  # [k], launched where gradients are moved into buckets or back
    num_bytes: Integers  # [k], of collectives; -1: not known
    is_pair: Flags  # [k], sends and receives

    def choose(self, place: Integers) -> "_Traits":
        """Choose pieces by their places."""
        return _Traits(
            is_call=self.is_call[place],
            met_ns=self.met_ns[place],
            step=self.step[place],
            phase=self.phase[place],
            is_again=self.is_again[place],
            fills_bucket=self.fills_bucket[place],
            num_bytes=self.num_bytes[place],
            is_pair=self.is_pair[place],
        )


def _read_bytes(what: What) -> int:
    """The size of a collective, -1 where it is not recorded."""
    return -1 if what.num_bytes is None else what.num_bytes


def _describe_work(
    one: RankInput,
    rows: Integers,
    place_of_call: Integers,
    last_arrival_ns: Integers,
) -> _Traits:
    """Describe all work of a rank.

    Args:
        one: the rank.
        rows: [w], of the trace.
        place_of_call: [c], the places of collectives among them.
        last_arrival_ns: [c], when the last rank came, on the clock of all; -1: not known.
    """
    calls = one.calls
    is_call = np.zeros(len(rows), bool)
    is_call[place_of_call] = True
    met_ns = np.full(len(rows), -1, np.int64)
    met_ns[place_of_call] = last_arrival_ns
    num_bytes = np.full(len(rows), -1, np.int64)
    num_bytes[place_of_call] = [_read_bytes(what) for what in calls.whats]
    is_pair = np.zeros(len(rows), bool)
    is_pair[place_of_call] = [what.kind in POINT_TO_POINT for what in calls.whats]
    phase = one.number_phases(one.placing.phase[rows])
    # a sum of gradients may begin when backward is through: it belongs to what called it
    phase[place_of_call] = [one.phases[name] if name else -1 for name in calls.phase]
    return _Traits(
        is_call=is_call,
        met_ns=met_ns,
        step=_find_steps(one, rows),
        phase=phase,
        is_again=_find_launched_within(one, rows, one.recomputing),
        fills_bucket=_find_launched_within(one, rows, one.filling_buckets),
        num_bytes=num_bytes,
        is_pair=is_pair,
    )


def _add_lane(
    parts: Parts,
    one: RankInput,
    lane: WorkLane,
    activities: WorkActivities,
    traits: _Traits,
) -> None:
    """Add one stream or thread.

    Args:
        parts: all activities and edges; they grow.
        one: the rank.
        lane: k pieces of work.
        activities: of all work of the rank; filled in.
        traits: of the lane's pieces.
    """
    events = one.trace.events
    start_ns = events.start_ns[lane.rows] + one.clock_ns
    end_ns = events.end_ns[lane.rows] + one.clock_ns
    pieces = _cut_at_meetings(start_ns, end_ns, traits.met_ns)
    is_kernel = events.kind[lane.rows] == Kind.KERNEL
    kinds = np.where(is_kernel, ActivityKind.KERNEL, ActivityKind.COPY)
    kinds = np.where(traits.is_call, ActivityKind.TRANSFER, kinds)
    names = one.number_names(lane.rows)
    of_all = parts.add_lane(one.at, lane.name)
    number = parts.add(
        of_all,
        pieces.start_ns,
        pieces.end_ns,
        np.where(pieces.is_arrival, ActivityKind.ARRIVAL, kinds[pieces.of]),
        step=traits.step[pieces.of],
        phase=traits.phase[pieces.of],
        name=names[pieces.of],
        row=lane.rows[pieces.of],
        again_ns=np.where(traits.is_again[pieces.of], pieces.end_ns - pieces.start_ns, 0),
        bucket_ns=np.where(traits.fills_bucket[pieces.of], pieces.end_ns - pieces.start_ns, 0),
        num_bytes=np.where(pieces.is_arrival, -1, traits.num_bytes[pieces.of]),
    )
    activities.begin[lane.place] = number[~pieces.is_second]
    activities.finish[lane.place[pieces.of]] = number
    _chain(parts, one, lane, number, pieces, traits)


@dataclass(frozen=True)
class _Pieces:
    """Activities of k pieces of work, p of them: a piece with a meeting becomes arrival and transfer."""

    of: Integers  # [p], the piece
    start_ns: Integers  # [p]
    end_ns: Integers  # [p]
    is_arrival: Flags  # [p]
    is_second: Flags  # [p], a transfer behind its arrival


def _cut_at_meetings(
    start_ns: Integers,
    end_ns: Integers,
    met_ns: Integers,
) -> _Pieces:
    """Cut pieces of work where ranks meet.

    Args:
        start_ns: [k].
        end_ns: [k].
        met_ns: [k], when the last rank came; outside of a piece, or -1: it is not cut.
    """
    is_apart = (met_ns >= start_ns) & (met_ns <= end_ns)
    times = np.where(is_apart, 2, 1)
    of = np.repeat(np.arange(len(start_ns)), times)
    is_second = np.zeros(len(of), bool)
    is_second[1:] = of[1:] == of[:-1]
    is_arrival = is_apart[of] & ~is_second
    return _Pieces(
        of=of,
        start_ns=np.where(is_second, met_ns[of], start_ns[of]),
        end_ns=np.where(is_arrival, start_ns[of], end_ns[of]),
        is_arrival=is_arrival,
        is_second=is_second,
    )


def _chain(
    parts: Parts,
    one: RankInput,
    lane: WorkLane,
    number: Integers,
    pieces: _Pieces,
    traits: _Traits,
) -> None:
    """Let each piece of work wait for the one before it on its lane.

    Args:
        parts: all activities and edges; they grow.
        one: the rank.
        lane: k pieces of work.
        number: [p], the activities.
        pieces: what they are parts of.
        traits: [k] each; a backend's thread does not put sends and receives in order.
    """
    follows = pieces.start_ns[1:] >= pieces.end_ns[:-1]
    if lane.device < 0:
        # a backend's thread may have several under way at once
        is_free = traits.is_pair[pieces.of[:-1]] | traits.is_pair[pieces.of[1:]]
        follows &= pieces.is_second[1:] | ~is_free
        earlier = number[:-1][follows]
        later = number[1:][follows]
        parts.connect(earlier, later, EdgeKind.STREAM)
        return
    events = one.trace.events
    started_ns = events.start_ns[lane.rows]
    ended_ns = events.end_ns[lane.rows]
    gap_ns = started_ns[1:] - ended_ns[:-1]
    is_queued = lane.launched_ns[1:] < started_ns[:-1]
    # collectives wait for events of other streams: how soon they follow each other says nothing of the device
    is_typical = is_queued & ~traits.is_call[1:]
    base_ns = _choose_base(gap_ns, is_typical & (gap_ns >= 0))
    parts.chain(number, EdgeKind.STREAM, base_ns)


def _choose_base(lags_ns: Integers, is_typical: Flags) -> int:
    """Choose the least time between two activities: the median of typical pairs, 0 where none is seen."""
    typical = lags_ns[is_typical]
    return int(np.median(typical)) if len(typical) else 0


def connect_launches(
    parts: Parts,
    one: RankInput,
    work: RankWork,
    hosts: HostLanes,
) -> None:
    """Let device work wait for its launch, and a backend's for the operator that handed it over.

    Args:
        parts: all activities and edges; they grow.
        one: the rank.
        work: what its device and backend do.
        hosts: its threads.
    """
    events = one.trace.events
    if one.on_gpu:
        launch = one.trace.launch_of[work.rows]
        is_launched = launch >= 0
        # collectives wait for events of other streams, too
        is_typical = ~np.isin(work.rows, one.calls.rows)
        thread: Integers = np.where(is_launched, events.thread[launch], -1)
        called_ns: Integers = np.where(is_launched, events.start_ns[launch], -1)
        kind = EdgeKind.LAUNCH
    else:
        is_typical = np.ones(len(work.rows), bool)
        thread = one.called_on
        called_ns = one.called_ns
        kind = EdgeKind.CALL
    source = hosts.ending_at(thread, called_ns)
    lag_ns = events.start_ns[work.rows] - called_ns
    _connect_unknown_calls(parts, one, work, hosts)
    is_idle = np.zeros(len(work.rows), bool)
    for lane in work.lanes:
        before_ns = np.zeros(len(lane.rows), np.int64)
        before_ns[1:] = events.end_ns[lane.rows[:-1]]
        is_idle[lane.place] = called_ns[lane.place] >= before_ns
    is_typical = is_typical & is_idle & (source >= 0)
    base_ns = _choose_base(lag_ns, is_typical & (lag_ns >= 0))
    parts.connect(source, work.activities.begin, kind, base_ns)


def _connect_unknown_calls(
    parts: Parts,
    one: RankInput,
    work: RankWork,
    hosts: HostLanes,
) -> None:
    """Let a backend's work whose call is not known wait for what the main thread had done when it began."""
    if one.on_gpu:
        return
    unknown = np.flatnonzero(one.called_on < 0)
    main = np.full(len(unknown), one.placing.main_thread)
    source = hosts.ending_at(main, one.calls.start_ns[unknown])
    parts.connect(source, work.activities.begin[unknown], EdgeKind.CALL, ALL_NS)


# --- streams that wait for events of others


def connect_events(
    parts: Parts,
    one: RankInput,
    work: RankWork,
) -> None:
    """Let streams wait for the events that they were told to wait for.

    The trace says that a stream waits, and sometimes which one; else it is the one on which the same thread launches
    next. The event was recorded behind what its stream had been given by then: of that, on all other streams, the work
    that ended last before the waiting work started.

    Args:
        parts: all activities and edges; they grow.
        one: the rank.
        work: what its device does.
    """
    waits = one.trace.find_named(WAITS_FOR_EVENT.match, Kind.RUNTIME)
    if len(work.lanes) < 2 or not len(waits):
        return
    lane_of_wait = _find_waiting_lanes(one, work, waits)
    told_ns = one.trace.events.start_ns[waits]
    for at, lane in enumerate(work.lanes):
        mine = told_ns[lane_of_wait == at]
        first = np.searchsorted(lane.launched_ns, mine, side="left")
        has_work = first < len(lane.rows)
        waiting = lane.place[first[has_work]]
        awaited = _find_awaited(parts, one, work, lane, mine[has_work], waiting)
        ended = work.activities.finish[awaited]
        source = np.where(awaited >= 0, ended, -1)
        target = work.activities.begin[waiting]
        parts.connect(source, target, EdgeKind.EVENT)


def _find_awaited(
    parts: Parts,
    one: RankInput,
    work: RankWork,
    lane: WorkLane,
    told_ns: Integers,
    waiting: Integers,
) -> Integers:
    """Find what a stream was told to wait for; int64 [k], place in the rank's work; -1: not known, which is counted.

    Args:
        parts: counts edges whose source is not known.
        one: the rank.
        work: all work of the rank.
        lane: the stream.
        told_ns: [k], when it was told to wait.
        waiting: [k], place in the rank's work of what waits.
    """
    events = one.trace.events
    started_ns = events.start_ns[work.rows[waiting]]
    best: Integers = np.full(len(waiting), -1, np.int64)
    best_ns: Integers = np.full(len(waiting), -1, np.int64)
    had_work = np.zeros(len(waiting), bool)
    for other in work.lanes:
        if other is lane or other.device != lane.device:
            continue
        given = np.searchsorted(other.launched_ns, told_ns, side="left") - 1
        ends_ns = events.end_ns[other.rows]
        over = np.searchsorted(ends_ns, started_ns, side="right") - 1
        last = np.minimum(given, over)
        had_work |= given >= 0
        chosen = np.maximum(last, 0)
        end_ns = ends_ns[chosen]
        is_better = (last >= 0) & (end_ns > best_ns)
        best = np.where(is_better, other.place[chosen], best)
        best_ns = np.where(is_better, end_ns, best_ns)
    is_unknown = had_work & (best < 0)
    parts.missing[EdgeKind.EVENT] += int(is_unknown.sum())
    return best


def _find_waiting_lanes(
    one: RankInput,
    work: RankWork,
    waits: Integers,
) -> Integers:
    """Find the lane of the stream that each call tells to wait: int64 [k]; -1: not known."""
    events = one.trace.events
    found = np.full(len(waits), -1, np.int64)
    lane_of_piece = np.full(len(work.rows), -1, np.int64)
    for at, lane in enumerate(work.lanes):
        lane_of_piece[lane.place] = at
    launch = one.trace.launch_of[work.rows]
    launched = np.flatnonzero(launch >= 0)
    for thread in np.unique(events.thread[waits]).tolist():
        here = np.flatnonzero(events.thread[waits] == thread)
        mine = launched[events.thread[launch[launched]] == thread]
        launched_ns = events.start_ns[launch[mine]]
        order = np.argsort(launched_ns, kind="stable")
        told_ns = events.start_ns[waits[here]]
        following = np.searchsorted(launched_ns[order], told_ns)
        lanes = np.append(lane_of_piece[mine[order]], -1)
        found[here] = lanes[following]
    told = _find_told_streams(one, waits)
    for at, lane in enumerate(work.lanes):
        found[told == lane.stream] = at
    return found


def _find_told_streams(one: RankInput, calls: Integers) -> Integers:
    """Find the stream that the trace names for each call that waits: int64 [k]; -1: it names none."""
    events = one.trace.events
    told = one.trace.rows[Kind.SYNC]
    told = told[events.correlation[told] >= 0]
    if not len(told):
        return np.full(len(calls), -1, np.int64)
    told = told[np.argsort(events.correlation[told], kind="stable")]
    at = np.searchsorted(events.correlation[told], events.correlation[calls])
    row = told[np.minimum(at, len(told) - 1)]
    is_same = events.correlation[row] == events.correlation[calls]
    stream = events.stream[row].astype(np.int64)
    return np.where(is_same, stream, -1)


# --- the host waits for the device


def _find_sync_calls(one: RankInput) -> Integers:
    """Rows of the calls in which the host waits for the device, in order."""
    rows = one.activity.waits if one.on_gpu else np.empty(0, np.int64)
    lasts = one.trace.lengths_ns(rows) > 0
    return rows[lasts]


def _find_own_lengths(
    one: RankInput,
    rows: Integers,
    has_waited: Flags,
) -> Integers:
    """Find for each call that waits how long the shortest one of its name lasts that did not: int64 [k], ns; 0: none.

    Args:
        one: the rank.
        rows: [k], the calls.
        has_waited: [k].
    """
    names = one.trace.events.name[rows]
    _, name = np.unique(names, return_inverse=True)
    own_ns = np.full(len(rows) + 1, ALL_NS)
    quick = rows[~has_waited]
    quick_ns = one.trace.lengths_ns(quick)
    np.minimum.at(own_ns, name[~has_waited], quick_ns)
    found = own_ns[name]
    return np.where(found == ALL_NS, 0, found)


def choose_explained_syncs(one: RankInput, work: RankWork) -> tuple[HostWaits, Integers]:
    """Choose the calls in which the host waited for device work, and find that work.

    It is what ended last before the call returned, of the last works that streams had been given when the call began,
    and if the trace names a stream, of that one. A call that returns before any of them took the host's own time.

    Returns:
        The waits, of which the shortest call of a name is the host's own; and place in the rank's work of what each
        waited for: int64 [w].
    """
    events = one.trace.events
    rows = _find_sync_calls(one)
    told = _find_told_streams(one, rows)
    known = [lane.stream for lane in work.lanes]
    told = np.where(np.isin(told, known), told, -1)
    best: Integers = np.full(len(rows), -1, np.int64)
    # what ended before the call did not hold it up
    called_ns = events.start_ns[rows]
    returned_ns = events.end_ns[rows]
    best_ns = called_ns.copy()
    for lane in work.lanes:
        last = np.searchsorted(lane.launched_ns, called_ns, side="right") - 1
        chosen = np.maximum(last, 0)
        end_ns = events.end_ns[lane.rows[chosen]]
        is_later = (last >= 0) & (end_ns > best_ns)
        is_over = end_ns <= returned_ns
        is_meant = (told < 0) | (told == lane.stream)
        is_better = is_later & is_over & is_meant
        best = np.where(is_better, lane.place[chosen], best)
        best_ns = np.where(is_better, end_ns, best_ns)
    is_explained = best >= 0
    calls = rows[is_explained]
    waits = HostWaits(
        thread=events.thread[calls].astype(np.int64),
        start_ns=events.start_ns[calls],
        end_ns=events.end_ns[calls],
        base_ns=_find_own_lengths(one, rows, is_explained)[is_explained],
    )
    return waits, best[is_explained]
