"""Collectives over another link."""

import numpy as np

from megatron_lite.analysis.graph.edits.change import scale_work
from megatron_lite.analysis.graph.graph import ActivityKind, Graph
from megatron_lite.analysis.intervals import Flags


def change_link(
    graph: Graph,
    factor: float,
    chosen: Flags | None = None,
) -> Graph:
    """Let collectives be transferred so many times as fast, once all ranks have come.

    Of ranks that were not recorded or matched, a collective's time contains waits for others: then this is the most
    that another link can give.

    Args:
        graph: the graph.
        factor: 2 for twice the bandwidth; latency counts as bandwidth.
        chosen: [n], which activities; None: all collectives.
    """
    transfers = graph.find_kind(ActivityKind.TRANSFER)
    if chosen is not None:
        transfers = np.logical_and(transfers, chosen)
    return scale_work(graph, transfers, 1 / factor)
