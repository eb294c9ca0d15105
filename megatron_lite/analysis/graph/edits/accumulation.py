"""Gradients that are summed over ranks once per step instead of once per micro-batch."""

import numpy as np

from megatron_lite.analysis.graph.edits.transfers import find_gradient_sums, leave_out_transfers, list_by_step
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.intervals import Integers


def sum_gradients_once(graph: Graph, micro_batches: int) -> Graph:
    """Leave out the sums of gradients of all micro-batches but the last; ranks do not wait for each other in them.

    What the host does to hand them over stays.

    Args:
        graph: the graph.
        micro_batches: how many backward passes a step has, each of which sums all gradients.
    """
    return leave_out_transfers(graph, _find_early_sums(graph, micro_batches))


def _find_early_sums(graph: Graph, micro_batches: int) -> Integers:
    """Find the transfers of sums of gradients before the last micro-batch, in order."""
    early: list[Integers] = [np.empty(0, np.int64)]
    for sums in list_by_step(graph, find_gradient_sums(graph)):
        kept = len(sums) // micro_batches
        early.append(sums[: len(sums) - kept])
    return np.sort(np.concatenate(early))
