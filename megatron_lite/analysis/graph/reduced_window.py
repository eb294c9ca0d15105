"""A window of a graph reduced to the activities whose ends have to be computed one after the other.

Most activities wait for nothing but the one before them on their lane, so that they end a known time after an earlier
one. Kernels of a stream that were all launched behind one activity of the host, without anything else between, end a
known time after that one or after the kernel before them all, whichever is later. What remains are the roots: when any
other activity ends follows from one root or two.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.graph.graph import EdgeKind, Graph
from megatron_lite.analysis.intervals import Flags, Integers

NEVER = -(1 << 62)  # ns, the end of what is not known
MAX_NEVER = NEVER // 2  # such an end with a lag
LAUNCHES = (EdgeKind.LAUNCH, EdgeKind.CALL)


@dataclass(frozen=True)
class WindowEdges:
    """Edges into a window's activities, m of them by target.

    Places of sources outside follow those of its n activities.
    """

    number: Integers  # [m], index into the graph's edges
    source: Integers  # [m], place
    target: Integers  # [m], place
    lag_ns: Integers  # [m]
    outer: Integers  # [q], the sources outside, as numbers of activities


@dataclass(frozen=True)
class Follows:
    """How each of p places follows from roots: it ends at the later of first + first_ns and second + second_ns."""

    first: Integers  # [p], place of a root; a root follows from itself
    first_ns: Integers  # [p]
    second: Integers  # [p], place of a root; -1: from the first alone
    second_ns: Integers  # [p]


class ReducedWindow:
    """A window of a graph, and how its activities follow from a few of them.

    Args:
        graph: the graph.
        places: [n], the window's activities, in order.
    """

    def __init__(
        self,
        graph: Graph,
        places: Integers,
    ):
        self.places = places
        self.edges = _find_edges(graph, places)
        self.outer = self.edges.outer
        self.work_ns = graph.activities.work_ns[places]
        self.delay_ns = graph.activities.delay_ns[places]
        self.follows = _follow(graph, places, self.edges, self._find_costs())
        is_root = self.follows.first[: len(places)] == np.arange(len(places))
        self.roots: Integers = np.flatnonzero(is_root)
        self._fill_tables()

    def _find_costs(self) -> Integers:
        """Find how long after an edge's source its target ends at least, if nothing else holds it up: int64 [m]."""
        target = self.edges.target
        return self.edges.lag_ns + self.delay_ns[target] + self.work_ns[target]

    def _fill_tables(self) -> None:
        """Make lists of the edges between roots, which a loop of Python reads faster than arrays."""
        root_of_place = np.full(len(self.follows.first), -1, np.int64)
        root_of_place[self.roots] = np.arange(len(self.roots))
        outer_places = np.arange(len(self.places), len(root_of_place))
        root_of_place[outer_places] = np.arange(len(outer_places)) + len(self.roots)
        self.root_of_place = root_of_place
        target = root_of_place[self.edges.target]
        kept = np.flatnonzero(target >= 0)
        target = target[kept]
        source = self.edges.source[kept]
        cost_ns = self._find_costs()[kept]
        has_second = self.follows.second[source] >= 0
        twice = source[has_second]
        first_ns = cost_ns + self.follows.first_ns[source]
        second_ns = cost_ns[has_second] + self.follows.second_ns[twice]
        first = self.follows.first[source]
        second = self.follows.second[twice]
        targets = np.concatenate([target, target[has_second]])
        order = np.argsort(targets, kind="stable")
        sources = np.concatenate([first, second])[order]
        costs_ns = np.concatenate([first_ns, second_ns])[order]
        self.source = root_of_place[sources].tolist()
        self.cost = costs_ns.tolist()
        every_root = np.arange(len(self.roots) + 1)
        self.first_edge = np.searchsorted(targets[order], every_root).tolist()

    def compute(
        self,
        outer_ns: Integers,
        fixed_ns: Integers,
    ) -> NDArray[np.int64]:
        """Compute when roots end, int64 [roots + q]: those outside of the window stand behind those in it.

        Args:
            outer_ns: [q], ends of the sources outside; NEVER where that is not known.
            fixed_ns: [roots], when each root ends if it waits for nothing known.
        """
        fixed = fixed_ns.tolist()
        ends = [0] * len(fixed) + outer_ns.tolist()
        source = self.source
        cost = self.cost
        edge = 0
        for root, last_edge in enumerate(self.first_edge[1:]):
            end = NEVER
            while edge < last_edge:
                let_go = ends[source[edge]] + cost[edge]
                end = max(end, let_go)
                edge += 1
            ends[root] = end if end > MAX_NEVER else fixed[root]
        return np.array(ends, np.int64)

    def find_ends(
        self,
        root_ends_ns: Integers,
        places: Integers,
    ) -> Integers:
        """Find when activities end: int64 [k].

        Args:
            root_ends_ns: [roots + q], of `compute`.
            places: [k], in the window, or behind it those outside.
        """
        first = self.follows.first[places]
        first_root = self.root_of_place[first]
        ends_ns = root_ends_ns[first_root] + self.follows.first_ns[places]
        second = self.follows.second[places]
        second_root = self.root_of_place[second]
        second_ns = root_ends_ns[second_root] + self.follows.second_ns[places]
        later_ns = np.maximum(ends_ns, second_ns)
        return np.where(second >= 0, later_ns, ends_ns)

    def find_binding(self, ends_ns: Integers) -> Integers:
        """Find the edge that each activity waits for last: int64 [n], number of the graph's; -1: none.

        Args:
            ends_ns: [n + q], of all activities.
        """
        edges = self.edges
        moment_ns = ends_ns[edges.source] + edges.lag_ns
        ready_ns = np.full(len(self.places), MAX_NEVER)
        np.maximum.at(ready_ns, edges.target, moment_ns)
        is_known = moment_ns > MAX_NEVER
        is_last = moment_ns == ready_ns[edges.target]
        # of several the first, which is written last
        chosen = np.flatnonzero(is_known & is_last)[::-1]
        found = np.full(len(self.places), -1, np.int64)
        found[edges.target[chosen]] = edges.number[chosen]
        return found


def _find_edges(graph: Graph, places: Integers) -> WindowEdges:
    """Find the edges into a window's activities."""
    edges = graph.edges
    place_of = np.full(len(graph.activities), -1, np.int64)
    place_of[places] = np.arange(len(places))
    is_inner = place_of[edges.target] >= 0
    number = np.flatnonzero(is_inner)
    source = edges.source[number]
    target = edges.target[number]
    is_outer = place_of[source] < 0
    outer = np.unique(source[is_outer])
    place_of[outer] = np.arange(len(outer)) + len(places)
    return WindowEdges(
        number=number,
        source=place_of[source],
        target=place_of[target],
        lag_ns=edges.lag_ns[number],
        outer=outer.astype(np.int64),
    )


def _follow(
    graph: Graph,
    places: Integers,
    edges: WindowEdges,
    cost_ns: Integers,
) -> Follows:
    """Find how each activity of a window, and each source outside, follows from roots.

    Args:
        graph: the graph.
        places: [n], the window's activities.
        edges: [m], into them.
        cost_ns: [m], from the end of each edge's source to that of its target.
    """
    chains = _find_chains(graph, places, edges)
    single = _follow_chains(chains, cost_ns, len(places) + len(edges.outer))
    launched = _find_launched(graph, edges, chains, single, cost_ns)
    return _follow_launches(launched, single)


@dataclass(frozen=True)
class _Chains:
    """A window's activities lane after lane, n of them, and the edge to each from the one before it on its lane."""

    order: Integers  # [n], places
    chain: Integers  # [n] by place, edge from the one before; -1: none
    number: Integers  # [n] by place, of edges into it


def _find_chains(
    graph: Graph,
    places: Integers,
    edges: WindowEdges,
) -> _Chains:
    """Find the order of a window's activities on their lanes. The arguments are those of _follow."""
    count = len(places)
    lane = graph.activities.lane[places]
    order: Integers = np.argsort(lane, kind="stable")
    before = np.full(count, -1, np.int64)
    is_same = lane[order[1:]] == lane[order[:-1]]
    before[order[1:]] = np.where(is_same, order[:-1], -1)
    is_chain = edges.source == before[edges.target]
    chain = np.full(count, -1, np.int64)
    chain[edges.target[is_chain]] = np.flatnonzero(is_chain)
    return _Chains(order, chain, np.bincount(edges.target, minlength=count))


@dataclass(frozen=True)
class _Single:
    """How each of p places follows from the head of its stretch of a lane, which waits for something else, too."""

    head: Integers  # [p], place
    after_ns: Integers  # [p], from the head's end to that of the place
    heads: Integers  # [h], all heads in the window, lane after lane


def _follow_chains(
    chains: _Chains,
    cost_ns: Integers,
    size: int,
) -> _Single:
    """Let activities follow from the one before on their lane where they wait for nothing else.

    Args:
        chains: the activities on their lanes.
        cost_ns: [m], of each edge.
        size: how many places there are, those outside of the window included.
    """
    is_single = (chains.number == 1) & (chains.chain >= 0)
    goes_on = is_single[chains.order]
    chain = chains.chain[chains.order]
    chain_ns = _get_costs(cost_ns, chain)
    step_ns = np.where(goes_on, chain_ns, 0)
    sum_ns = np.cumsum(step_ns)
    starts = _find_starts(goes_on)
    head: Integers = np.arange(size)
    head[chains.order] = chains.order[starts]
    after_ns = np.zeros(size, np.int64)
    after_ns[chains.order] = sum_ns - sum_ns[starts]
    return _Single(head, after_ns, chains.order[~goes_on])


def _find_starts(goes_on: Flags) -> Integers:
    """Find for each of a sequence where its stretch starts: int64 [k]. goes_on: [k], it continues the one before it."""
    places = np.arange(len(goes_on))
    starts = np.where(goes_on, 0, places)
    return np.maximum.accumulate(starts)


def _get_costs(cost_ns: Integers, edges: Integers) -> Integers:
    """Costs of edges; 0 for -1."""
    return np.append(cost_ns, 0)[edges]


@dataclass(frozen=True)
class _Launched:
    """Heads, h of them, and which of them belong to a run: kernels launched behind one activity of the host."""

    in_run: Flags  # [h], launched behind the same activity as the head before it on its lane
    chain_ns: Integers  # [h], from the end of the head before it to its own; 0 outside of runs
    launcher: Integers  # [h], place of the head that it was launched behind; -1: none
    launch_ns: Integers  # [h], from the launcher's end to its own


def _find_launched(
    graph: Graph,
    edges: WindowEdges,
    chains: _Chains,
    single: _Single,
    cost_ns: Integers,
) -> _Launched:
    """Find runs of heads that wait for the one before on their lane and for a launch, and for nothing else.

    Args:
        graph: the graph.
        edges: [m], into the window's activities.
        chains: the activities on their lanes.
        single: how they follow from heads.
        cost_ns: [m], of each edge.
    """
    heads = single.heads
    is_launch = np.isin(graph.edges.kind[edges.number], LAUNCHES)
    launch = np.full(len(chains.chain), -1, np.int64)
    launch[edges.target[is_launch]] = np.flatnonzero(is_launch)
    launch_edge = launch[heads]
    chain_edge = chains.chain[heads]
    has_both = (launch_edge >= 0) & (chain_edge >= 0) & (launch_edge != chain_edge)
    is_launched = has_both & (chains.number[heads] == 2)
    sources = np.append(edges.source, -1)
    caller = sources[launch_edge]
    before = sources[chain_edge]
    launcher = np.append(single.head, -1)[caller]
    head_before = single.head[before]
    is_same = launcher[1:] == launcher[:-1]
    # heads of other lanes may stand between
    is_next = head_before[1:] == heads[:-1]
    in_run = np.zeros(len(heads), bool)
    in_run[1:] = is_launched[1:] & is_launched[:-1] & is_same & is_next
    after_ns = np.append(single.after_ns, 0)
    chain_ns = after_ns[before] + _get_costs(cost_ns, chain_edge)
    launch_ns = after_ns[caller] + _get_costs(cost_ns, launch_edge)
    return _Launched(
        in_run=in_run,
        chain_ns=np.where(in_run, chain_ns, 0),
        launcher=launcher,
        launch_ns=launch_ns,
    )


def _follow_launches(launched: _Launched, single: _Single) -> Follows:
    """Let heads of a run follow from the head before the run, and from what they were launched behind.

    Args:
        launched: the heads and their runs.
        single: how activities follow from heads.
    """
    in_run = launched.in_run
    sum_ns = np.cumsum(launched.chain_ns)
    starts = _find_starts(in_run)
    from_start_ns = sum_ns - sum_ns[starts]
    ahead_ns = _find_latest_launches(launched, from_start_ns)
    from_launch_ns = from_start_ns + ahead_ns
    head_of_place = np.full(len(single.head), -1, np.int64)
    head_of_place[single.heads] = np.arange(len(single.heads))
    # sources outside of the window are heads of their own
    head = head_of_place[single.head]
    is_run = np.append(in_run, False)[head]
    start = np.append(single.heads[starts], -1)[head]
    start_ns = np.append(from_start_ns, 0)[head]
    launcher = np.append(launched.launcher, -1)[head]
    launch_ns = np.append(from_launch_ns, 0)[head]
    return Follows(
        first=np.where(is_run, start, single.head),
        first_ns=single.after_ns + start_ns,
        second=np.where(is_run, launcher, -1),
        second_ns=single.after_ns + launch_ns,
    )


def _find_latest_launches(launched: _Launched, from_start_ns: Integers) -> Integers:
    """Find of the launches of a run up to each head the one that holds it up most: int64 [h].

    Args:
        launched: the heads and their runs.
        from_start_ns: [h], from the end of the run's first head to that of each.

    Returns:
        From the launcher's end, less the time from the run's first head; 0 outside of runs.
    """
    in_run = launched.in_run
    if not in_run.any():
        return np.zeros(len(in_run), np.int64)
    ahead_ns = launched.launch_ns - from_start_ns
    least_ns = ahead_ns[in_run].min()
    span_ns = ahead_ns[in_run].max() - least_ns + 2
    # runs one above the other, so that the largest so far is one of the run
    floor_ns = np.cumsum(~in_run) * span_ns
    levels = floor_ns + np.where(in_run, ahead_ns - least_ns + 1, 0)
    highest = np.maximum.accumulate(levels) - floor_ns
    return np.where(in_run, highest - 1 + least_ns, 0)
