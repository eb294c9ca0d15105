"""Stages of a pipeline that wait for each other."""

import math
from collections import defaultdict

from megatron_lite.analysis.findings.base import MATTERS, Evidence, Finding, build_time_finding, in_ms, rule
from megatron_lite.analysis.findings.run_settings import argument, micro_batches, part, whole
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.phases import Phase

MIN_BUBBLE = 0.10  # of a step, by the schedule: with less, what stages wait has other causes


@rule("pipeline-bubble", "stages that wait because micro-batches are few")
def find_pipeline_bubble(facts: Facts) -> Finding | None:
    """Stages of a pipeline stand still while it fills and drains.

    Meaning: the last stage has nothing to do until the first micro-batch has come through all others, and the first one waits in
        the same way at the end of the step. Of p stages, m micro-batches and v chunks per stage that is (p-1)/v of m + (p-1)/v turns
        for each stage, however fast it is (Narayanan et al. 2021, arXiv 2104.04473). With gradients of weights in between
        (ZeroBubble) a third of it at best.
    Measured: every rank's median time in the phase pipeline_wait over the run's ordinary steps. The stage that waits least is the
        one that sets the pace; it waits for the bubble.
    Cost: what that stage waits, at most the schedule's share of the step.
    Do: more micro-batches per step: a larger global batch, or smaller micro-batches while the GPU stays busy with them; fewer
        stages; several chunks of layers per stage; gradients of weights that fill the bubble.
    Flags: --global-batch-size, --micro-batch-size; --num-virtual-stages-per-pipeline-rank; --pipeline-schedule ZeroBubble;
        --pipeline-model-parallel-size.
    False alarm: a global batch that may not grow, of micro-batches that are as small as the GPU bears.
    """
    run, number = facts.run, micro_batches(facts)
    waits_ms = _measure_waits(run) if run is not None else {}
    stages, step_ms = len(waits_ms), run.steady_step_ms if run is not None else None
    if stages < 2 or not number or not step_ms:
        return None
    chunks = part(facts, "stage", "chunks")
    pieces = max(len(chunks), 1) if isinstance(chunks, list) else 1
    fills = argument(facts, "pipeline_schedule") == "ZeroBubble"
    bubble = _measure_bubble(stages, number, 3 * pieces if fills else pieces)
    cost_ms = min(min(waits_ms.values()), bubble * step_ms)
    if bubble < MIN_BUBBLE or cost_ms < MATTERS * step_ms:
        return None
    size, batch = whole(argument(facts, "micro_batch_size")) or 1, whole(part(facts, "batch", "final")) or 0
    flags = [f"--global-batch-size {4 * batch}"]
    if size > 1:
        flags.append(f"--micro-batch-size {size // 2}")
    if not fills and pieces == 1:
        flags.append("--pipeline-schedule ZeroBubble")
    options = [f"--global-batch-size {4 * batch} ({_measure_bubble(stages, 4 * number, pieces):.0%} of a step)"]
    options += [f"{flags[1]} if the GPU stays busy"] if size > 1 else []
    options += [f"{flags[-1]} ({_measure_bubble(stages, number, 3):.0%} at best)"] if not fills and pieces == 1 else []
    formula = f"{number} micro-batches on {stages} stages{f' of {pieces} chunks' if pieces > 1 else ''}"
    seen = Evidence(f"{formula}: by the schedule each stage waits {bubble:.0%} of a step, however fast it is")
    least = min(waits_ms, key=lambda stage: waits_ms[stage])
    most = max(waits_ms, key=lambda stage: waits_ms[stage])
    measured = Evidence(
        f"stage {least + 1} waits least, {in_ms(waits_ms[least])} of a step of {in_ms(step_ms)}; stage {most + 1} most, "
        f"{in_ms(waits_ms[most])} (medians in steps.jsonl)"
    )
    return build_time_finding(cost_ms, [seen, measured], "; or ".join(options), tuple(flags))


def _measure_waits(run: Run) -> dict[int, float]:
    """By stage, what its ranks wait for other stages per step, ms; {} where nothing tells."""
    waits = run.ranks.own_ms(Phase.PIPELINE_WAIT.value) if run.ranks is not None else ()
    by_stage: dict[int, list[float]] = defaultdict(list)
    for stage, ms in zip(run.stages, waits):
        by_stage[stage].append(ms)
    means = {stage: sum(own) / len(own) for stage, own in by_stage.items()}
    return {} if any(map(math.isnan, means.values())) else means


def _measure_bubble(stages: int, number: int, pieces: int) -> float:
    """Share of a step that a stage waits by the schedule, with so many micro-batches."""
    waited = (stages - 1) / pieces
    return waited / (number + waited)
