"""Steps without the profiler, whose work for each operator makes recorded ones longer."""

from collections.abc import Sequence

import numpy as np

from megatron_lite.analysis.graph.edits.change import set_work
from megatron_lite.analysis.graph.graph import ON_HOST, Graph
from megatron_lite.analysis.graph.replay import find_window
from megatron_lite.formats.step_records import StepRecord
from megatron_lite.phases import NOT_TRAINING

MIN_STEPS_OF_EITHER = 3  # of either kind; fewer say nothing
MAX_NS_PER_EVENT = 5000.0  # more is no work of the profiler's
FIRST_STEPS = 4  # which warm up


def measure_recording(steps: Sequence[StepRecord]) -> float:
    """Measure by how many ns recorded steps are longer than others, by the lines of steps.jsonl; 0 where few tell.

    Steps that save, evaluate, compile or stand beside the recorded ones are left out, and so are the first four.

    Args:
        steps: lines of one rank, in order.
    """
    plain: list[float] = []
    recorded: list[float] = []
    for step in steps:
        is_other = step.compiling or step.beside_profile or step.step <= FIRST_STEPS
        if is_other or any(step.phases_ms.get(name) for name in NOT_TRAINING):
            continue
        lengths_ms = recorded if step.profiled else plain
        lengths_ms.append(step.ms)
    if min(len(plain), len(recorded)) < MIN_STEPS_OF_EITHER:
        return 0.0
    longer_ms = float(np.median(recorded) - np.median(plain))
    return max(longer_ms, 0.0) * 1e6


def leave_out_recording(graph: Graph, recording_ns: float) -> Graph:
    """Take off what the profiler does: as much for each operator that it recorded on the host.

    Args:
        graph: the graph.
        recording_ns: by how much it makes a step longer, of the rank that records most operators.
    """
    window = find_window(graph)
    hosts = np.flatnonzero(graph.find_kind(*ON_HOST))
    if window is None or not len(hosts):
        return graph
    activities = graph.activities
    inside = np.intersect1d(window.places, hosts)
    per_rank = np.bincount(graph.rank[inside], activities.num_events[inside])
    most = per_rank.max(initial=0) / window.steps
    if not most:
        return graph
    each_ns = min(recording_ns / most, MAX_NS_PER_EVENT)
    recorded_ns = activities.num_events[hosts] * each_ns
    works_ns = activities.work_ns[hosts] - recorded_ns
    return set_work(graph, hosts, np.rint(works_ns))
