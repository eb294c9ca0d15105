"""Point-wise operators that a compiler makes one loop of (torch.compile)."""

import re

import numpy as np

from megatron_lite.analysis.graph.edits.change import set_work
from megatron_lite.analysis.graph.graph import ActivityKind, Graph
from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.phases import Phase

_NODE = r"^(autograd::engine::evaluate_function: )?"
# costly functions of each element: a loop takes as long as they do
COSTLY = re.compile(
    _NODE + r"(aten::)?(sigmoid|tanh|gelu|silu|mish|elu|exp|log|erf|softplus|sin|cos|pow)_?(Backward\d+)?$",
    re.IGNORECASE,
)
# what reads and writes more than it computes
CHEAP = re.compile(
    _NODE
    + r"(aten::)?(add|sub|rsub|mul|div|neg|relu|square|where|clamp|threshold|masked_fill|to|copy)_?(Backward\d+)?$",
    re.IGNORECASE,
)
COMPILED_IN = (Phase.FORWARD.value, Phase.BACKWARD.value)


def compile_operators(graph: Graph) -> Graph:
    """Make one loop of each chain of point-wise operators in forward and backward.

    Of a chain the costly functions stay, exponentials and their kin; or its longest operator where it has none. Cheap
    ones and Python between them take no time: what they read and write stays in registers. Backward computes the
    costly functions of forward again instead of reading their results, in the place of their derivatives. Products
    and what else is no point-wise operator stay as they are. Device work is not changed: a graph with a device stays
    as it is.

    Args:
        graph: the graph.
    """
    if any(boundary.on_device for boundary in graph.boundaries):
        return graph
    costly = _find_named(graph, COSTLY)
    cheap = _find_named(graph, CHEAP)
    chains = _number_chains(graph, costly | cheap)
    members = np.flatnonzero(chains >= 0)
    if not len(members):
        return graph
    _, first, chain = np.unique(chains[members], return_index=True, return_inverse=True)
    works_ns = graph.activities.work_ns[members]
    is_costly = costly[members]
    kept_ns = np.bincount(chain, works_ns * is_costly)
    longest_ns = np.zeros(len(first))
    np.maximum.at(longest_ns, chain, works_ns)
    kept_ns = np.maximum(kept_ns, longest_ns)
    changed_ns = np.zeros(len(members))
    changed_ns[first] = kept_ns
    return set_work(graph, members, np.rint(changed_ns))


def _find_named(
    graph: Graph,
    pattern: re.Pattern[str],
) -> Flags:
    """Tell for each activity (bool [n]) whether it is an operator of forward or backward whose name matches."""
    matches = [pattern.match(name) is not None for name in graph.names]
    by_name = np.array([*matches, False], bool)
    in_phases = np.zeros(len(graph.activities), bool)
    for phase in COMPILED_IN:
        in_phases |= graph.find_phase(phase)
    operators = graph.find_kind(ActivityKind.OPERATOR)
    found: Flags = by_name[graph.activities.name] & operators & in_phases
    return found


def _number_chains(
    graph: Graph,
    is_member: Flags,
) -> Integers:
    """Number chains of activities that follow each other on a thread with nothing but Python between: int64 [n]; -1:
    none.

    Args:
        graph: the graph.
        is_member: [n], operators that a chain is made of.
    """
    activities = graph.activities
    found = np.full(len(activities), -1, np.int64)
    python = graph.find_kind(ActivityKind.PYTHON)
    count = 0
    for lane in np.unique(activities.lane[is_member]).tolist():
        on_lane = np.flatnonzero(activities.lane == lane)
        is_mine = is_member[on_lane]
        phase = activities.phase[on_lane]
        begins = ~(is_mine | python[on_lane])
        begins[1:] |= phase[1:] != phase[:-1]
        group = np.cumsum(begins)
        has_member = np.isin(group, group[is_mine])
        joins = is_mine | (has_member & ~begins)
        found[on_lane[joins]] = count + group[joins]
        count += int(group[-1]) + 1
    return _trim(found, is_member)


def _trim(
    chains: Integers,
    is_member: Flags,
) -> Integers:
    """Leave Python in front of a chain's first operator and behind its last out of it."""
    members = np.flatnonzero(is_member)
    if not len(members):
        return chains
    count = int(chains.max()) + 1
    first = np.full(count, len(chains))
    last = np.full(count, -1)
    np.minimum.at(first, chains[members], members)
    np.maximum.at(last, chains[members], members)
    number = np.arange(len(chains))
    is_behind_first = number >= first[chains]
    is_before_last = number <= last[chains]
    inside = (chains >= 0) & is_behind_first & is_before_last
    return np.where(inside, chains, -1)
