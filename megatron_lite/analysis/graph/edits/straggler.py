"""A rank for which the others wait, at the pace of the others."""

import numpy as np

from megatron_lite.analysis.graph.edits.change import set_work
from megatron_lite.analysis.graph.graph import ON_DEVICE, ON_HOST, Graph
from megatron_lite.analysis.graph.replay import find_window
from megatron_lite.analysis.intervals import Numbers


def level_rank(graph: Graph, late: int) -> Graph:
    """Let a rank take no longer than the median of the others for each kind of work of each phase.

    Args:
        graph: the graph of two ranks or more.
        late: the rank's place among those of the graph.
    """
    window = find_window(graph)
    ranks = len(graph.boundaries)
    if window is None or ranks < 2:
        return graph
    is_own = graph.find_kind(*ON_HOST, *ON_DEVICE)
    own = window.places[is_own[window.places]]
    kind = graph.activities.kind[own].astype(np.int64)
    phase = graph.activities.phase[own].astype(np.int64)
    keys = np.stack([kind, phase])
    found, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.ravel()
    place = (group, graph.rank[own])
    sums_ns = np.zeros((found.shape[1], ranks))
    np.add.at(sums_ns, place, graph.activities.work_ns[own])
    factors = _compare(sums_ns, late)
    of_late = graph.rank[own] == late
    chosen = own[of_late]
    factor = factors[group[of_late]]
    paced_ns = graph.activities.work_ns[chosen] * factor
    return set_work(graph, chosen, np.rint(paced_ns))


def _compare(sums_ns: Numbers, late: int) -> Numbers:
    """Compute by which factor a rank's work shrinks at the pace of the others' median: float64 [groups], at most 1.

    Args:
        sums_ns: [groups, ranks], work of each kind.
        late: the rank.
    """
    own_ns = sums_ns[:, late]
    others_ns = np.median(np.delete(sums_ns, late, axis=1), axis=1)
    ratios = others_ns / np.maximum(own_ns, 1)
    return np.minimum(ratios, 1.0)
