"""Stages of a pipeline with other numbers of layers."""

from collections.abc import Sequence

import numpy as np

from megatron_lite.analysis.graph.edits.change import scale_work
from megatron_lite.analysis.graph.graph import ON_DEVICE, ActivityKind, Graph
from megatron_lite.analysis.graph.replay import find_window
from megatron_lite.phases import Phase

COMPUTED_IN = (Phase.FORWARD.value, Phase.BACKWARD.value)


def move_layers(
    graph: Graph,
    layers: Sequence[int],
    wanted: Sequence[int],
) -> Graph:
    """Move layers between the stages of a pipeline.

    A layer takes what it takes on the rank with most layers, whose other work counts as theirs; a rank gains or loses
    as much for each layer. What is sent between stages stays as it is.

    Args:
        graph: the graph of all ranks of a pipeline.
        layers: of each rank of the graph, as measured.
        wanted: of each rank, afterwards; as many in all.
    """
    window = find_window(graph)
    if window is None or len(layers) != len(graph.boundaries):
        return graph
    works = graph.find_kind(ActivityKind.OPERATOR, ActivityKind.PYTHON, *ON_DEVICE)
    inside = window.find_inside(graph)
    most = int(np.argmax(layers))
    work_ns = graph.activities.work_ns
    for phase in COMPUTED_IN:
        computes = works & inside & graph.find_phase(phase)
        sums_ns = np.bincount(graph.rank[computes], work_ns[computes], minlength=len(layers))
        layer_ns = sums_ns[most] / max(layers[most], 1)
        for rank, has in enumerate(layers):
            more = wanted[rank] - has
            changed_ns = max(sums_ns[rank] + more * layer_ns, 0.0)
            factor = changed_ns / max(sums_ns[rank], 1.0)
            is_mine = computes & (graph.rank == rank)
            graph = scale_work(graph, is_mine, factor)
    return graph
