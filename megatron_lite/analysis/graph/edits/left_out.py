"""Work that a step does without."""

from collections.abc import Collection

from megatron_lite.analysis.graph.edits.change import drop_delays, set_work
from megatron_lite.analysis.graph.edits.syncs import drop_syncs_in
from megatron_lite.analysis.graph.graph import ON_DEVICE, ON_HOST, Graph


def leave_out_phases(graph: Graph, phases: Collection[str]) -> Graph:
    """Let steps do without what the host and the device do in phases, synchronizations included.

    Args:
        graph: the graph.
        phases: their names.
    """
    graph = drop_syncs_in(graph, phases)
    left_out = graph.find_phase(*phases) & graph.find_kind(*ON_HOST, *ON_DEVICE)
    return drop_delays(set_work(graph, left_out, 0), left_out)
