"""Operators of a phase that are called once instead of once per tensor, as foreach does, and updates in one pass."""

import numpy as np

from megatron_lite.analysis.graph.edits.change import find_firsts, scale_work, set_work
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


# of an element, how often point-wise operators of an optimizer read or write it; names without "_foreach_" and "_"
ACCESSES = {
    "mul": 2,
    "add": 3,
    "sub": 3,
    "div": 2,
    "lerp": 3,
    "addcmul": 3,
    "addcdiv": 4,
    "sqrt": 2,
    "neg": 2,
    "maximum": 3,
    "zero": 1,
}
# torch's _single_tensor_adamw
ADAMW = ("mul", "lerp", "mul", "addcmul", "sqrt", "div", "add", "addcdiv")
SINGLE_ACCESSES = sum(ACCESSES[name] for name in ADAMW)
# weight, gradient and two moments are read, and all but the gradient written
FUSED_ACCESSES = 7
LAST_OF_UPDATE = "addcdiv"  # Adam's step; one for each tensor


def fuse_update(graph: Graph, phase: str) -> Graph:
    """Let one pass over weights, gradients and moments take the place of a point-wise operator for each step of Adam's
    formula (fused=True).

    An operator takes its time for what it reads and writes of each element: all of them together shrink to what one
    pass reads and writes. On a device kernels shrink so, as those of AdamW would, and each operator is called once. A
    phase of the host without such an update stays as it is.

    Args:
        graph: the graph.
        phase: its name.
    """
    if graph.on_device:
        kernels = graph.find_phase(phase) & graph.find_kind(ActivityKind.KERNEL)
        return scale_work(fuse_operators(graph, phase), kernels, FUSED_ACCESSES / SINGLE_ACCESSES)
    names = [_name_formula(name) for name in graph.names]
    in_phase = graph.find_phase(phase)
    accesses_of = np.array([*(ACCESSES.get(name, 0) for name in names), 0])
    is_last_of = np.array([*(name == LAST_OF_UPDATE for name in names), False])
    called = np.flatnonzero(in_phase & graph.find_kind(ActivityKind.OPERATOR))
    if not len(called):
        return graph
    _, firsts = _number_calls(graph, called)
    accesses = accesses_of[graph.activities.name[firsts]]
    updates = int(is_last_of[graph.activities.name[firsts]].sum())
    if not updates:
        return graph
    kept = min(FUSED_ACCESSES * updates / accesses.sum(), 1.0)
    pointwise = called[accesses_of[graph.activities.name[called]] > 0]
    between = in_phase & graph.find_kind(ActivityKind.PYTHON)
    graph = scale_work(graph, pointwise, kept)
    # Python's loop over tensors is no more
    calls_kept = 1 - len(pointwise) / len(called)
    return _shorten_python(graph, np.flatnonzero(between), calls_kept)


def _name_formula(name: str) -> str:
    """The step of a formula that an operator computes: "mul" of "aten::_foreach_mul_"."""
    return name.removeprefix("aten::").removeprefix("_foreach").strip("_")
