"""Operators of a phase that are called once instead of once per tensor, as foreach and fused optimizers do."""

import numpy as np

from megatron_lite.analysis.graph.edits.change import find_firsts, set_work
from megatron_lite.analysis.graph.graph import ActivityKind, Graph
from megatron_lite.analysis.intervals import Integers


def fuse_operators(graph: Graph, phase: str) -> Graph:
    """Let one call take the place of all calls of an operator in a step's phase.

    What the shortest call of an operator takes is the price of calling it, and so is the median time of Python between
    two calls. Both are paid once per operator and step. Device work stays as it is: its launches come earlier.

    Args:
        graph: the graph.
        phase: its name.
    """
    in_phase = graph.find_phase(phase)
    called = np.flatnonzero(in_phase & graph.find_kind(ActivityKind.OPERATOR))
    between = np.flatnonzero(in_phase & graph.find_kind(ActivityKind.PYTHON))
    if not len(called):
        return graph
    call, firsts = _number_calls(graph, called)
    works_ns = graph.activities.work_ns[called]
    of_call_ns = np.bincount(call, works_ns)
    name = graph.activities.name[firsts].astype(np.int64)
    price_ns = np.full(len(graph.names) + 1, np.inf)
    np.minimum.at(price_ns, name, of_call_ns)
    is_repeated = ~find_firsts(graph, firsts, name)
    paid_ns = np.where(is_repeated, of_call_ns - price_ns[name], of_call_ns)
    kept = paid_ns / np.maximum(of_call_ns, 1)
    fused_ns = np.rint(works_ns * kept[call])
    graph = set_work(graph, called, fused_ns)
    share_of_calls = 1 - float(is_repeated.mean())
    return _shorten_python(graph, between, share_of_calls)


def _number_calls(graph: Graph, called: Integers) -> tuple[Integers, Integers]:
    """Number the calls of operators of which activities are parts, a launch cuts them.

    Returns:
        The call of each activity, int64 [k], and the first activity of each call.
    """
    rank = graph.rank[called].astype(np.int64)
    keys = np.stack([rank, graph.activities.row[called]])
    _, first, call = np.unique(
        keys,
        axis=1,
        return_index=True,
        return_inverse=True,
    )
    return call.ravel(), called[first]


def _shorten_python(
    graph: Graph,
    between: Integers,
    kept: float,
) -> Graph:
    """Take the median time between two calls away, once for each call that is left out.

    Args:
        graph: the graph.
        between: activities of Python between calls.
        kept: share of the calls that are kept.
    """
    if not len(between):
        return graph
    works_ns = graph.activities.work_ns[between]
    price_ns = np.minimum(works_ns, np.median(works_ns))
    return set_work(graph, between, works_ns - (1 - kept) * price_ns)
