"""Transfers of collectives: those that sum gradients, and steps that do without some."""

from collections.abc import Iterator

import numpy as np

from megatron_lite.analysis.graph.edits.change import drop_delays, drop_edges, find_arrivals, set_work
from megatron_lite.analysis.graph.edits.cores import give_back_cores
from megatron_lite.analysis.graph.graph import ActivityKind, EdgeKind, Graph
from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.phases import Phase

SUMMED_IN = (Phase.BACKWARD.value, Phase.GRAD_SYNC.value)  # phases whose collectives sum gradients


def find_gradient_sums(graph: Graph) -> Flags:
    """Tell for each activity (bool [n]) whether it transfers a sum of gradients."""
    return np.logical_and(graph.find_phase(*SUMMED_IN), graph.find_kind(ActivityKind.TRANSFER))


def list_by_step(graph: Graph, chosen: Flags) -> Iterator[Integers]:
    """List the chosen activities of each rank and step, in their order."""
    numbers = np.flatnonzero(chosen)
    keys = np.stack([graph.rank[numbers], graph.activities.step[numbers]])
    _, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.ravel()
    for number in range(int(group.max(initial=-1)) + 1):
        is_mine = group == number
        yield numbers[is_mine]


def leave_out_transfers(graph: Graph, transfers: Integers) -> Graph:
    """Leave out transfers, their arrivals, and the calls that hand them over; ranks do not wait for each other in them.

    On a machine without a device the main threads get the cores back that the transfers took.

    Args:
        graph: the graph.
        transfers: numbers of activities, in order.
    """
    arrivals = find_arrivals(graph, transfers)
    parts = np.union1d(transfers, arrivals)
    calls = _find_calls(graph, arrivals)
    graph = give_back_cores(graph, transfers)
    graph = drop_delays(set_work(graph, parts, 0), parts)
    graph = set_work(graph, calls, 0)
    meetings = graph.find_edges(EdgeKind.MEETING)
    is_left_out = np.isin(graph.edges.target[meetings], transfers)
    return drop_edges(graph, meetings[is_left_out])


def _find_calls(graph: Graph, arrivals: Integers) -> Integers:
    """Find what a thread does to hand collectives over to a backend: int64, at most one for each.

    Args:
        graph: the graph.
        arrivals: the first activity of each.
    """
    edges = graph.edges
    calls = graph.find_edges(EdgeKind.CALL)
    is_meant = np.isin(edges.target[calls], arrivals)
    before = edges.source[calls[is_meant]]
    orders = graph.find_edges(EdgeKind.THREAD)
    follows = np.isin(edges.source[orders], before)
    handing_over = edges.target[orders[follows]].astype(np.int64)
    is_operator = graph.find_kind(ActivityKind.OPERATOR)[handing_over]
    return handing_over[is_operator]
