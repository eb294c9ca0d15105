"""Forward that is computed once more inside backward, because its activations were not kept."""

import numpy as np

from megatron_lite.analysis.graph.parts import ALL_NS
from megatron_lite.analysis.intervals import Cover, Flags, Integers, Nesting, union
from megatron_lite.analysis.trace.columns import Kind, Trace

ENGINE = "autograd::engine::evaluate_function"
MAX_SHARE_OF_NODES = 0.5  # of backward's nodes that recompute: with more of them backward itself is recorded


def find_recomputation(trace: Trace) -> dict[int, Cover]:
    """Find when threads compute forward once more.

    Backward's own operators record no gradients, and have no sequence number of their own. Operators that have one
    inside a node of backward belong to a forward: torch.utils.checkpoint of both kinds, and functions that recompute by
    hand. It lasts from the first of them in a node to the last, with what Python does in front of the first. Where most
    nodes hold such operators, gradients of gradients are recorded, and nothing is found.

    Args:
        trace: the trace of a rank.

    Returns:
        By thread, index into Trace.threads.
    """
    events = trace.events
    operators = trace.rows[Kind.OP]
    is_engine = trace.matching(lambda name: name.startswith(ENGINE))
    engine = operators[is_engine[operators]]
    others = operators[~is_engine[operators]]
    is_forward = events.forward_thread[others] <= 0
    has_number = events.sequence[others] >= 0
    forward = others[is_forward & has_number]
    nodes = trace.nest(engine)
    node = trace.position_in(nodes, forward)
    forward = forward[node >= 0]
    node = node[node >= 0]
    if not len(forward) or _is_recorded_backward(trace, nodes, node):
        return {}
    return _cover_nodes(trace, operators, forward, node)


def _is_recorded_backward(
    trace: Trace,
    nodes: Nesting,
    node: Integers,
) -> bool:
    """Tell whether backward records gradients of its own.

    Args:
        trace: the trace.
        nodes: all nodes of backward.
        node: positions of those that hold forward operators.
    """
    accumulates = trace.matching(lambda name: name.endswith("AccumulateGrad"))
    computing = int(np.count_nonzero(~accumulates[nodes.rows]))
    with_forward = len(np.unique(node))
    return with_forward > MAX_SHARE_OF_NODES * computing


def _cover_nodes(
    trace: Trace,
    operators: Integers,
    forward: Integers,
    node: Integers,
) -> dict[int, Cover]:
    """Cover the forwards of nodes, by thread.

    Args:
        trace: the trace.
        operators: rows of all operators, in order.
        forward: [k], rows of forward operators in nodes.
        node: [k], position of the node.
    """
    events = trace.events
    _, group = np.unique(node, return_inverse=True)
    count = int(group.max()) + 1
    start_ns = np.full(count, ALL_NS)
    end_ns = np.zeros(count, np.int64)
    np.minimum.at(start_ns, group, events.start_ns[forward])
    np.maximum.at(end_ns, group, events.end_ns[forward])
    thread = np.zeros(count, np.int64)
    thread[group] = events.thread[forward]
    found = {}
    for one in np.unique(thread).tolist():
        is_mine: Flags = thread == one
        on_thread = trace.on_thread(operators, one)
        begun_ns = _find_silence(trace, on_thread, start_ns[is_mine])
        found[one] = union(begun_ns, end_ns[is_mine])
    return found


def _find_silence(
    trace: Trace,
    operators: Integers,
    moment: Integers,
) -> Integers:
    """Find since when no operator of a thread has begun or ended before each moment, int64 [k], ns.

    Args:
        trace: the trace.
        operators: rows of the thread's operators.
        moment: [k], starts of operators.
    """
    events = trace.events
    moments = np.concatenate([events.start_ns[operators], events.end_ns[operators]])
    moments.sort()
    at = np.searchsorted(moments, moment, side="left") - 1
    return moments[np.maximum(at, 0)]
