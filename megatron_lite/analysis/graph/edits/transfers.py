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
    """List the chosen transfers of each rank and step, in their order."""
    transfers = np.flatnonzero(chosen)
    keys = np.stack([graph.rank[transfers], graph.activities.step[transfers]])
    _, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.ravel()
    for number in range(int(group.max(initial=-1)) + 1):
        is_mine = group == number
        yield transfers[is_mine]


def leave_out_transfers(graph: Graph, transfers: Integers) -> Graph:
    """Leave out transfers and their arrivals; ranks do not wait for each other in them.

    What the host does to hand them over stays. On a machine without a device the main threads get the cores back that
    the transfers took.

    Args:
        graph: the graph.
        transfers: numbers of activities, in order.
    """
    parts = np.union1d(transfers, find_arrivals(graph, transfers))
    graph = give_back_cores(graph, transfers)
    graph = drop_delays(set_work(graph, parts, 0), parts)
    meetings = graph.find_edges(EdgeKind.MEETING)
    is_left_out = np.isin(graph.edges.target[meetings], transfers)
    return drop_edges(graph, meetings[is_left_out])
