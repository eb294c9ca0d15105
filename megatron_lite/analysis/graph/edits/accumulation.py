"""Gradients that are summed over ranks once per step instead of once per micro-batch."""

import numpy as np

from megatron_lite.analysis.graph.edits.change import drop_delays, drop_edges, find_arrivals, set_work
from megatron_lite.analysis.graph.edits.cores import give_back_cores
from megatron_lite.analysis.graph.graph import ActivityKind, EdgeKind, Graph
from megatron_lite.analysis.intervals import Integers
from megatron_lite.phases import Phase

SUMMED_IN = (Phase.BACKWARD.value, Phase.GRAD_SYNC.value)


def sum_gradients_once(graph: Graph, micro_batches: int) -> Graph:
    """Leave out the sums of gradients of all micro-batches but the last; ranks do not wait for each other in them.

    What the host does to hand them over stays.

    Args:
        graph: the graph.
        micro_batches: how many backward passes a step has, each of which sums all gradients.
    """
    sums = _find_early_sums(graph, micro_batches)
    parts = np.union1d(sums, find_arrivals(graph, sums))
    graph = give_back_cores(graph, sums)
    graph = drop_delays(set_work(graph, parts, 0), parts)
    meetings = graph.find_edges(EdgeKind.MEETING)
    is_early = np.isin(graph.edges.target[meetings], sums)
    return drop_edges(graph, meetings[is_early])


def _find_early_sums(graph: Graph, micro_batches: int) -> Integers:
    """Find the transfers of sums of gradients before the last micro-batch, in order."""
    in_phases = np.zeros(len(graph.activities), bool)
    for phase in SUMMED_IN:
        in_phases |= graph.find_phase(phase)
    sums = np.flatnonzero(in_phases & graph.find_kind(ActivityKind.TRANSFER))
    rank = graph.rank[sums].astype(np.int64)
    step = graph.activities.step[sums].astype(np.int64)
    keys = np.stack([rank, step])
    found, group = np.unique(keys, axis=1, return_inverse=True)
    early = [sums[:0]]
    for number in range(found.shape[1]):
        is_mine = group.ravel() == number
        mine = sums[is_mine]
        kept = len(mine) // micro_batches
        early.append(mine[: len(mine) - kept])
    return np.sort(np.concatenate(early))
