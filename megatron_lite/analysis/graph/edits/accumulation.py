"""Gradients that are summed over ranks once per step instead of once per micro-batch."""

import numpy as np

from megatron_lite.analysis.graph.edits.change import leave_out_part
from megatron_lite.analysis.graph.edits.transfers import find_gradient_sums, leave_out_transfers, list_by_step
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.intervals import Flags, Integers


def sum_gradients_once(graph: Graph, micro_batches: int) -> Graph:
    """Leave out the sums of gradients of all micro-batches but the last, with the moves into buckets and back.

    Ranks do not wait for each other in what is left out.

    Args:
        graph: the graph.
        micro_batches: how many backward passes a step has, each of which sums all gradients.
    """
    sums = _find_early(graph, find_gradient_sums(graph), micro_batches)
    moves = _find_early(graph, graph.activities.bucket_ns > 0, micro_batches)
    graph = leave_out_part(graph, moves, graph.activities.bucket_ns[moves])
    return leave_out_transfers(graph, sums)


def _find_early(
    graph: Graph,
    chosen: Flags,
    micro_batches: int,
) -> Integers:
    """Find those of the chosen activities that belong to micro-batches before the last, in order.

    Args:
        graph: the graph.
        chosen: [n], activities of which each micro-batch has as many.
        micro_batches: of a step.
    """
    early: list[Integers] = [np.empty(0, np.int64)]
    for numbers in list_by_step(graph, chosen):
        kept = len(numbers) // micro_batches
        early.append(numbers[: len(numbers) - kept])
    return np.sort(np.concatenate(early))
