"""Backward that finds all activations kept, instead of computing forward once more."""

import numpy as np

from megatron_lite.analysis.graph.edits.change import leave_out_part
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.intervals import Flags


def find_recomputed(graph: Graph) -> Flags:
    """Tell for each activity (bool [n]) whether it computes forward once more, in whole or in part."""
    found: Flags = graph.activities.again_ns > 0
    return found


def drop_recomputation(graph: Graph) -> Graph:
    """Leave out what backward computes of forward once more. Memory then holds what was not kept before.

    Args:
        graph: the graph; without recomputation in its trace it stays as it is.
    """
    numbers = np.flatnonzero(find_recomputed(graph))
    return leave_out_part(graph, numbers, graph.activities.again_ns[numbers])
