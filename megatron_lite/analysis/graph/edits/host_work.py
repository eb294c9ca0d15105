"""Work of the host that a thread does beside the steps."""

from collections.abc import Collection

from megatron_lite.analysis.graph.edits.change import measure_most_per_step, raise_floor, set_work
from megatron_lite.analysis.graph.graph import ActivityKind, Graph
from megatron_lite.analysis.intervals import Flags


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
    return _move(graph, moved)


def move_stretches_to_thread(
    graph: Graph,
    phases: Collection[str],
    least_ns: float,
) -> Graph:
    """Let a thread of its own do what Python does between operators for long, in some phases.

    Operators of these phases, and short stretches between them, stay. As in move_to_thread, the step takes at least
    what that thread takes.

    Args:
        graph: the graph.
        phases: their names; "" for what is in none.
        least_ns: a stretch of so long is long.
    """
    is_long = graph.activities.work_ns >= least_ns
    moved = graph.find_phase(*phases) & graph.find_kind(ActivityKind.PYTHON) & is_long
    return _move(graph, moved)


def _move(graph: Graph, moved: Flags) -> Graph:
    """Take work off the host; a step takes at least what another thread needs for it."""
    thread_ns = measure_most_per_step(graph, moved)
    return raise_floor(set_work(graph, moved, 0), thread_ns)
