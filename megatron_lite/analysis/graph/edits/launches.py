"""Launches of a phase captured in a graph of the device's (CUDA graph)."""

from collections.abc import Collection

import numpy as np

from megatron_lite.analysis.graph.edits.change import drop_delays, find_firsts, set_work
from megatron_lite.analysis.graph.graph import ON_DEVICE, ActivityKind, EdgeKind, Graph


def capture_launches(graph: Graph, phase: str) -> Graph:
    """Let one launch per step start all device work of a phase.

    The host's operators and Python in the phase take no time, but for one launch, and device work begins as soon as the
    work before it has ended. Synchronizations stay. A phase without device work stays as it is.

    Args:
        graph: the graph.
        phase: its name.
    """
    in_phase = graph.find_phase(phase)
    work = in_phase & graph.find_kind(*ON_DEVICE)
    if not work.any():
        return graph
    calls = in_phase & graph.find_kind(ActivityKind.OPERATOR, ActivityKind.PYTHON)
    numbers = np.flatnonzero(calls)
    # the call goes on after the device has begun
    backwards = numbers[::-1]
    last = backwards[find_firsts(graph, backwards)]
    launches = graph.find_edges(EdgeKind.LAUNCH)
    lags_ns = graph.edges.lag_ns[launches]
    launch_ns = float(np.median(lags_ns)) if len(lags_ns) else 0.0
    # one launch takes no longer than all of them do
    works_ns = graph.activities.work_ns[numbers]
    all_ns = works_ns.sum() / max(len(last), 1)
    graph = set_work(graph, calls, 0)
    graph = set_work(graph, last, min(launch_ns, all_ns))
    return drop_delays(graph, work)


def capture_phases(graph: Graph, left_out: Collection[str]) -> Graph:
    """Let one launch per step start the device work of each phase.

    Args:
        graph: the graph.
        left_out: names of phases that stay as they are, as those that no graph of the device's can hold.
    """
    for phase in (*graph.phases, ""):
        if phase not in left_out:
            graph = capture_launches(graph, phase)
    return graph
