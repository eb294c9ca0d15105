"""Collectives that run beside the computing instead of before what follows."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.graph.edits.change import add_edges, drop_edges, find_arrivals, find_before, find_firsts
from megatron_lite.analysis.graph.graph import ON_DEVICE, ON_HOST, ActivityKind, EdgeKind, Graph
from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.phases import Phase

LATE_PHASES = (Phase.UNSCALE.value, Phase.CLIP_GRAD.value, Phase.OPTIMIZER_STEP.value)
LEFT = (EdgeKind.STREAM, EdgeKind.EVENT, EdgeKind.SYNC, EdgeKind.WAIT)


def overlap_collectives(graph: Graph, chosen: Flags) -> Graph:
    """Let collectives run on a stream of their own, one after the other, and only the update wait for them.

    Each still waits for what stood before it. What followed it goes on with that, unless it belongs to the update or to
    clipping. Computing beside a collective is not slowed down, although both share the device's memory and cores.

    Args:
        graph: a graph whose phases name the update.
        chosen: [n], transfers of collectives of gradients.
    """
    late = graph.find_phase(*LATE_PHASES)
    transfers = np.flatnonzero(chosen & graph.find_kind(ActivityKind.TRANSFER))
    updates = _find_updates(graph, late)
    if not len(transfers) or not len(updates):
        return graph
    moved = _find_moved(graph, transfers)
    is_last = np.zeros(len(graph.activities), bool)
    is_last[moved.last] = True
    edges = graph.edges
    leaving = graph.find_edges(*LEFT)
    is_of_moved = is_last[edges.source[leaving]]
    is_for_update = late[edges.target[leaving]]
    leaving = leaving[is_of_moved & ~is_for_update]
    followers = _find_followers(graph, leaving, moved)
    graph = drop_edges(graph, leaving)
    graph = add_edges(graph, followers.before, followers.after, EdgeKind.STREAM)
    graph = _chain(graph, moved)
    return _let_updates_wait(graph, moved, updates)


@dataclass(frozen=True)
class _Moved:
    """Collectives that are moved, k in order."""

    first: Integers  # [k], arrival, or the transfer itself
    last: Integers  # [k], transfer
    before: Integers  # [k], what stands before it on its stream or backend's thread; -1: nothing


def _find_moved(graph: Graph, transfers: Integers) -> _Moved:
    """Find the parts of each collective, and what stands before it."""
    first = find_arrivals(graph, transfers)
    return _Moved(first, transfers, find_before(graph)[first])


@dataclass(frozen=True)
class _Followers:
    """Pairs of what stood before a moved collective and what followed it."""

    before: Integers
    after: Integers


def _find_followers(
    graph: Graph,
    leaving: Integers,
    moved: _Moved,
) -> _Followers:
    """Find what follows the collectives on their own streams, through all that stand one after the other."""
    edges = graph.edges
    order = leaving[edges.kind[leaving] == EdgeKind.STREAM]
    place = np.searchsorted(moved.last, edges.source[order])
    is_moved = np.zeros(len(graph.activities), bool)
    is_moved[moved.first] = True
    is_moved[moved.last] = True
    before_of = np.full(len(graph.activities), -1, np.int64)
    before_of[moved.last] = moved.before
    before = moved.before[place]
    is_inner = (before >= 0) & is_moved[before]
    while is_inner.any():
        before = np.where(is_inner, before_of[before], before)
        is_inner = (before >= 0) & is_moved[before]
    after = edges.target[order].astype(np.int64)
    is_pair = (before >= 0) & ~is_moved[after]
    return _Followers(before[is_pair], after[is_pair])


def _chain(graph: Graph, moved: _Moved) -> Graph:
    """Let the collectives of a rank run one after the other."""
    for rank in range(len(graph.boundaries)):
        mine = np.flatnonzero(graph.rank[moved.last] == rank)
        earlier = moved.last[mine[:-1]]
        later = moved.first[mine[1:]]
        graph = add_edges(graph, earlier, later, EdgeKind.STREAM)
    return graph


def _find_updates(graph: Graph, late: Flags) -> Integers:
    """Find the first activity of each step's update on each rank: on the device, else on the host."""
    kinds = ON_DEVICE if graph.on_device else ON_HOST
    numbers = np.flatnonzero(late & graph.find_kind(*kinds))
    is_first = find_firsts(graph, numbers)
    return numbers[is_first]


def _let_updates_wait(
    graph: Graph,
    moved: _Moved,
    updates: Integers,
) -> Graph:
    """Let each step's update wait for the collectives of its step."""
    activities = graph.activities
    pairs = np.stack([graph.rank, activities.step], axis=1)
    update_of = {}
    for number in updates.tolist():
        pair = tuple(pairs[number].tolist())
        update_of[pair] = number
    targets = []
    for number in moved.last.tolist():
        pair = tuple(pairs[number].tolist())
        targets.append(update_of.get(pair, -1))
    target = np.array(targets, np.int64)
    return add_edges(graph, moved.last, target, EdgeKind.EVENT)
