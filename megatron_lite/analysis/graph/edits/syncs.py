"""Steps without synchronizations of the host with the device."""

from collections.abc import Collection, Sequence

import numpy as np

from megatron_lite.analysis.graph.edits.change import drop_delays, drop_edges, set_lags
from megatron_lite.analysis.graph.graph import EdgeKind, Graph
from megatron_lite.analysis.intervals import Flags, Integers


def find_resumed(graph: Graph) -> Flags:
    """Tell for each activity (bool [n]) whether it goes on after a synchronization."""
    found = np.zeros(len(graph.activities), bool)
    found[graph.edges.target[graph.find_edges(EdgeKind.SYNC)]] = True
    return found


def drop_syncs(graph: Graph, resumed: Flags) -> Graph:
    """Leave synchronizations out, and what the calls themselves take.

    Args:
        graph: the graph.
        resumed: [n], the activities that go on after them.
    """
    syncs = graph.find_edges(EdgeKind.SYNC)
    dropped = syncs[resumed[graph.edges.target[syncs]]]
    goes_on = np.zeros(len(graph.activities), bool)
    goes_on[graph.edges.target[dropped]] = True
    orders = graph.find_edges(EdgeKind.THREAD)
    around = orders[goes_on[graph.edges.target[orders]]]
    graph = set_lags(graph, around, 0)
    return drop_edges(drop_delays(graph, goes_on), dropped)


def drop_syncs_of(
    graph: Graph,
    operators: Collection[str],
    phases: Collection[str],
    left_out: Collection[str] = (),
) -> Graph:
    """Leave out the synchronizations in operators, and of phases those that lie in no operator.

    Args:
        graph: the graph.
        operators: names of the outermost operators.
        phases: names; "" for what is in none.
        left_out: names of phases whose synchronizations stay.
    """
    resumed = find_resumed(graph) & ~graph.find_phase(*left_out)
    is_outside = graph.find_phase(*phases) & (graph.activities.name < 0)
    return drop_syncs(graph, resumed & (graph.find_name(*operators) | is_outside))


def drop_syncs_ending(graph: Graph, ends_ns: Sequence[Integers]) -> Graph:
    """Leave out the synchronizations that end at some moments, and what the calls themselves take.

    Args:
        graph: the graph.
        ends_ns: of each rank, when calls in which its host waits end, on the clock of its trace.
    """
    starts_ns = graph.activities.start_ns
    is_meant = np.zeros(len(graph.activities), bool)
    for rank, (ends, clock_ns) in enumerate(zip(ends_ns, graph.clocks_ns)):
        is_meant |= (graph.rank == rank) & np.isin(starts_ns, ends + clock_ns)
    return drop_syncs(graph, is_meant & find_resumed(graph))


def drop_syncs_in(graph: Graph, phases: Collection[str]) -> Graph:
    """Leave out the synchronizations of phases, and what the calls themselves take.

    Args:
        graph: the graph.
        phases: their names; "" for what is in none.
    """
    resumed = find_resumed(graph)
    return drop_syncs(graph, resumed & graph.find_phase(*phases))
