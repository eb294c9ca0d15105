"""Files that `megatron-lite plan` writes: a page, the terminal's sections with charts, and JSON (docs/planning.md)."""

import re
from dataclasses import replace
from typing import Any

from megatron_lite.formats.run_record import MemoryPrediction
from megatron_lite.planner.plan_results import (
    MAX_MICRO_BATCHES,
    PLAN_SCHEMA,
    Generating,
    Outlook,
    PlanReport,
    StageOutlook,
)
from megatron_lite.planner.search import Candidate, Search
from megatron_lite.planner.what_if import Fit, Variant
from megatron_lite.report import draw, palette
from megatron_lite.report.figure import Axis, Curve, CurveChart, Figure, Look
from megatron_lite.report.html import render_page
from megatron_lite.report.json_file import plain
from megatron_lite.report.plan_search import name_layout
from megatron_lite.report.plan_terminal import KIND_COLORS, build_plan_sections, judge_plan, sum_kinds
from megatron_lite.units import GIB

# what ends one clause of a verdict; a search names a layout, then the memory it takes
CLAUSES = re.compile(r"(?<=%\)), |; |: (?=peak [\d.,]+ \w+ of )")


def plan_page(report: PlanReport) -> str:
    """Write a plan as the HTML of one page."""
    charts = {
        "stages": memory_by_stage,
        "schedule": schedule_of_plan,
        "layouts": time_against_memory,
    }
    return render_page(
        list(build_plan_sections(report, why=True)),
        {key: make(report) for key, make in charts.items()},
        title=f"{report.subject.title}: {report.subject.facts}",
        command="plan",
        sentences=_split_verdicts(judge_plan(report)),
        confidence="before the run: memory is an estimate in closed form, times are lower bounds",
        gaps_title="What was assumed",
        gaps=report.subject.notes,
        numbers="--json FILE",
    )


def _split_verdicts(texts: list[str]) -> list[str]:
    """Split the first GPU's verdict into clauses: the first of them is a headline, whether it fits and with how much
    of the memory. Verdicts on other GPUs follow whole."""
    return [*CLAUSES.split(texts[0]), *texts[1:]]


def memory_by_stage(report: PlanReport) -> Figure | None:
    """Draw a bar per stage, in order, of what its peak is made of, and the GPU's memory as a line."""
    training = report.training
    if not training or not training.stages:
        return None
    stacks = {}
    for one in training.stages:
        held = sum_kinds(one.memory)
        stacks[f"stage {one.plan.stage.number + 1}"] = {kind: held[kind] / GIB for kind in held}
    chart = draw.stacks("What one GPU of each stage holds at its peak", stacks, KIND_COLORS, "GiB")
    if not training.outlooks:
        return chart
    room = training.outlooks[0].room_bytes / GIB
    return replace(chart, description=f"{chart.description}; dotted: the GPU's memory", limit=room)


def schedule_of_plan(report: PlanReport) -> Figure | None:
    """Draw how the pipeline fills and drains, with few micro-batches."""
    training = report.training
    if training is None or not training.stages:
        return None
    plan = report.subject.plan
    micro_batches = min(plan.final_micro_batches, MAX_MICRO_BATCHES * len(training.stages))
    actions = training.simulate_stages(micro_batches)
    return draw.schedule(actions, f"ms at best, of {micro_batches} micro-batches")


def time_against_memory(report: PlanReport) -> Figure | None:
    """Draw every layout that fits as a point, time over memory; those that none other beats in both are joined."""
    found = report.search
    if found is None or not found.fitting:
        return None
    curves = [
        _build_curve(list(found.fitting), "fits", palette.GREY, Look.POINTS),
        _build_curve(found.front, "none is as fast with less memory", palette.BLUE, Look.JOINED_POINTS),
    ]
    description = f"Least time and memory of {len(found.fitting)} variants that fit into one {found.processor.name}"
    return CurveChart(description, curves, Axis("GiB at the peak"), Axis("ms per step at best", is_log=True), 280)


def _build_curve(candidates: list[Candidate], name: str, color: str, look: Look) -> Curve:
    """Build a curve of layouts, time over memory.

    Args:
        candidates: the layouts.
        name: what the legend calls them.
        color: the color of points and lines.
        look: whether the points are joined.
    """
    gib = []
    steps_ms = []
    texts = []
    for one in candidates:
        gib.append(one.peak_bytes / GIB)
        steps_ms.append(one.step_ms)
        micro_batch = one.plan.args.training.micro_batch_size
        texts.append(f"{name_layout(one.plan)}, micro-batch {micro_batch}")
    return Curve(name, gib, steps_ms, color, look, width=1.0, texts=texts)


# --- JSON


def as_json(report: PlanReport) -> dict[str, Any]:
    """Write a plan as plain dicts, lists, numbers and strings; None for what is not known."""
    subject = report.subject
    training = report.training
    assert training is not None  # the JSON has it whatever was asked
    generating = report.generating
    return {
        "schema": PLAN_SCHEMA,
        "title": subject.title,
        "facts": subject.facts,
        "verdicts": judge_plan(report),
        "notes": list(subject.notes),
        "plan": plain(subject.plan),
        "parameters": subject.parts,
        "flops_per_token": {
            "causal": subject.count_flops(causal=True),
            "full": subject.count_flops(causal=False),
        },
        "memory": _memory_as_json(training.memory),
        "margin": subject.margin,
        "gpus": [_outlook_as_json(outlook, generating) for outlook in training.outlooks],
        "what_if": [_variant_as_json(variant) for variant in training.variants],
        "fit": _fit_as_json(training.fit),
        "inference": plain(generating.prediction) if generating else None,
        "exact": plain(report.fastest or training.exact),
        "search": _search_as_json(report.search),
        "stages": [] if generating else [_stage_as_json(stage) for stage in training.stages],
        "hints": plain(subject.hints),
    }


def _memory_as_json(memory: MemoryPrediction) -> dict[str, Any]:
    """Write predicted memory as JSON: the peak, and every moment with its rows."""
    return {
        "peak_bytes": memory.peak.num_bytes,
        "phase": memory.peak.phase,
        "where": memory.peak.where,
        "is_estimate": True,
        "moments": [plain(moment) | {"num_bytes": moment.num_bytes} for moment in memory.moments],
    }


def _outlook_as_json(one: Outlook, generating: Generating | None) -> dict[str, Any]:
    """Write as JSON a training on one kind of GPU, and generating on it where that was asked."""
    time = plain(one.time)
    if one.time.peak_tflops:
        time |= {"step_ms": one.time.step_ms, "tokens_per_s": one.time.tokens_per_s}
    duration = None
    if one.duration:
        length = one.duration
        duration = plain(length)
        duration |= {
            "seconds": length.seconds,
            "days": length.days,
            "gpu_hours": length.gpu_hours,
        }
    inferences = dict(generating.on_gpus) if generating else {}
    return {
        "processor": plain(one.processor),
        "room_bytes": one.room_bytes,
        "peak_bytes": one.memory.peak.num_bytes,
        "time": time,
        "duration": duration,
        "fit": _fit_as_json(one.fit),
        "inference": plain(inferences.get(one.processor)),
    }


def _stage_as_json(one: StageOutlook) -> dict[str, Any]:
    peak = one.memory.peak
    return {
        "stage": one.plan.stage.number,
        "rank": one.plan.world.rank,
        "layers": one.plan.stage.layers,
        "peak_bytes": peak.num_bytes,
        "phase": peak.phase,
        "where": peak.where,
        "rows": plain(peak.rows),
        "time": plain(one.time),
        "exact": plain(one.exact),
    }


def _variant_as_json(one: Variant | None) -> dict[str, Any] | None:
    if one is None:
        return None
    step_ms = None
    if one.time and one.time.peak_tflops:
        step_ms = one.time.step_ms
    return {
        "add": list(one.add),
        "drop": list(one.drop),
        "peak_bytes": one.peak_bytes,
        "step_ms": step_ms,
    }


def _fit_as_json(found: Fit | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "gpu": found.processor.name,
        "budget_bytes": found.budget_bytes,
        "margin": found.margin,
        "fits": found.fits,
        "given": _variant_as_json(found.given),
        "found": _variant_as_json(found.found),
        "least": _variant_as_json(found.least),
        "remedy": _variant_as_json(found.remedy),
    }


def _search_as_json(found: Search | None) -> dict[str, Any] | None:
    """Write a search as JSON: the fastest of each layout, and the front."""
    if found is None:
        return None
    return {
        "gpu": found.processor.name,
        "budget_bytes": found.budget_bytes,
        "margin": found.margin,
        "tried": found.tried,
        "fitting": len(found.fitting),
        "layouts": [_candidate_as_json(one) for one in found.best_of_layouts],
        "front": [_candidate_as_json(one) for one in found.front],
    }


def _candidate_as_json(one: Candidate) -> dict[str, Any]:
    sizes = zip(("tensor", "context", "pipeline", "data", "expert", "expert_tensor"), one.plan.layout.sizes)
    rows = one.time.rows if one.time else ()
    return {
        **dict(sizes),
        "micro_batch_size": one.plan.args.training.micro_batch_size,
        "add": list(one.changed.add),
        "drop": list(one.changed.drop),
        "peak_bytes": one.peak_bytes,
        "step_ms": one.step_ms,
        "rows": {row.name: row.ms for row in rows},
    }
