"""Stages of a pipeline that wait for each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median_low

from megatron_lite.analysis.findings.base import (
    Edit,
    Evidence,
    Finding,
    Observation,
    Remedy,
    build_time_finding,
    could_not_look,
    rule,
    saw,
)
from megatron_lite.analysis.graph.edits.stages import move_layers
from megatron_lite.analysis.rank_facts import MATTERS, in_ms
from megatron_lite.analysis.run.pipeline_times import measure_own_times
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.formats.run_record import Settings
from megatron_lite.pipeline_schedule import measure_bubble
from megatron_lite.thresholds import is_by_chance

MIN_BUBBLE = 0.10  # of a step, by the schedule: with less, what stages wait has other causes
ZERO_BUBBLE_CHUNKS = 3
ONE_STAGE = "no typical steps of several stages of a pipeline"


@dataclass(frozen=True)
class PipelineSchedule:
    """The order in which stages of a pipeline compute, as far as it decides how long they wait."""

    stages: int
    micro_batches: int  # per step
    chunks: int  # of layers, of each stage
    is_zero_bubble: bool

    def measure_bubble(self) -> float:
        """Measure the share of a step that each stage waits while the pipeline fills and drains."""
        # gradients of weights fill two thirds of the bubble at best, as three times the chunks would
        chunks = ZERO_BUBBLE_CHUNKS * self.chunks if self.is_zero_bubble else self.chunks
        return measure_bubble(self.stages, self.micro_batches, chunks)


@rule(
    "pipeline-bubble",
    "stages that wait because there are few micro-batches",
    "phases",
    "pipeline",
    needs="run",
)
def find_pipeline_bubble(facts: Facts, run: Run) -> Finding | Observation:
    """Pipeline stages idle while the pipeline fills and drains.

    Meaning: the last stage has nothing to do until the first micro-batch has come through all others, and the first one
        waits in the same way at the end of the step. Of p stages, m micro-batches and v chunks per stage that is
        (p-1)/v of m + (p-1)/v slots for each stage, however fast it is (Narayanan et al. 2021, arXiv 2104.04473). With
        gradients of weights in between (ZeroBubble) a third of it at best.
    Measured: every rank's median time in the phase pipeline_wait over the run's typical steps. The stage that waits
        least is the one that sets the pace; it waits for the bubble.
    Cost: what that stage waits, at most the schedule's share of the step.
    Do: more micro-batches per step: a larger global batch, or smaller micro-batches while the GPU stays busy with them;
        fewer stages; several chunks of layers per stage; gradients of weights that fill the bubble.
    Flags: --global-batch-size, --micro-batch-size; --num-virtual-stages-per-pipeline-rank; --pipeline-schedule
        ZeroBubble; --pipeline-model-parallel-size.
    False alarm: a global batch that may not grow, of micro-batches that are as small as the GPU bears.
    """
    step_ms = run.steady_step_ms
    timed = facts.pipeline.stages if facts.pipeline else ()
    waits_ms = {stage.stage: stage.wait_ms for stage in timed}
    if len(waits_ms) < 2 or not facts.micro_batches or not step_ms:
        return could_not_look(Evidence(ONE_STAGE))
    schedule = PipelineSchedule(
        stages=len(waits_ms),
        micro_batches=facts.micro_batches,
        chunks=max(len(run.plan.stage.chunks), 1),
        is_zero_bubble=bool(run.plan.stage.splits_backward),
    )
    bubble = schedule.measure_bubble()
    cost_ms = min(min(waits_ms.values()), bubble * step_ms)
    waits = _describe_waits(waits_ms, step_ms)
    if bubble < MIN_BUBBLE or cost_ms < MATTERS * step_ms:
        return saw(waits)
    formula = f"{schedule.micro_batches} micro-batches on {schedule.stages} stages"
    if schedule.chunks > 1:
        formula += f" of {schedule.chunks} chunks"
    idles = Evidence(f"{formula}: the schedule makes each stage wait {bubble:.0%} of a step, however fast it is")
    remedies = _list_bubble_remedies(facts, schedule)
    advice = "; or ".join(remedy.advice for remedy in remedies)
    flags = tuple(flag for remedy in remedies for flag in remedy.flags)
    return build_time_finding(cost_ms, [idles, waits], advice, flags)


def _describe_waits(waits_ms: dict[int, float], step_ms: float) -> Evidence:
    """Name the stages that wait least and most.

    Args:
        waits_ms: by stage, what it waits for others per step, ms.
        step_ms: the time of a step, ms.
    """
    least = min(waits_ms, key=lambda stage: waits_ms[stage])
    most = max(waits_ms, key=lambda stage: waits_ms[stage])
    least_ms = f"{in_ms(waits_ms[least])} of a step of {in_ms(step_ms)}"
    most_ms = f"{in_ms(waits_ms[most])} (medians in steps.jsonl)"
    return Evidence(f"stage {least + 1} waits least, {least_ms}; stage {most + 1} most, {most_ms}")


def _list_bubble_remedies(facts: Facts, schedule: PipelineSchedule) -> list[Remedy]:
    """List what makes the bubble of a pipeline smaller, each with what it is expected to do."""
    flag = f"--global-batch-size {4 * (facts.plan.batch.final or 0)}"
    bubble = measure_bubble(schedule.stages, 4 * schedule.micro_batches, schedule.chunks)
    remedies = [Remedy(f"{flag} ({bubble:.0%} of a step)", (flag,))]
    if facts.smaller_micro_batch:
        flag = f"--micro-batch-size {facts.smaller_micro_batch}"
        remedies.append(Remedy(f"{flag} if the GPU stays busy", (flag,)))
    # ZeroBubble is possible only where the schedule is not interleaved
    if not schedule.is_zero_bubble and schedule.chunks == 1:
        flag = "--pipeline-schedule ZeroBubble"
        bubble = measure_bubble(schedule.stages, schedule.micro_batches, ZERO_BUBBLE_CHUNKS)
        remedies.append(Remedy(f"{flag} ({bubble:.0%} at best)", (flag,)))
    return remedies


MIN_SLOWER = 1.2  # times the other stages' time for each layer: a place that is slow


@rule("unbalanced-stages", "a stage of the pipeline that takes longer than the others", "pipeline", needs="run")
def find_unbalanced_stages(facts: Facts, run: Run) -> Finding | Observation:
    """A stage has more to do than the others, or does it more slowly.

    Meaning: every micro-batch goes through all stages, so that the slowest one sets the pace of all, however many
        micro-batches there are. The first stage has the embedding beside its layers, the last one the output layer and
        the loss, which with a large vocabulary take as long as several layers.
    Measured: every rank's median time in forward and backward over the run's typical steps, without its waiting for
        other stages; of a stage the usual rank's. What embedding and loss take is what the ends need beyond the time of
        their layers.
    Cost: by how much the slowest stage would be faster with the layers moved; where it has no more of them than others,
        what it takes longer than the median stage.
    Do: move layers away from the stage, with the flags that the finding names. A stage between the ends that has no
        more layers than others runs at a slow place: look at its GPUs, or swap the node.
    Flags: --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers, --pipeline-model-parallel-layout.
    False alarm: a machine that others use, too; ranks of one machine share its cores.
    """
    times = _measure_stages(run)
    ranks = run.ranks
    step_ms = run.steady_step_ms
    if times is None or ranks is None or not step_ms:
        return could_not_look(Evidence(ONE_STAGE))
    slowest = times.find_slowest()
    first_rank = run.stages.index(slowest)
    seen = Evidence(f"forward and backward of a step (layers): {times.describe()} (medians in steps.jsonl)")
    cause = None
    if len(run.plan.stage.chunks) <= 1:
        cause = _propose_layers(times, _excludes_ends(facts.settings))
    if cause is None or not _matters(cause.cost_ms, step_ms, ranks.without_core):
        cause = _suspect_place(times, first_rank)
    if cause is None or not _matters(cause.cost_ms, step_ms, ranks.without_core):
        return saw(seen)
    evidence = [seen, cause.evidence]
    doubt = "" if facts.on_gpu else facts.doubt_cores(range(len(ranks.step_ms)))
    if doubt:
        evidence.append(Evidence(doubt))
    remedy = cause.remedy
    return build_time_finding(
        cause.cost_ms,
        evidence,
        remedy.advice,
        remedy.flags,
        certain=not doubt,
        rank=first_rank,
        edit=_move_in_graph(facts, run, times, cause),
    )


def _excludes_ends(settings: Settings) -> bool:
    """Whether the run has flags that --decoder-first-pipeline-num-layers excludes."""
    accounted = settings.account_for_embedding_in_pipeline_split or settings.account_for_loss_in_pipeline_split
    return bool(settings.pipeline_model_parallel_layout or accounted)


@dataclass(frozen=True)
class StageLoads:
    """Computing of each stage of a pipeline in a step, without waiting for other stages."""

    own_ms: dict[int, float]  # by stage, of the usual one of its ranks
    layers: list[int]  # by stage

    def find_slowest(self) -> int:
        """Find the stage that takes longest."""
        return max(self.own_ms, key=lambda stage: self.own_ms[stage])

    def describe(self) -> str:
        """Describe it as in "stage 1 12.0 ms (6), stage 2 15.0 ms (6)"."""
        told = []
        for stage, ms in sorted(self.own_ms.items()):
            told.append(f"stage {stage + 1} {in_ms(ms)} ({self.layers[stage]})")
        return ", ".join(told)


def _measure_stages(run: Run) -> StageLoads | None:
    """Measure what the usual rank of each stage computes; None where that or its layers are not known of all."""
    forward_ms, backward_ms = measure_own_times(run)
    own_ms = {}
    for stage, ms in forward_ms.items():
        if stage in backward_ms:
            own_ms[stage] = ms + backward_ms[stage]
    layers = list(run.plan.stage_layers)
    if len(own_ms) < 2 or len(layers) != len(own_ms):
        return None
    return StageLoads(own_ms, layers)


@dataclass(frozen=True)
class _Cause:
    """A reason why a stage takes longer than the others, and what to do."""

    cost_ms: float  # per step
    evidence: Evidence
    remedy: Remedy
    layers: tuple[int, ...] = ()  # by stage, where moving them helps


def _matters(cost_ms: float, step_ms: float, without_core: tuple[int, float | None] | None) -> bool:
    """Tell whether a cost per step is large enough, and larger than chance makes it."""
    return cost_ms >= MATTERS * step_ms and not is_by_chance(cost_ms, without_core)


def _propose_layers(times: StageLoads, excludes_ends: bool) -> _Cause | None:
    """Find numbers of layers with which the slowest stage takes less.

    Args:
        times: What each stage computes, ms.
        excludes_ends: Whether the run has flags that --decoder-first-pipeline-num-layers excludes.

    Returns:
        The cause with its remedy; None where no other numbers of layers are better.
    """
    slowest = times.find_slowest()
    better, faster_ms = _move_layers(times)
    if better == times.layers:
        return None
    flags = [f"--decoder-{end}-pipeline-num-layers {number}" for end, number in _name_ends(better)]
    if excludes_ends:
        # the one flag that takes the place of all of them
        stages = "|".join(f"t*{number}" for number in better)
        flags = [f"--pipeline-model-parallel-layout 'E{stages}L'"]
    numbers = ", ".join(map(str, better))
    moved = Evidence(f"with {numbers} layers the slowest would take {in_ms(faster_ms)}")
    advice = f"move layers from stage {slowest + 1}: {' '.join(flags) or 'as many in each stage'}"
    return _Cause(times.own_ms[slowest] - faster_ms, moved, Remedy(advice, tuple(flags)), tuple(better))


def _move_in_graph(
    facts: Facts,
    run: Run,
    times: StageLoads,
    cause: _Cause,
) -> Edit | None:
    """Build the edit of stages with other layers; None where none are moved, or not all ranks have a trace.

    Args:
        facts: The run.
        run: The record of the run.
        times: What each stage computes.
        cause: Why one takes longer.
    """
    ranks = [one.time.rank for one in facts.graph_ranks]
    if not cause.layers or ranks != list(range(len(run.stages))):
        return None
    layers = [times.layers[stage] for stage in run.stages]
    wanted = [cause.layers[stage] for stage in run.stages]
    return Edit("move layers between stages", partial(move_layers, layers=layers, wanted=wanted))


def _suspect_place(times: StageLoads, rank: int) -> _Cause | None:
    """Suspect the GPUs of a stage between the ends that takes longer than others take for as many layers.

    Args:
        times: What each stage computes, ms.
        rank: The first rank of the slowest stage.

    Returns:
        The cause with its remedy; None for an end, which has more to do than its layers, and for a stage that is hardly
        slower.
    """
    slowest = times.find_slowest()
    layers = times.layers
    if slowest in (0, len(layers) - 1):
        return None
    others = [stage for stage in times.own_ms if stage != slowest and layers[stage]]
    others_ms = [times.own_ms[stage] / layers[stage] for stage in others]
    if not others_ms:
        return None
    usual_ms = median_low(others_ms) * layers[slowest]
    if times.own_ms[slowest] < MIN_SLOWER * usual_ms:
        return None
    longer_ms = times.own_ms[slowest] - usual_ms
    longer = f"takes {in_ms(longer_ms)} longer than they would"
    why = Evidence(f"stage {slowest + 1} has no more layers than others, and {longer}")
    advice = f"look at the GPUs of stage {slowest + 1} (rank {rank} on): clocks, another process; or swap the node"
    return _Cause(longer_ms, why, Remedy(advice))


def _name_ends(layers: list[int]) -> list[tuple[str, int]]:
    """Choose the ends whose number of layers has to be named, so that the other stages get equal shares of the rest."""
    first = layers[0]
    last = layers[-1]
    if len(layers) == 2:
        return [("last", last)] if first != last else []
    between = layers[1]
    ends = {"first": first, "last": last}
    return [(end, number) for end, number in ends.items() if number != between]


def _move_layers(times: StageLoads) -> tuple[list[int], float]:
    """Find the numbers of layers with which the slowest stage takes least.

    The ends may have other numbers of layers than the stages between them, which all have the same.

    Returns:
        The layers of each stage, and the time of the slowest one, ms.
    """
    own_ms = times.own_ms
    layers = times.layers
    stages = len(layers)
    with_layers = [stage for stage in range(stages) if layers[stage]]
    per_layer_ms = {stage: own_ms[stage] / layers[stage] for stage in with_layers}
    between_ms = [per_layer_ms[stage] for stage in with_layers if 0 < stage < stages - 1]
    layer_ms = median_low(between_ms) if between_ms else min(per_layer_ms.values())
    first_end_ms = max(own_ms[0] - layer_ms * layers[0], 0.0)
    last_end_ms = max(own_ms[stages - 1] - layer_ms * layers[-1], 0.0)
    best = layers
    best_ms = max(own_ms.values())
    for split in _list_splits(stages, sum(layers)):
        first_ms = first_end_ms + layer_ms * split[0]
        last_ms = last_end_ms + layer_ms * split[-1]
        middle_ms = layer_ms * split[1] if stages > 2 else 0.0
        slowest_ms = max(first_ms, last_ms, middle_ms)
        if slowest_ms < best_ms * (1 - 1e-6):
            best = split
            best_ms = slowest_ms
    return best, best_ms


def _list_splits(stages: int, num_layers: int) -> Iterator[list[int]]:
    """List the ways to divide layers among stages, all of which but the ends have the same number of them."""
    for first in range(1, num_layers):
        for last in range(1, num_layers - first + 1):
            rest = num_layers - first - last
            if stages == 2:
                if rest == 0:
                    yield [first, last]
            elif rest > 0 and rest % (stages - 2) == 0:
                yield [first, *[rest // (stages - 2)] * (stages - 2), last]
