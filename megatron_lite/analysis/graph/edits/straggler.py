"""Ranks for which the others wait, at the pace of the others: always the same one, or whichever is late in a step."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.graph.edits.change import set_work
from megatron_lite.analysis.graph.graph import ON_DEVICE, ON_HOST, ActivityKind, Graph
from megatron_lite.analysis.graph.replay import find_window
from megatron_lite.analysis.intervals import Integers, Numbers

MIN_LATE_WORK = 0.05  # of a rank's work in a step: less is no lateness


def level_rank(graph: Graph, late: int) -> Graph:
    """Let a rank take no longer than the median of the others for each kind of work of each phase.

    Args:
        graph: the graph of two ranks or more.
        late: the rank's place among those of the graph.
    """
    window = find_window(graph)
    if window is None or len(graph.boundaries) < 2:
        return graph
    return _level(graph, _sum_works(graph, window.places), late)


def level_late_steps(graph: Graph, ranks: Collection[int]) -> Graph:
    """Let ranks take no longer than the median of the others in the steps in which they are late.

    Late is the rank that works longest in a step, if it is by more than a twentieth of the step; as in level_rank, each
    kind of work of each phase is compared.

    Args:
        graph: the graph of two ranks or more.
        ranks: places of those that may be late.
    """
    window = find_window(graph)
    if window is None or len(graph.boundaries) < 2:
        return graph
    for step in range(window.first, window.last + 1):
        works = _sum_works(graph, window.places[graph.activities.step[window.places] == step])
        by_rank_ns = works.sums_ns.sum(axis=0)
        late = int(by_rank_ns.argmax())
        later_ns = by_rank_ns[late] - np.median(np.delete(by_rank_ns, late))
        if late in ranks and later_ns > MIN_LATE_WORK * by_rank_ns[late]:
            graph = _level(graph, works, late)
    return graph


@dataclass(frozen=True)
class _Works:
    """Work of some activities by rank and group: of one kind, in one phase."""

    own: Integers  # [k], the activities
    group: Integers  # [k]
    sums_ns: Numbers  # [groups, ranks]


def _sum_works(graph: Graph, places: Integers) -> _Works:
    """Sum what hosts, loaders' workers and devices do themselves.

    Args:
        graph: the graph.
        places: activities.
    """
    is_own = graph.find_kind(*ON_HOST, *ON_DEVICE, ActivityKind.WORKER)
    own = places[is_own[places]]
    kind = graph.activities.kind[own].astype(np.int64)
    phase = graph.activities.phase[own].astype(np.int64)
    keys = np.stack([kind, phase])
    found, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.ravel()
    place = (group, graph.rank[own])
    sums_ns = np.zeros((found.shape[1], len(graph.boundaries)))
    np.add.at(sums_ns, place, graph.activities.work_ns[own])
    return _Works(own, group, sums_ns)


def _level(graph: Graph, works: _Works, late: int) -> Graph:
    """Let a rank take no longer than the median of the others for each group of its work."""
    factors = _compare(works.sums_ns, late)
    of_late = graph.rank[works.own] == late
    chosen = works.own[of_late]
    factor = factors[works.group[of_late]]
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
