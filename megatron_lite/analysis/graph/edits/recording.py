"""Steps without the profiler, whose work for each operator makes recorded ones longer."""

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_lite.analysis.graph.edits.change import measure_most_per_step, scale_work
from megatron_lite.analysis.graph.graph import ON_HOST, Graph
from megatron_lite.formats.step_records import StepRecord
from megatron_lite.phases import NOT_TRAINING

MIN_STEPS_OF_EITHER = 3  # fewer say nothing
FIRST_STEPS = 4  # which warm up
MIN_WORK_KEPT = 0.1  # of a phase: the profiler does not take all of it


def measure_recording(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Measure by how many ns each phase of recorded steps is longer than that of others, by the lines of steps.jsonl.

    Steps that save, evaluate, compile or stand beside the recorded ones are left out, and so are the first four.

    Args:
        steps: lines of one rank, in order.

    Returns:
        By phase; empty where too few steps tell.
    """
    plain: list[StepRecord] = []
    recorded: list[StepRecord] = []
    for step in steps:
        is_other = step.compiling or step.beside_profile or step.step <= FIRST_STEPS
        if is_other or any(step.phases_ms.get(name) for name in NOT_TRAINING):
            continue
        chosen = recorded if step.profiled else plain
        chosen.append(step)
    if min(len(plain), len(recorded)) < MIN_STEPS_OF_EITHER:
        return {}
    found = {}
    for phase in recorded[0].phases_ms:
        longer_ms = _measure_phase(recorded, phase) - _measure_phase(plain, phase)
        found[phase] = max(longer_ms, 0.0) * 1e6
    return found


def _measure_phase(steps: Sequence[StepRecord], phase: str) -> float:
    """The median time of a phase, ms."""
    lengths_ms = [step.phases_ms.get(phase, 0.0) for step in steps]
    return float(np.median(lengths_ms))


def leave_out_recording(graph: Graph, recording_ns: Mapping[str, float]) -> Graph:
    """Take off what the profiler does: of each phase the same share of all that the host does in it.

    Args:
        graph: the graph.
        recording_ns: by phase, how much longer it makes a step, of the rank whose host does most in it.
    """
    for phase, longer_ns in recording_ns.items():
        chosen = graph.find_kind(*ON_HOST) & graph.find_phase(phase)
        most_ns = measure_most_per_step(graph, chosen)
        kept = max(1 - longer_ns / max(most_ns, 1.0), MIN_WORK_KEPT)
        graph = scale_work(graph, chosen, kept)
    return graph
