"""Steps without the profiler, whose work for each operator makes recorded ones longer."""

import math
from collections.abc import Mapping

import numpy as np

from megatron_lite.analysis.graph.edits.change import measure_most_per_step, scale_work
from megatron_lite.analysis.graph.graph import ON_HOST, ActivityKind, Graph
from megatron_lite.analysis.graph.replay import find_window
from megatron_lite.analysis.intervals import Flags
from megatron_lite.analysis.run.run_results import Steps
from megatron_lite.phases import NOT_TRAINING

MIN_STEPS_OF_EITHER = 3  # fewer say nothing
FIRST_STEPS = 4  # which warm up
MIN_WORK_KEPT = 0.1  # of a phase: the profiler does not take all of it


def measure_recording(run: Steps) -> dict[str, float]:
    """Measure by how many ns each phase of recorded steps is longer than that of others.

    Steps that save, evaluate, compile or stand beside the recorded ones are left out, and so are the first four. All
    phases together are no longer than the whole step is: what a host waits for may move from a phase to another one.

    Args:
        run: the steps of one rank.

    Returns:
        By phase; empty where too few steps tell.
    """
    is_warm = np.arange(len(run.step_ms)) >= FIRST_STEPS
    plain = run.ordinary & is_warm
    recorded = run.profiled & ~(run.evaluating | run.saving | run.compiling)
    if min(plain.sum(), recorded.sum()) < MIN_STEPS_OF_EITHER:
        return {}
    found = {}
    for phase, lengths_ms in run.phases_ms.items():
        if phase in NOT_TRAINING:
            continue
        longer_ms = float(np.median(lengths_ms[recorded]) - np.median(lengths_ms[plain]))
        found[phase] = max(longer_ms, 0.0) * 1e6
    step_ms = float(np.median(run.training_ms[recorded]) - np.median(run.training_ms[plain]))
    share = max(step_ms, 0.0) * 1e6 / max(sum(found.values()), 1.0)
    return {phase: longer_ns * min(share, 1.0) for phase, longer_ns in found.items()}


def leave_out_recording(graph: Graph, recording_ns: Mapping[str, float]) -> Graph:
    """Take off what the profiler does: of each phase the same share of all that the host does in it.

    A phase with collectives is also longer by chance, since ranks wait for each other. There, the profiler takes no
    more for each activity of the host than in the phases without collectives.

    Args:
        graph: the graph.
        recording_ns: by phase, how much longer it makes a step, of the rank whose host does most in it.
    """
    most_ns = _measure_most_recording(graph, recording_ns)
    for phase, longer_ns in recording_ns.items():
        chosen = _find_host_work(graph, phase)
        taken_ns = min(longer_ns, most_ns.get(phase, math.inf))
        work_ns = measure_most_per_step(graph, chosen)
        kept = max(1 - taken_ns / max(work_ns, 1.0), MIN_WORK_KEPT)
        graph = scale_work(graph, chosen, kept)
    return graph


def _find_host_work(graph: Graph, phase: str) -> Flags:
    """Tell for each activity (bool [n]) whether it is the host's, in a phase."""
    found: Flags = graph.find_kind(*ON_HOST) & graph.find_phase(phase)
    return found


def _measure_most_recording(graph: Graph, recording_ns: Mapping[str, float]) -> dict[str, float]:
    """Measure what the profiler takes at most in phases with collectives, by its price for an activity in the others.

    Args:
        graph: the graph.
        recording_ns: by phase, how much longer it makes a step.

    Returns:
        By phase with collectives, ns; empty where all phases have collectives.
    """
    window = find_window(graph)
    if window is None:
        return {}
    is_transfer = graph.find_kind(ActivityKind.TRANSFER)
    counts = {}
    with_collectives = []
    for phase in recording_ns:
        inside = _find_host_work(graph, phase)[window.places]
        counts[phase] = int(inside.sum())
        if (is_transfer & graph.find_phase(phase)).any():
            with_collectives.append(phase)
    alone = [phase for phase in recording_ns if phase not in with_collectives]
    activities = sum(counts[phase] for phase in alone)
    if not activities:
        return {}
    # of one rank's mean step by activities of all ranks and steps; counted alike below, so that both cancel out
    price_ns = sum(recording_ns[phase] for phase in alone) / activities
    return {phase: price_ns * counts[phase] for phase in with_collectives}
