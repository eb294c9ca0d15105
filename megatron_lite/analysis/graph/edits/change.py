"""Changes of which edits of a graph are made. Activities keep their numbers, so that edits can follow each other."""

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from megatron_lite.analysis.graph.graph import ActivityKind, EdgeKind, Edges, Graph
from megatron_lite.analysis.graph.replay import find_window
from megatron_lite.analysis.intervals import Flags, Integers


def set_work(
    graph: Graph,
    chosen: Flags | Integers,
    work_ns: ArrayLike,
) -> Graph:
    """Let activities take other times.

    Args:
        graph: the graph.
        chosen: the activities, as numbers or a flag for each.
        work_ns: [chosen], or one for all.
    """
    works_ns = graph.activities.work_ns.copy()
    works_ns[chosen] = np.maximum(np.asarray(work_ns, np.int64), 0)
    return replace(graph, activities=replace(graph.activities, work_ns=works_ns))


def scale_work(
    graph: Graph,
    chosen: Flags | Integers,
    factor: float,
) -> Graph:
    """Let activities take a multiple of their times.

    Args:
        graph: the graph.
        chosen: the activities, as numbers or a flag for each.
        factor: 0.5 for half of the time.
    """
    scaled_ns = graph.activities.work_ns[chosen] * factor
    return set_work(graph, chosen, np.rint(scaled_ns))


def leave_out_part(
    graph: Graph,
    chosen: Integers,
    part_ns: Integers,
) -> Graph:
    """Let activities take what is left of them without a part; one of which nothing is left begins without delay.

    Args:
        graph: the graph.
        chosen: [k], numbers of activities.
        part_ns: [k], the part of each, measured.
    """
    activities = graph.activities
    measured_ns = activities.end_ns[chosen] - activities.start_ns[chosen]
    kept = 1 - part_ns / np.maximum(measured_ns, 1)
    work_ns = np.rint(activities.work_ns[chosen] * kept)
    graph = set_work(graph, chosen, work_ns)
    return drop_delays(graph, chosen[part_ns == measured_ns])


def drop_delays(graph: Graph, chosen: Flags | Integers) -> Graph:
    """Let activities begin as soon as what they wait for has ended."""
    delay_ns = graph.activities.delay_ns.copy()
    delay_ns[chosen] = 0
    return replace(graph, activities=replace(graph.activities, delay_ns=delay_ns))


def set_lags(
    graph: Graph,
    edges: Integers,
    lag_ns: int,
) -> Graph:
    """Give edges another lag.

    Args:
        graph: the graph.
        edges: numbers of edges.
        lag_ns: from the end of their sources to the start of their targets.
    """
    lags_ns = graph.edges.lag_ns.copy()
    lags_ns[edges] = lag_ns
    return replace(graph, edges=replace(graph.edges, lag_ns=lags_ns))


def drop_edges(graph: Graph, edges: Integers) -> Graph:
    """Leave edges of these numbers out."""
    is_kept = np.ones(len(graph.edges), bool)
    is_kept[edges] = False
    return replace(graph, edges=_choose(graph.edges, np.flatnonzero(is_kept)))


def add_edges(
    graph: Graph,
    source: Integers,
    target: Integers,
    kind: EdgeKind,
    lag_ns: ArrayLike = 0,
) -> Graph:
    """Let activities wait for others.

    Args:
        graph: the graph.
        source: [k]; one that does not stand before its target is left out.
        target: [k].
        kind: why they wait.
        lag_ns: [k] or one for all, from the end of the source to the start of the target.
    """
    is_possible = source < target
    lags_ns = np.broadcast_to(np.asarray(lag_ns, np.int64), len(source))[is_possible]
    source = source[is_possible]
    target = target[is_possible]
    edges = graph.edges
    joined = Edges(
        source=np.concatenate([edges.source, source]).astype(np.int32),
        target=np.concatenate([edges.target, target]).astype(np.int32),
        kind=np.concatenate([edges.kind, np.full(len(source), kind)]).astype(np.uint8),
        lag_ns=np.concatenate([edges.lag_ns, lags_ns]),
    )
    order = np.argsort(joined.target, kind="stable")
    return replace(graph, edges=_choose(joined, order))


def _choose(edges: Edges, numbers: Integers) -> Edges:
    """Choose edges by number."""
    return Edges(
        source=edges.source[numbers],
        target=edges.target[numbers],
        kind=edges.kind[numbers],
        lag_ns=edges.lag_ns[numbers],
    )


def find_firsts(graph: Graph, numbers: Integers, *more: Integers) -> Flags:
    """Tell for each of some activities whether it is the first of its rank and step: bool [k].

    Args:
        graph: the graph.
        numbers: [k], activities in order.
        more: [k] each, what else has to be the same.
    """
    rank = graph.rank[numbers].astype(np.int64)
    step = graph.activities.step[numbers].astype(np.int64)
    keys = np.stack([rank, step, *more])
    _, first = np.unique(keys, axis=1, return_index=True)
    is_first = np.zeros(len(numbers), bool)
    is_first[first] = True
    return is_first


def find_before(graph: Graph) -> Integers:
    """Find what stands before each activity on its stream or backend's thread: int64 [n]; -1: nothing."""
    orders = graph.find_edges(EdgeKind.STREAM)
    before = np.full(len(graph.activities), -1, np.int64)
    target = graph.edges.target[orders]
    before[target] = graph.edges.source[orders]
    return before


def find_arrivals(graph: Graph, transfers: Integers) -> Integers:
    """Find the arrival of each transfer, int64 [k]; the transfer itself where ranks are not matched."""
    before = find_before(graph)[transfers]
    is_arrival = graph.activities.kind[before] == ActivityKind.ARRIVAL
    return np.where((before >= 0) & is_arrival, before, transfers)


def raise_floor(graph: Graph, floor_ns: float) -> Graph:
    """Let no step take less than so many ns, for work that is moved to where the graph has no activities."""
    return replace(graph, floor_ns=max(graph.floor_ns, floor_ns))


def measure_most_per_step(graph: Graph, chosen: Flags) -> float:
    """Measure the work of the chosen activities in the mean steady step, of the rank that has most of it, ns."""
    window = find_window(graph)
    if window is None:
        return 0.0
    numbers = window.places[chosen[window.places]]
    rank = graph.rank[numbers]
    work_ns = graph.activities.work_ns[numbers]
    sums_ns = np.bincount(rank, work_ns, minlength=len(graph.boundaries))
    return float(sums_ns.max()) / window.steps
