"""Builds the dependency graph of the ranks of one run from their traces."""

from collections.abc import Sequence

import numpy as np

from megatron_lite.analysis.graph.backend_ends import trim_late_ends, trim_unawaited_ends
from megatron_lite.analysis.graph.device_clock import measure_device_lead, move_device
from megatron_lite.analysis.graph.graph import Boundary, EdgeKind, Graph, Lane
from megatron_lite.analysis.graph.host_lanes import (
    HostLanes,
    HostWaits,
    add_host_lanes,
    add_workers,
    connect_handovers,
    find_handovers,
    find_host_threads,
    find_loader_waits,
)
from megatron_lite.analysis.graph.meetings import connect_meetings, find_last_arrivals, find_meetings
from megatron_lite.analysis.graph.parts import Ordered, Parts, put_in_order
from megatron_lite.analysis.graph.rank_input import RankInput
from megatron_lite.analysis.graph.work_lanes import (
    RankWork,
    add_work,
    choose_explained_syncs,
    connect_events,
    connect_launches,
)
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.ranks.calls import Calls, collect_calls
from megatron_lite.analysis.ranks.matching import Group, align_clocks, match
from megatron_lite.analysis.ranks.ranks import find_shared_steps
from megatron_lite.analysis.time.rank_time import find_host_rows
from megatron_lite.analysis.time.step_windows import find_computing_stream
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Numbered, Trace

MAX_GRAPH_EVENTS = 4_000_000  # of all ranks' traces: a graph of more takes longer, and more memory, than reading them


def explain_size(traces: Sequence[Trace]) -> str:
    """Explain why traces hold too many events for one graph; '' where they do not."""
    events = sum(len(trace.events) for trace in traces)
    if events <= MAX_GRAPH_EVENTS:
        return ""
    return f"{events:,} events are too many for a graph of their dependencies, {MAX_GRAPH_EVENTS:,} are the most"


def build_graph(ranks: Sequence[tuple[Trace, Placing]]) -> Graph:
    """Build the graph of the ranks of one run.

    Args:
        ranks: the trace of each rank, and where its events belong; without any the graph is empty.
    """
    if not ranks:
        return _build_empty_graph()
    inputs, groups, limits = _prepare(ranks)
    calls = [one.calls for one in inputs]
    parts = Parts()
    device_clocks_ns = [one.clock_ns - one.device_lead_ns for one in inputs]
    meetings = find_meetings(calls, groups, device_clocks_ns)
    arrivals = find_last_arrivals(meetings, len(inputs), calls)
    works = [_add_rank(parts, one, arrivals[one.at]) for one in inputs]
    connect_meetings(parts, meetings, [work.of_calls for work in works])
    ordered = put_in_order(parts)
    boundaries = [_find_boundary(one, parts, ordered) for one in inputs]
    return Graph(
        lanes=tuple(parts.lanes),
        # ranks number them together
        phases=tuple(inputs[0].phases),
        names=tuple(inputs[0].names),
        activities=ordered.activities,
        edges=ordered.edges,
        boundaries=tuple(boundaries),
        clocks_ns=tuple(one.clock_ns for one in inputs),
        contradicted=ordered.contradicted,
        seen=ordered.seen,
        limits=tuple(limits),
        core_wait_ns=tuple(_read_core_wait(one.trace) for one in inputs),
    )


def _build_empty_graph() -> Graph:
    """Build the graph of no rank, which has neither activities nor steps."""
    ordered = put_in_order(Parts())
    return Graph(
        lanes=(),
        phases=(),
        names=(),
        activities=ordered.activities,
        edges=ordered.edges,
        boundaries=(),
    )


def _prepare(ranks: Sequence[tuple[Trace, Placing]]) -> tuple[list[RankInput], list[Group], list[str]]:
    """Collect the collectives of all ranks, match them, and end them when they were through.

    Returns:
        What the graph takes of each rank, groups of collectives that belong together, and what is not known.
    """
    sizes = [trace.world_size or 0 for trace, _ in ranks]
    world_size = max(sizes, default=0) or None
    placings = [placing for _, placing in ranks]
    calls = []
    traces = []
    for trace, placing in ranks:
        recorded = collect_calls(trace, placing, world_size)
        trimmed, of_rank = trim_late_ends(trace, placing, recorded)
        traces.append(trimmed)
        calls.append(of_rank)
    groups, clocks_ns, limits = _match_ranks(ranks, calls)
    meetings = find_meetings(calls, groups, clocks_ns)
    met = find_last_arrivals(meetings, len(ranks), calls)
    asked = []
    for at, placing in enumerate(placings):
        met_ns = met[at] - clocks_ns[at]
        traces[at], calls[at], asked_ns = trim_unawaited_ends(traces[at], placing, calls[at], met_ns)
        asked.append(asked_ns)
    inputs = _make_inputs(traces, placings, calls, clocks_ns, asked)
    return inputs, groups, limits


def _read_core_wait(trace: Trace) -> float:
    """Read for how long the main thread of a recorded step was ready and had no core, ns; 0 where that is not known."""
    if trace.cores is None or trace.cores.wait_ms is None:
        return 0.0
    return trace.cores.wait_ms * 1e6


def _make_inputs(
    traces: Sequence[Trace],
    placings: Sequence[Placing],
    calls: Sequence[Calls],
    clocks_ns: Sequence[int],
    asked_ns: Sequence[Integers],
) -> list[RankInput]:
    """Make what the graph takes of each rank.

    Args:
        traces: of each rank, without late ends of collectives.
        placings: where their events belong.
        calls: their collectives.
        clocks_ns: what to add to each rank's times.
        asked_ns: by collective, when the host asked for what was there; -1: it waited.
    """
    phases: Numbered[str] = Numbered()
    names: Numbered[str] = Numbered()
    firsts = _number_first_steps(placings)
    inputs = []
    for at, (trace, placing) in enumerate(zip(traces, placings)):
        lead_ns = measure_device_lead(trace, placing)
        one = RankInput(
            at=at,
            trace=move_device(trace, lead_ns),
            placing=placing,
            device_lead_ns=lead_ns,
            calls=calls[at],
            asked_ns=asked_ns[at],
            clock_ns=clocks_ns[at],
            first_step=firsts[at],
            phases=phases,
            names=names,
        )
        inputs.append(one)
    return inputs


def _match_ranks(
    ranks: Sequence[tuple[Trace, Placing]],
    calls: Sequence[Calls],
) -> tuple[list[Group], list[int], list[str]]:
    """Match the collectives of all ranks, and bring their clocks to one.

    Returns:
        Groups of collectives that belong together, what to add to each rank's times, and what is not known.
    """
    traces = [trace for trace, _ in ranks]
    if len(traces) < 2:
        limits = []
        # a file that does not say how many ranks there are, such as Perfetto's packets, may be of one of many
        if traces[0].world_size != 1 and len(calls[0]):
            limits.append("only one rank's trace is read: how long it waits for others is not known")
        return [], [0], limits
    bases = [trace.base_ns for trace in traces]
    hosts = [str(trace.facts.get("host_name") or "") for trace in traces]
    slots_of_steps, _ = find_shared_steps([placing for _, placing in ranks])
    slots = []
    for slot, of_rank in zip(slots_of_steps, calls):
        slot_of_step = np.append(slot, -1)
        slots.append(slot_of_step[of_rank.step])
    groups, notes = match(calls, slots, bases)
    clocks = align_clocks(calls, groups, bases, hosts)
    if clocks.aligned is None:
        return [], list(clocks.start_ns), [*notes, "the ranks' clocks are not known to be one"]
    return groups, list(clocks.start_ns), notes


def _number_first_steps(placings: Sequence[Placing]) -> list[int]:
    """Number the first step of each rank, so that a number is the same step on all ranks."""
    firsts = [placing.steps[0].number if placing.steps else None for placing in placings]
    known = [first for first in firsts if first is not None]
    if len(known) < len(firsts):
        return [0] * len(firsts)
    return [first - min(known) for first in known]


def _add_rank(
    parts: Parts,
    one: RankInput,
    last_arrival_ns: Integers,
) -> RankWork:
    """Add all of a rank but what it shares with others.

    Args:
        parts: all activities and edges; they grow.
        one: the rank.
        last_arrival_ns: by collective, when the last rank came; -1: not known.
    """
    work = add_work(parts, one, last_arrival_ns)
    syncs, awaited = choose_explained_syncs(one, work)
    of_backend, awaited_calls = _find_backend_waits(one)
    loading = find_loader_waits(one)
    threads = find_host_threads(one)
    handovers = find_handovers(one, threads)
    waits = HostWaits.join([handovers.list_waits(), syncs, of_backend, loading])
    hosts = add_host_lanes(parts, one, threads, waits, handovers)
    connect_handovers(parts, hosts, handovers)
    connect_launches(parts, one, work, hosts)
    connect_events(parts, one, work)
    _resume(parts, hosts, syncs, work.activities.finish[awaited], EdgeKind.SYNC)
    _resume(parts, hosts, of_backend, work.of_calls.finish[awaited_calls], EdgeKind.WAIT)
    _connect_asked(parts, one, hosts, work)
    add_workers(parts, one, hosts, loading)
    return work


def _resume(
    parts: Parts,
    hosts: HostLanes,
    waits: HostWaits,
    awaited: Integers,
    kind: EdgeKind,
) -> None:
    """Let threads go on after what they waited for."""
    resumed = hosts.starting_at(waits.thread, waits.end_ns)
    parts.connect(awaited, resumed, kind)


def _connect_asked(
    parts: Parts,
    one: RankInput,
    hosts: HostLanes,
    work: RankWork,
) -> None:
    """Let the main thread wait for what it asked for, although it was there already.

    Args:
        parts: all activities and edges; they grow.
        one: the rank.
        hosts: its threads.
        work: what its backend does.
    """
    asked = np.flatnonzero(one.asked_ns >= 0)
    main = np.full(len(asked), one.placing.main_thread)
    goes_on = hosts.starting_at(main, one.asked_ns[asked])
    parts.connect(work.of_calls.finish[asked], goes_on, EdgeKind.WAIT)


def _find_backend_waits(one: RankInput) -> tuple[HostWaits, Integers]:
    """Find when the main thread waits for a collective of a backend's thread, without a device.

    No operator works while a collective is under way, until the last one that ends meanwhile.

    Returns:
        The waits, and for which of the rank's collectives: int64 [w].
    """
    none = np.empty(0, np.int64)
    if one.on_gpu or not len(one.calls) or not any(step.steady for step in one.placing.steps):
        return HostWaits(none, none, none, none), none
    waiting = find_host_rows(one.trace, one.placing)["exposed_communication"]
    order = np.argsort(one.calls.end_ns, kind="stable")
    order = order[one.asked_ns[order] < 0]
    if not len(order):
        return HostWaits(none, none, none, none), none
    ends_ns = one.calls.end_ns[order]
    last = np.searchsorted(ends_ns, waiting.end, side="right") - 1
    resumed_ns = ends_ns[np.maximum(last, 0)]
    is_wait = (last >= 0) & (resumed_ns > waiting.start)
    start_ns = waiting.start[is_wait]
    waits = HostWaits(
        thread=np.full(len(start_ns), one.placing.main_thread),
        start_ns=start_ns,
        end_ns=resumed_ns[is_wait],
        base_ns=np.zeros(len(start_ns), np.int64),
    )
    return waits, order[last[is_wait]]


def _find_boundary(
    one: RankInput,
    parts: Parts,
    ordered: Ordered,
) -> Boundary:
    """Find where the steps of a rank end."""
    activities = ordered.activities
    name = f"thread {one.placing.main_thread}"
    if one.on_gpu:
        device, stream = find_computing_stream(one.trace)
        name = f"GPU {device} stream {stream}"
    lanes = [at for at, lane in enumerate(parts.lanes) if lane == Lane(one.at, name)]
    mine = np.flatnonzero(np.isin(activities.lane, lanes))
    ends_ns = activities.end_ns[mine] - one.clock_ns + one.device_lead_ns
    ends = {}
    steady = []
    for number, step in enumerate(one.placing.steps, one.first_step):
        at = np.flatnonzero(ends_ns == step.end_ns)
        if len(at):
            ends[number] = int(mine[at[0]])
        if step.steady:
            steady.append(number)
    return Boundary(
        rank=one.at,
        ends=ends,
        start_ns=one.first_steady_ns + one.clock_ns,
        steady=tuple(steady),
        on_device=one.on_gpu,
    )
