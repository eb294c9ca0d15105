"""Checkpoints, and evaluations, that stop the steps: at other intervals, or written by a thread.

The steps that a graph replays are steady ones, which save nothing. What checkpoints add to the mean step stands beside
them (`Graph.beside_ns`); where every recorded step saves, it is a part of the steps. Evaluations are alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_lite.analysis.graph.edits.change import raise_floor, scale_work
from megatron_lite.analysis.graph.graph import ON_DEVICE, ON_HOST, Graph
from megatron_lite.analysis.graph.replay import find_window
from megatron_lite.analysis.intervals import Flags
from megatron_lite.analysis.run.run_results import Steps
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.phases import Phase

LOCKED_SHARE = 0.5  # the middle of what is possible
MIN_SAVES = 2  # fewer do not tell the interval


@dataclass(frozen=True)
class Saving:
    """How a run saves checkpoints, or evaluates."""

    stop_ns: float  # for how long one stops the steps
    every: float  # steps from one to the next
    computing_ns: float  # of stop_ns, what takes a core rather than to wait for a disk; where it is not known all of it
    phase: str = Phase.SAVE.value  # in which steps do so


def read_saving(run: Steps, phase: str = Phase.SAVE.value) -> Saving | None:
    """Read how a run saves, or evaluates, from all of its steps; None where it never does.

    Args:
        run: the steps of one rank.
        phase: in which steps do so.
    """
    lengths_ms = run.phases_ms.get(phase)
    if lengths_ms is None or not lengths_ms.any():
        return None
    stops = lengths_ms > 0
    stop_ns = float(lengths_ms[stops].mean()) * 1e6
    every = len(stops) / int(stops.sum())
    busy_ms = _measure_cpu(run, stops)
    usual_ms = _measure_cpu(run, run.ordinary)
    if busy_ms is None or usual_ms is None:
        return Saving(stop_ns, every, stop_ns, phase)
    computing_ns = max(busy_ms - usual_ms, 0.0) * 1e6
    return Saving(stop_ns, every, min(computing_ns, stop_ns), phase)


def _measure_cpu(run: Steps, chosen: Flags) -> float | None:
    """Measure the median CPU time of some steps, ms; None where none of them says it."""
    known_ms = run.cpu_ms[chosen & ~np.isnan(run.cpu_ms)]
    return float(np.median(known_ms)) if len(known_ms) else None


def measure_saving(
    trace: Trace,
    placing: Placing,
) -> Saving | None:
    """Measure in a trace how a run saves; None with fewer than two checkpoints in recorded steps.

    Args:
        trace: the trace of a rank, with ranges around saving.
        placing: where its events belong.
    """
    if Phase.SAVE.value not in placing.phases:
        return None
    ranges = placing.ranges
    is_save = ranges.phase == placing.phases.index(Phase.SAVE.value)
    is_main = ranges.thread == placing.main_thread
    saves = np.flatnonzero(is_save & is_main)
    start_ns = ranges.start_ns[saves]
    lengths_ns = ranges.end_ns[saves] - start_ns
    numbers = []
    stops_ns = []
    for number, step in enumerate(placing.steps):
        has_begun = start_ns >= step.host_start_ns
        is_inside = has_begun & (start_ns < step.host_end_ns)
        if is_inside.any():
            numbers.append(number)
            stops_ns.append(float(lengths_ns[is_inside].sum()))
    return _compute_saving(numbers, stops_ns)


def _compute_saving(
    numbers: Sequence[int],
    stops_ns: Sequence[float],
) -> Saving | None:
    """Compute intervals and times of checkpoints.

    Args:
        numbers: of the steps that saved.
        stops_ns: for how long each checkpoint stopped the steps.
    """
    if len(numbers) < MIN_SAVES:
        return None
    stop_ns = float(np.median(stops_ns))
    return Saving(stop_ns, float(np.median(np.diff(numbers))), stop_ns)


def add_saving(
    graph: Graph,
    saving: Saving,
) -> Graph:
    """Add to the mean step what checkpoints take, unless the replayed steps save themselves.

    Args:
        graph: the graph.
        saving: how the run saves.
    """
    if _find_inner_saving(graph, saving.phase).any():
        return graph
    return replace(graph, beside_ns=graph.beside_ns + saving.stop_ns / saving.every)


def save_every(
    graph: Graph,
    saving: Saving,
    steps: int,
) -> Graph:
    """Save, or evaluate, at another interval. A checkpoint takes what it took.

    Args:
        graph: a graph with its checkpoints (`add_saving`).
        saving: how the run saves.
        steps: from one checkpoint to the next.
    """
    return _scale_saving(graph, saving, saving.every / steps)


def save_in_thread(
    graph: Graph,
    saving: Saving,
    copy_ns: float = 0.0,
) -> Graph:
    """Let a thread write checkpoints, from a copy, while the steps go on.

    A checkpoint is written before the next one begins. Of what it computes, the steps wait for the part that holds
    Python's lock, which is not recorded: something between nothing and all of it. Half of it still stops them, and so
    does the copy.

    Args:
        graph: a graph with its checkpoints (`add_saving`).
        saving: how the run saves.
        copy_ns: for how long the copy stops the steps.
    """
    stop_ns = copy_ns + LOCKED_SHARE * saving.computing_ns
    kept = min(stop_ns / max(saving.stop_ns, 1.0), 1.0)
    return raise_floor(_scale_saving(graph, saving, kept), saving.stop_ns / saving.every)


def _scale_saving(
    graph: Graph,
    saving: Saving,
    factor: float,
) -> Graph:
    """Let checkpoints take a multiple of their time of the mean step.

    Args:
        graph: the graph.
        saving: how the run saves.
        factor: 0.5 for half of the time.
    """
    inner = _find_inner_saving(graph, saving.phase)
    if inner.any():
        return scale_work(graph, inner, factor)
    measured_ns = saving.stop_ns / saving.every
    changed_ns = measured_ns * (factor - 1)
    return replace(graph, beside_ns=max(graph.beside_ns + changed_ns, 0.0))


def _find_inner_saving(graph: Graph, phase: str) -> Flags:
    """Tell for each activity (bool [n]) whether it saves, within steps that are replayed.

    Args:
        graph: the graph.
        phase: in which steps save.
    """
    window = find_window(graph)
    if window is None:
        return np.zeros(len(graph.activities), bool)
    saves = graph.find_phase(phase) & graph.find_kind(*ON_HOST, *ON_DEVICE)
    found: Flags = saves & window.find_inside(graph)
    return found
