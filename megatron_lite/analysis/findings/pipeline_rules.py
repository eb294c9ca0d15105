"""Stages of a pipeline that wait for each other."""

from statistics import median_low

from megatron_lite.analysis.findings.base import Evidence, Finding, build_time_finding, rule
from megatron_lite.analysis.rank_facts import MATTERS, in_ms
from megatron_lite.analysis.run.pipeline_times import measure_bubble, measure_own_times
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.run_facts import Facts
from megatron_lite.thresholds import is_by_chance

MIN_BUBBLE = 0.10  # of a step, by the schedule: with less, what stages wait has other causes


@rule(
    "pipeline-bubble",
    "stages that wait because there are few micro-batches",
    "phases",
    "pipeline",
    needs="run",
)
def find_pipeline_bubble(facts: Facts, run: Run) -> Finding | None:
    """Pipeline stages idle while the pipeline fills and drains.

    Meaning: the last stage has nothing to do until the first micro-batch has come through all others, and the first one waits in
        the same way at the end of the step. Of p stages, m micro-batches and v chunks per stage that is (p-1)/v of m + (p-1)/v slots
        for each stage, however fast it is (Narayanan et al. 2021, arXiv 2104.04473). With gradients of weights in between
        (ZeroBubble) a third of it at best.
    Measured: every rank's median time in the phase pipeline_wait over the run's typical steps. The stage that waits least is the
        one that sets the pace; it waits for the bubble.
    Cost: what that stage waits, at most the schedule's share of the step.
    Do: more micro-batches per step: a larger global batch, or smaller micro-batches while the GPU stays busy with them; fewer
        stages; several chunks of layers per stage; gradients of weights that fill the bubble.
    Flags: --global-batch-size, --micro-batch-size; --num-virtual-stages-per-pipeline-rank; --pipeline-schedule ZeroBubble;
        --pipeline-model-parallel-size.
    False alarm: a global batch that may not grow, of micro-batches that are as small as the GPU bears.
    """
    number, measured = facts.micro_batches, facts.pipeline
    waits_ms = {one.stage: one.wait_ms for one in measured.stages} if measured else {}
    stages, step_ms = len(waits_ms), run.steady_step_ms
    if stages < 2 or not number or not step_ms:
        return None
    pieces = max(len(run.plan.stage.chunks), 1)
    fills = facts.argument("pipeline_schedule") == "ZeroBubble"
    bubble = measure_bubble(stages, number, 3 * pieces if fills else pieces)
    cost_ms = min(min(waits_ms.values()), bubble * step_ms)
    if bubble < MIN_BUBBLE or cost_ms < MATTERS * step_ms:
        return None
    smaller, batch = facts.smaller_micro_batch, facts.plan.batch.final or 0
    flags = [f"--global-batch-size {4 * batch}"]
    if smaller:
        flags.append(f"--micro-batch-size {smaller}")
    if not fills and pieces == 1:
        flags.append("--pipeline-schedule ZeroBubble")
    options = [f"--global-batch-size {4 * batch} ({measure_bubble(stages, 4 * number, pieces):.0%} of a step)"]
    options += [f"{flags[1]} if the GPU stays busy"] if smaller else []
    options += [f"{flags[-1]} ({measure_bubble(stages, number, 3):.0%} at best)"] if not fills and pieces == 1 else []
    formula = f"{number} micro-batches on {stages} stages{f' of {pieces} chunks' if pieces > 1 else ''}"
    seen = Evidence(f"{formula}: the schedule makes each stage wait {bubble:.0%} of a step, however fast it is")
    least = min(waits_ms, key=lambda stage: waits_ms[stage])
    most = max(waits_ms, key=lambda stage: waits_ms[stage])
    seen_waits = Evidence(
        f"stage {least + 1} waits least, {in_ms(waits_ms[least])} of a step of {in_ms(step_ms)}; stage {most + 1} most, "
        f"{in_ms(waits_ms[most])} (medians in steps.jsonl)"
    )
    return build_time_finding(cost_ms, [seen, seen_waits], "; or ".join(options), tuple(flags))


MIN_SLOWER = 1.2  # times the other stages' time for each layer: a place that is slow


@rule("unbalanced-stages", "a stage of the pipeline that takes longer than the others", "pipeline", needs="run")
def find_unbalanced_stages(facts: Facts, run: Run) -> Finding | None:
    """One stage has more to do than the others, or does it more slowly.

    Meaning: every micro-batch goes through all stages, so that the slowest one sets the pace of all, however many micro-batches
        there are. The first stage has the embedding beside its layers, the last one the output layer and the loss, which with
        a large vocabulary take as long as several layers.
    Measured: every rank's median time in forward and backward over the run's typical steps, without its waiting for other
        stages; of a stage the usual rank's. What embedding and loss take is what the ends need beyond the time of their layers.
    Cost: by how much the slowest stage would be faster with the layers moved; where it has no more of them than others, what
        it takes longer than the median stage.
    Do: move layers away from the stage, with the flags that the finding names. A stage between the ends that has no more
        layers than others runs at a slow place: look at its GPUs, or swap the node.
    Flags: --decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers.
    False alarm: a machine that others use, too; ranks of one machine share its cores.
    """
    layers, own_ms, step_ms = list(run.plan.stage_layers), _measure_own(run), run.steady_step_ms
    if run.ranks is None or len(own_ms) < 2 or len(layers) != len(own_ms) or not step_ms:
        return None
    slowest = max(own_ms, key=lambda stage: own_ms[stage])
    others = [ms / layers[stage] for stage, ms in own_ms.items() if stage != slowest]
    takes = ", ".join(f"stage {stage + 1} {in_ms(ms)} ({layers[stage]})" for stage, ms in sorted(own_ms.items()))
    seen = Evidence(f"forward and backward of a step (layers): {takes} (medians in steps.jsonl)")
    doubt = "" if facts.on_gpu else facts.doubt_cores(range(len(run.ranks.step_ms)))
    doubts = [Evidence(doubt)] if doubt else []
    better, faster_ms = _move_layers(own_ms, layers) if len(run.plan.stage.chunks) <= 1 else (layers, own_ms[slowest])
    cost_ms, rank = own_ms[slowest] - faster_ms, run.stages.index(slowest)
    if better != layers and cost_ms >= MATTERS * step_ms and not is_by_chance(cost_ms, run.ranks.without_core):
        flags = [f"--decoder-{end}-pipeline-num-layers {number}" for end, number in _name_ends(better)]
        moved = Evidence(f"with {', '.join(map(str, better))} layers the slowest would take {in_ms(faster_ms)}")
        advice = f"move layers from stage {slowest + 1}: {' '.join(flags) or 'as many in each stage'}"
        return build_time_finding(cost_ms, [seen, moved, *doubts], advice, tuple(flags), not doubts, rank)
    usual = median_low(others) * layers[slowest]
    cost_ms = own_ms[slowest] - usual
    is_end = slowest in (0, len(layers) - 1)
    if is_end or own_ms[slowest] < MIN_SLOWER * usual or cost_ms < MATTERS * step_ms:
        return None
    if is_by_chance(cost_ms, run.ranks.without_core):
        return None
    longer = f"takes {in_ms(cost_ms)} longer than they would"
    why = Evidence(f"stage {slowest + 1} has no more layers than others, and {longer}")
    advice = f"look at the GPUs of stage {slowest + 1} (rank {rank} on): clocks, another process; or swap the node"
    return build_time_finding(cost_ms, [seen, why, *doubts], advice, (), not doubts, rank)


def _measure_own(run: Run) -> dict[int, float]:
    """By stage, what the usual one of its ranks computes per step, ms; {} where nothing tells."""
    forward_ms, backward_ms = measure_own_times(run)
    return {stage: forward_ms[stage] + backward_ms[stage] for stage in forward_ms if stage in backward_ms}


def _name_ends(layers: list[int]) -> list[tuple[str, int]]:
    """Those that have to be named, so that the others get equal shares of the rest."""
    if len(layers) == 2:
        return [("last", layers[1])] if layers[0] != layers[1] else []
    return [(end, number) for end, number in (("first", layers[0]), ("last", layers[-1])) if number != layers[1]]


def _move_layers(own_ms: dict[int, float], layers: list[int]) -> tuple[list[int], float]:
    """(layers of each stage with which the slowest takes least, its time): the ends may have other numbers than those between."""
    stages, number = len(layers), sum(layers)
    between = [own_ms[stage] / layers[stage] for stage in range(1, stages - 1)]
    each = median_low(between) if between else min(own_ms[stage] / layers[stage] for stage in range(stages))
    ends = [max(own_ms[stage] - each * layers[stage], 0.0) for stage in (0, stages - 1)]
    best = layers, max(own_ms.values())
    for first in range(1, number):
        for last in range(1, number - first + 1):
            rest = number - first - last
            if stages == 2 and rest or stages > 2 and (rest % (stages - 2) or not rest):
                continue
            inner = rest // (stages - 2) if stages > 2 else 0
            slowest = max(ends[0] + each * first, ends[1] + each * last, each * inner)
            if slowest < best[1] * (1 - 1e-6):
                best = [first, *[inner] * (stages - 2), last], slowest
    return best
