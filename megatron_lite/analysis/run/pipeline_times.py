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
    ZERO_BUBBLE,
    ActionTimes,
    Stage,
    TimedAction,
    measure_bubble,
    simulate_schedule,
)

if TYPE_CHECKING:
    from megatron_lite.analysis.run.run_results import Run

MAX_ACTIONS = 3000  # of a chart


@dataclass(frozen=True)
class StageTimes:
    """Of the usual rank of a stage, ms per typical step."""

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
    """One step of a pipeline, measured beside what its schedule allows."""

    stages: tuple[StageTimes, ...]
    micro_batches: int
    chunks: int
    bubble: float  # share of a step that equal stages would wait, by formula
    ideal_ms: float  # a step of these stages, if nothing but the schedule delayed them
    actions: tuple[TimedAction, ...]  # of the ideal step; () where they are too many to draw


def measure_pipeline(run: "Run") -> PipelineTimes | None:
    """None where the run has no pipeline, or its files do not tell."""
    waits = group_by_stage(run, run.ranks.own_ms(Phase.PIPELINE_WAIT.value), fmean) if run.ranks is not None else {}
    forward_ms, backward_ms = measure_own_times(run)
    layers, micro_batches = run.plan.stage_layers, run.plan.micro_batches
    if not waits or not micro_batches or not len(waits) == len(forward_ms) == len(layers):
        return None
    timed = _simulate_step(run, forward_ms, backward_ms, micro_batches)
    number, chunks = len(layers), max(len(run.plan.stage.chunks), 1)
    splits = run.args.get("pipeline_schedule") == ZERO_BUBBLE
    ideal_ms = max(one.end_ms for one in timed)
    return PipelineTimes(
        stages=tuple(
            StageTimes(
                stage, layers[stage], forward_ms[stage], backward_ms[stage], waits[stage],
                ideal_ms - forward_ms[stage] - backward_ms[stage],
            )
            for stage in range(number)
        ),
        micro_batches=micro_batches,
        chunks=chunks,
        bubble=measure_bubble(number, micro_batches, 3 * chunks if splits else chunks),
        ideal_ms=ideal_ms,
        actions=tuple(timed) if len(timed) <= MAX_ACTIONS else (),
    )  # fmt: skip


def _simulate_step(
    run: "Run", forward_ms: dict[int, float], backward_ms: dict[int, float], micro_batches: int
) -> list[TimedAction]:
    """The actions of all stages, if nothing but the schedule delayed them.

    Args:
        forward_ms: by stage, of a step.
        backward_ms: by stage, of a step.
        micro_batches: Of a step.
    """
    number, chunks = len(forward_ms), max(len(run.plan.stage.chunks), 1)
    splits = run.args.get("pipeline_schedule") == ZERO_BUBBLE
    group, weights = run.plan.stage.micro_batch_group_size, run.plan.chunk_weights
    stages = [Stage(stage, number, (range(0),) * chunks, splits, group) for stage in range(number)]
    actions_each = micro_batches * chunks
    times = []
    for stage in range(number):
        back = backward_ms[stage] / actions_each / (2 if splits else 1)
        of_chunks = weights[stage] if len(weights) == number and len(weights[stage]) == chunks else ()
        times.append(ActionTimes(forward_ms[stage] / actions_each, back, back, of_chunks))
    return simulate_schedule(stages, micro_batches, times)


def group_by_stage(
    run: "Run", of_ranks: Sequence[float], summarize: Callable[[list[float]], float]
) -> dict[int, float]:
    """What the numbers of each stage's ranks come to, by stage; {} where one of them is not known."""
    by_stage: dict[int, list[float]] = defaultdict(list)
    for stage, ms in zip(run.stages, of_ranks):
        by_stage[stage].append(ms)
    found = {stage: summarize(own) for stage, own in by_stage.items()}
    return {} if any(map(math.isnan, found.values())) else found


def measure_own_times(run: "Run") -> tuple[dict[int, float], dict[int, float]]:
    """By stage, (forward, backward) of the usual one of its ranks, ms per step; {} where nothing tells."""
    if run.ranks is None:
        return {}, {}
    backward = Phase.BACKWARD.value
    whole_ms = run.ranks.gpu_phases_ms.get(backward) or run.ranks.phases_ms.get(backward, ())
    own_ms = run.ranks.own_ms(backward) or whole_ms  # of ranks that wait for others' gradients in backward
    backward_ms = [whole if math.isnan(own) else own for own, whole in zip(own_ms, whole_ms)]
    forward_ms = run.ranks.own_ms(Phase.FORWARD.value)
    return group_by_stage(run, forward_ms, median_low), group_by_stage(run, backward_ms, median_low)
