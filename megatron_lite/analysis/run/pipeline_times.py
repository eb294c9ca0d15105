"""Where the time of a pipeline's stages goes: their own work, their waiting,
and what the schedule makes of it at best."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median_low
from typing import TYPE_CHECKING

from megatron_lite.phases import Phase
from megatron_lite.pipeline_schedule import (
    ActionTimes,
    Stage,
    TimedAction,
    measure_bubble,
    simulate_schedule,
)

if TYPE_CHECKING:
    from megatron_lite.analysis.run.run_results import Run

MAX_CHART_ACTIONS = 3000  # of a chart


@dataclass(frozen=True)
class StageTimes:
    """Times of the usual rank of a stage, ms per typical step."""

    stage: int  # from 0
    layers: int
    forward_ms: float
    backward_ms: float
    wait_ms: float  # for other stages, mean of its ranks
    ideal_wait_ms: float  # that the schedule brings with it, with these stages' own times

    @property
    def own_ms(self) -> float:
        """Forward and backward, without waiting."""
        return self.forward_ms + self.backward_ms


@dataclass(frozen=True)
class PipelineTimes:
    """A step of a pipeline, measured beside what its schedule allows."""

    stages: tuple[StageTimes, ...]
    micro_batches: int
    chunks: int
    bubble: float  # share of a step that equal stages would wait, by formula
    ideal_ms: float  # a step of these stages, if nothing but the schedule delayed them
    actions: tuple[TimedAction, ...]  # of the ideal step; () where they are too many to draw


def measure_pipeline(run: "Run") -> PipelineTimes | None:
    """Measure where a pipeline's step goes; None where the run has no pipeline, or its files do not tell."""
    waits_ms: dict[int, float] = {}
    if run.ranks is not None:
        waits_ms = group_by_stage(run, run.ranks.own_ms(Phase.PIPELINE_WAIT.value), fmean)
    forward_ms, backward_ms = measure_own_times(run)
    layers = run.plan.stage_layers
    micro_batches = run.plan.micro_batches
    if not waits_ms or not micro_batches or not len(waits_ms) == len(forward_ms) == len(layers):
        return None
    timed = _simulate_step(run, forward_ms, backward_ms, micro_batches)
    ideal_ms = max(action.end_ms for action in timed)
    stages = []
    for number, of_stage in enumerate(layers):
        stage = StageTimes(
            stage=number,
            layers=of_stage,
            forward_ms=forward_ms[number],
            backward_ms=backward_ms[number],
            wait_ms=waits_ms[number],
            ideal_wait_ms=ideal_ms - forward_ms[number] - backward_ms[number],
        )
        stages.append(stage)
    chunks = _count_chunks(run)
    pieces = 3 * chunks if _splits_backward(run) else chunks
    return PipelineTimes(
        stages=tuple(stages),
        micro_batches=micro_batches,
        chunks=chunks,
        bubble=measure_bubble(len(stages), micro_batches, pieces),
        ideal_ms=ideal_ms,
        actions=tuple(timed) if len(timed) <= MAX_CHART_ACTIONS else (),
    )


def _count_chunks(run: "Run") -> int:
    """Chunks of layers that a stage has."""
    return max(len(run.plan.stage.chunks), 1)


def _splits_backward(run: "Run") -> bool:
    """Whether gradients of weights are computed apart from those of activations."""
    return bool(run.plan.stage.splits_backward)


def _simulate_step(
    run: "Run",
    forward_ms: dict[int, float],  # by stage, of a step
    backward_ms: dict[int, float],  # by stage, of a step
    micro_batches: int,  # of a step
) -> list[TimedAction]:
    """The actions of all stages, if nothing but the schedule delayed them."""
    number = len(forward_ms)
    chunks = _count_chunks(run)
    splits = _splits_backward(run)
    group_size = run.plan.stage.micro_batch_group_size
    weights = run.plan.chunk_weights
    actions_each = micro_batches * chunks
    stages = []
    times = []
    for stage in range(number):
        stages.append(Stage(stage, number, (range(0),) * chunks, splits, group_size))
        of_chunks = weights[stage] if len(weights) == number else ()
        if len(of_chunks) != chunks:
            of_chunks = ()
        backward_each_ms = backward_ms[stage] / actions_each
        part_ms = backward_each_ms / 2 if splits else backward_each_ms
        times.append(ActionTimes(forward_ms[stage] / actions_each, part_ms, part_ms, of_chunks))
    return simulate_schedule(stages, micro_batches, times)


def group_by_stage(
    run: "Run",
    of_ranks: Sequence[float],
    summarize: Callable[[list[float]], float],
) -> dict[int, float]:
    """Summarize the numbers of each stage's ranks.

    Args:
        run: the run.
        of_ranks: a number of each rank.
        summarize: what makes one number of those of a stage.

    Returns:
        A number by stage; {} where one of them is not known.
    """
    by_stage: dict[int, list[float]] = defaultdict(list)
    for stage, ms in zip(run.stages, of_ranks):
        by_stage[stage].append(ms)
    found = {stage: summarize(own) for stage, own in by_stage.items()}
    return {} if any(map(math.isnan, found.values())) else found


def measure_own_times(run: "Run") -> tuple[dict[int, float], dict[int, float]]:
    """Forward and backward of the usual rank of each stage, by stage, ms per step; {} where nothing tells."""
    if run.ranks is None:
        return {}, {}
    backward = Phase.BACKWARD.value
    whole_ms = run.ranks.gpu_phases_ms.get(backward) or run.ranks.phases_ms.get(backward, ())
    own_ms = run.ranks.own_ms(backward) or whole_ms  # of ranks that wait for others' gradients in backward
    backward_ms = []
    for own, whole in zip(own_ms, whole_ms):
        backward_ms.append(whole if math.isnan(own) else own)
    forward_ms = run.ranks.own_ms(Phase.FORWARD.value)
    return group_by_stage(run, forward_ms, median_low), group_by_stage(run, backward_ms, median_low)
