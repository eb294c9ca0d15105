"""Work that a step does without."""

from collections.abc import Collection

import numpy as np

from megatron_lite.analysis.graph.edits.change import drop_delays, set_work
from megatron_lite.analysis.graph.edits.syncs import drop_syncs_in
from megatron_lite.analysis.graph.graph import ON_DEVICE, ON_HOST, Graph
from megatron_lite.analysis.intervals import Integers


def leave_out_phases(graph: Graph, phases: Collection[str]) -> Graph:
    """Let steps do without what the host and the device do in phases, synchronizations included.

    Args:
        graph: the graph.
        phases: their names.
    """
    graph = drop_syncs_in(graph, phases)
    left_out = graph.find_phase(*phases) & graph.find_kind(*ON_HOST, *ON_DEVICE)
    return drop_delays(set_work(graph, left_out, 0), left_out)


def leave_out_named(graph: Graph, cause: str) -> Graph:
    """Let the host do without what names tell of a cause, such as collecting garbage.

    Where it waits for the device meanwhile, it still waits.

    Args:
        graph: the graph.
        cause: one of CAUSES.
    """
    return set_work(graph, graph.find_cause(cause), 0)


def leave_out_work(graph: Graph, rank: int, rows: Integers) -> Graph:
    """Let a device do without some work.

    Args:
        graph: the graph.
        rank: the place of the rank.
        rows: of its trace.
    """
    of_rank = graph.find_kind(*ON_DEVICE) & (graph.rank == rank)
    left_out = of_rank & np.isin(graph.activities.row, rows)
    return drop_delays(set_work(graph, left_out, 0), left_out)
