"""Work of the host that a thread does beside the steps."""

from megatron_lite.analysis.graph.edits.change import measure_most_per_step, raise_floor, set_work
from megatron_lite.analysis.graph.graph import ActivityKind, Graph


def move_to_thread(graph: Graph, phase: str) -> Graph:
    """Let a thread of its own do what the host does in a phase.

    The step takes at least what that thread takes. Python's lock, for which both wait where the work is Python, is not
    in the graph.

    Args:
        graph: the graph.
        phase: its name.
    """
    kinds = (ActivityKind.OPERATOR, ActivityKind.PYTHON, ActivityKind.NAMED)
    moved = graph.find_phase(phase) & graph.find_kind(*kinds)
    thread_ns = measure_most_per_step(graph, moved)
    return raise_floor(set_work(graph, moved, 0), thread_ns)
