"""Stages of a pipeline that wait for each other."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median_low

from megatron_lite.analysis.findings.base import (
    Evidence,
    Finding,
    Observation,
    build_time_finding,
    could_not_look,
    rule,
    saw,
)
from megatron_lite.analysis.rank_facts import MATTERS, in_ms
from megatron_lite.analysis.run.pipeline_times import measure_own_times
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.formats.run_record import Settings
from megatron_lite.pipeline_schedule import measure_bubble
from megatron_lite.thresholds import is_by_chance

MIN_BUBBLE = 0.10  # of a step, by the schedule: with less, what stages wait has other causes


ONE_STAGE = "no typical steps of several stages of a pipeline"


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
    num_micro_batches = facts.micro_batches
    waits_ms = {stage.stage: stage.wait_ms for stage in facts.pipeline.stages} if facts.pipeline else {}
    stages = len(waits_ms)
    step_ms = run.steady_step_ms
    if stages < 2 or not num_micro_batches or not step_ms:
        return could_not_look(Evidence(ONE_STAGE))
    chunks = max(len(run.plan.stage.chunks), 1)
    is_zero_bubble = bool(run.plan.stage.splits_backward)
    # gradients of weights fill two thirds of the bubble at best, as three times the chunks would
    bubble = measure_bubble(stages, num_micro_batches, 3 * chunks if is_zero_bubble else chunks)
    cost_ms = min(min(waits_ms.values()), bubble * step_ms)
    if bubble < MIN_BUBBLE or cost_ms < MATTERS * step_ms:
        return saw(_describe_waits(waits_ms, step_ms))
    formula = f"{num_micro_batches} micro-batches on {stages} stages"
    if chunks > 1:
        formula += f" of {chunks} chunks"
    seen = [
        Evidence(f"{formula}: the schedule makes each stage wait {bubble:.0%} of a step, however fast it is"),
        _describe_waits(waits_ms, step_ms),
    ]
    # ZeroBubble is proposed only where the schedule is not interleaved
    may_fill = not is_zero_bubble and chunks == 1
    flags, options = _list_bubble_remedies(facts, stages, num_micro_batches, chunks, may_fill)
    return build_time_finding(cost_ms, seen, "; or ".join(options), tuple(flags))


def _describe_waits(waits_ms: dict[int, float], step_ms: float) -> Evidence:
    """Name the stages that wait least and most.

    Args:
        waits_ms: by stage, what it waits for others per step, ms.
        step_ms: the time of a step, ms.
    """
    least = min(waits_ms, key=lambda stage: waits_ms[stage])
    most = max(waits_ms, key=lambda stage: waits_ms[stage])
    return Evidence(
        f"stage {least + 1} waits least, {in_ms(waits_ms[least])} of a step of {in_ms(step_ms)}; "
        f"stage {most + 1} most, "
        f"{in_ms(waits_ms[most])} (medians in steps.jsonl)"
    )


def _list_bubble_remedies(
    facts: Facts, stages: int, num_micro_batches: int, chunks: int, may_fill: bool
) -> tuple[list[str], list[str]]:
    """List what makes the bubble of a pipeline smaller.

    Args:
        facts: the run, whose batch the flags change.
        stages: stages of the pipeline.
        num_micro_batches: micro-batches of a step.
        chunks: chunks of layers of a stage.
        may_fill: whether gradients of weights may fill the bubble and do not yet.

    Returns:
        Flags, and for each one the same flag with what it is expected to do.
    """
    larger_batch = f"--global-batch-size {4 * (facts.plan.batch.final or 0)}"
    flags = [larger_batch]
    options = [f"{larger_batch} ({measure_bubble(stages, 4 * num_micro_batches, chunks):.0%} of a step)"]
    if facts.smaller_micro_batch:
        flag = f"--micro-batch-size {facts.smaller_micro_batch}"
        flags.append(flag)
        options.append(f"{flag} if the GPU stays busy")
    if may_fill:
        flag = "--pipeline-schedule ZeroBubble"
        flags.append(flag)
        options.append(f"{flag} ({measure_bubble(stages, num_micro_batches, 3):.0%} at best)")
    return flags, options


MIN_SLOWER = 1.2  # times the other stages' time for each layer: a place that is slow


@rule("unbalanced-stages", "a stage of the pipeline that takes longer than the others", "pipeline", needs="run")
def find_unbalanced_stages(facts: Facts, run: Run) -> Finding | Observation:
    """One stage has more to do than the others, or does it more slowly.

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
    layers = list(run.plan.stage_layers)
    own_ms = _measure_own(run)
    step_ms = run.steady_step_ms
    if run.ranks is None or len(own_ms) < 2 or len(layers) != len(own_ms) or not step_ms:
        return could_not_look(Evidence(ONE_STAGE))
    slowest = max(own_ms, key=lambda stage: own_ms[stage])
    takes = ", ".join(f"stage {stage + 1} {in_ms(ms)} ({layers[stage]})" for stage, ms in sorted(own_ms.items()))
    seen = Evidence(f"forward and backward of a step (layers): {takes} (medians in steps.jsonl)")
    doubt = "" if facts.on_gpu else facts.doubt_cores(range(len(run.ranks.step_ms)))
    cause = None
    if len(run.plan.stage.chunks) <= 1:
        cause = _propose_layers(own_ms, layers, slowest, _is_drawn(facts.settings))
    if cause is None or not _matters(cause.cost_ms, step_ms, run.ranks.without_core):
        cause = _suspect_place(own_ms, layers, slowest, run.stages.index(slowest))
    if cause is None or not _matters(cause.cost_ms, step_ms, run.ranks.without_core):
        return saw(seen)
    evidence = [seen, cause.evidence]
    if doubt:
        evidence.append(Evidence(doubt))
    return build_time_finding(cause.cost_ms, evidence, cause.advice, cause.flags, not doubt, run.stages.index(slowest))


def _is_drawn(settings: Settings) -> bool:
    """Whether flags decide how many layers each stage has."""
    accounted = settings.account_for_embedding_in_pipeline_split or settings.account_for_loss_in_pipeline_split
    return bool(settings.pipeline_model_parallel_layout or accounted)


@dataclass(frozen=True)
class _Cause:
    """Why a stage takes longer than the others, and what to do."""

    cost_ms: float  # per step
    evidence: Evidence
    advice: str
    flags: tuple[str, ...] = ()


def _matters(cost_ms: float, step_ms: float, without_core: tuple[int, float | None] | None) -> bool:
    """Tell whether a cost per step is large enough, and larger than chance makes it."""
    return cost_ms >= MATTERS * step_ms and not is_by_chance(cost_ms, without_core)


def _propose_layers(own_ms: dict[int, float], layers: list[int], slowest: int, is_drawn: bool) -> _Cause | None:
    """Find numbers of layers with which the slowest stage takes less.

    Args:
        own_ms: by stage, what the usual one of its ranks computes per step, ms.
        layers: by stage, its number of layers.
        slowest: the stage that takes longest.
        is_drawn: flags that --decoder-first-pipeline-num-layers excludes share out the layers.

    Returns:
        The cause with its remedy; None where no other numbers of layers are better.
    """
    better, faster_ms = _move_layers(own_ms, layers)
    if better == layers:
        return None
    flags = [f"--decoder-{end}-pipeline-num-layers {number}" for end, number in _name_ends(better)]
    if is_drawn:
        # the one flag that takes the place of all of them
        flags = [f"--pipeline-model-parallel-layout 'E{'|'.join(f't*{number}' for number in better)}L'"]
    numbers = ", ".join(str(number) for number in better)
    moved = Evidence(f"with {numbers} layers the slowest would take {in_ms(faster_ms)}")
    advice = f"move layers from stage {slowest + 1}: {' '.join(flags) or 'as many in each stage'}"
    return _Cause(own_ms[slowest] - faster_ms, moved, advice, tuple(flags))


def _suspect_place(own_ms: dict[int, float], layers: list[int], slowest: int, rank: int) -> _Cause | None:
    """Suspect the GPUs of a stage between the ends that takes longer than others take for as many layers.

    Args:
        own_ms: by stage, what the usual one of its ranks computes per step, ms.
        layers: by stage, its number of layers.
        slowest: the stage that takes longest.
        rank: the first rank of that stage.

    Returns:
        The cause with its remedy; None for an end, which has more to do than its layers, and for a stage that is hardly
        slower.
    """
    if slowest in (0, len(layers) - 1):
        return None
    others_ms = [ms / layers[stage] for stage, ms in own_ms.items() if stage != slowest and layers[stage]]
    if not others_ms:
        return None
    usual_ms = median_low(others_ms) * layers[slowest]
    if own_ms[slowest] < MIN_SLOWER * usual_ms:
        return None
    longer_ms = own_ms[slowest] - usual_ms
    longer = f"takes {in_ms(longer_ms)} longer than they would"
    why = Evidence(f"stage {slowest + 1} has no more layers than others, and {longer}")
    advice = f"look at the GPUs of stage {slowest + 1} (rank {rank} on): clocks, another process; or swap the node"
    return _Cause(longer_ms, why, advice)


def _measure_own(run: Run) -> dict[int, float]:
    """Measure by stage what the usual one of its ranks computes per step, ms; {} where nothing tells."""
    forward_ms, backward_ms = measure_own_times(run)
    return {stage: forward_ms[stage] + backward_ms[stage] for stage in forward_ms if stage in backward_ms}


def _name_ends(layers: list[int]) -> list[tuple[str, int]]:
    """Choose the ends whose number of layers has to be named, so that the other stages get equal shares of the rest."""
    first, last = layers[0], layers[-1]
    if len(layers) == 2:
        return [("last", last)] if first != last else []
    between = layers[1]
    return [(end, number) for end, number in (("first", first), ("last", last)) if number != between]


def _move_layers(own_ms: dict[int, float], layers: list[int]) -> tuple[list[int], float]:
    """Find the numbers of layers with which the slowest stage takes least.

    The ends may have other numbers of layers than the stages between them, which all have the same.

    Returns:
        The layers of each stage, and the time of the slowest one, ms.
    """
    stages = len(layers)
    per_layer_ms = {stage: own_ms[stage] / layers[stage] for stage in range(stages) if layers[stage]}
    between_ms = [ms for stage, ms in per_layer_ms.items() if 0 < stage < stages - 1]
    layer_ms = median_low(between_ms) if between_ms else min(per_layer_ms.values())
    first_end_ms = max(own_ms[0] - layer_ms * layers[0], 0.0)
    last_end_ms = max(own_ms[stages - 1] - layer_ms * layers[-1], 0.0)
    best = layers
    best_ms = max(own_ms.values())
    for split in _list_splits(stages, sum(layers)):
        between = split[1] if stages > 2 else 0
        slowest_ms = max(first_end_ms + layer_ms * split[0], last_end_ms + layer_ms * split[-1], layer_ms * between)
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
