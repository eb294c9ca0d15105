"""A plan as a page: the terminal's sections, with pictures of memory by stage, of the schedule, and of all layouts that fit."""

from typing import Any

from megatron_lite.estimate.search import Candidate, Search
from megatron_lite.report.charts import Figure, axis, draw_schedule, layout, log_axis
from megatron_lite.report.html import render_page
from megatron_lite.report.plan_figures import MAX_MICRO_BATCHES, PlanReport, simulate_stages
from megatron_lite.report.plan_search import name_layout
from megatron_lite.report.plan_terminal import (
    ACTIVATIONS,
    LOSS,
    OTHER,
    STATES,
    build_plan_sections,
    sum_kinds,
    verdicts,
)
from megatron_lite.report.text import BLUE, CARD, GREY, ORANGE, PURPLE, VERMILION
from megatron_lite.units import GIB

KIND_COLORS = {STATES: BLUE, ACTIVATIONS: ORANGE, LOSS: VERMILION, OTHER: GREY}


def plan_page(report: PlanReport) -> str:
    """The whole page as text."""
    makers = {"stages": memory_by_stage, "schedule": schedule_of_plan, "layouts": time_against_memory}
    made = {key: make(report) for key, make in makers.items()}
    return render_page(
        list(build_plan_sections(report, why=True)),
        {key: figure for key, figure in made.items() if figure is not None},
        title=f"{report.title}: {report.facts}",
        command="plan",
        sentences=verdicts(report),
        inconclusive=False,
        confidence="before the run: memory is an estimate in closed form, times are lower bounds",
        tiles=[],
        about={},
        of_gaps="What was assumed",
        gaps=report.notes,
        numbers="--json FILE",
    )


def memory_by_stage(report: PlanReport) -> Figure | None:
    """A bar per stage, in order, of what its peak is made of; the GPU's memory as a line."""
    if not report.stages:
        return None
    sums = [sum_kinds(one.memory) for one in report.stages]
    data: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": kind,
            "x": [f"stage {one.plan.stage.number + 1}" for one in report.stages],
            "y": [of_stage[kind] / GIB for of_stage in sums],
            "marker": {"color": color},
            "hovertemplate": f"{kind}: %{{y:.2f}} GiB<extra>%{{x}}</extra>",
        }
        for kind, color in KIND_COLORS.items()
    ]
    look = layout(300, axis(type="category", showgrid=False), axis("GiB"), barmode="stack", bargap=0.3)
    if report.outlooks:
        room = report.outlooks[0].room_bytes / GIB
        look["shapes"] = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": room,
                "y1": room,
                "line": {"color": PURPLE, "dash": "dot"},
            }
        ]
    return Figure("What one GPU of each stage holds at its peak; dotted: the GPU's memory", data, look)


def schedule_of_plan(report: PlanReport) -> Figure | None:
    """Of few micro-batches: how the pipeline fills and drains."""
    stages, plan = report.stages, report.plan
    micro_batches = min(plan.batch.final // plan.samples_per_pass, MAX_MICRO_BATCHES * len(stages))
    turns = simulate_stages(stages, micro_batches) if stages else []
    return draw_schedule(turns, f"ms at best, of {micro_batches} micro-batches")


def time_against_memory(report: PlanReport) -> Figure | None:
    """Every layout that fits as a point; those that none other beats in both are joined."""
    found = report.search
    if found is None or not found.fitting:
        return None
    data = [
        _draw_points(list(found.fitting), "fits", GREY, "markers"),
        _draw_points(found.front, "none is as fast with less memory", BLUE, "lines+markers"),
    ]
    times = [one.step_ms for one in found.fitting]
    look = layout(340, axis("GiB at the peak"), log_axis("ms per step at best", min(times), max(times)))
    return Figure(_describe(found), data, look)


def _draw_points(candidates: list[Candidate], name: str, color: str, mode: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": [one.peak_bytes / GIB for one in candidates],
        "y": [one.step_ms for one in candidates],
        "text": [
            f"{name_layout(one.plan)}, micro-batch {one.plan.args.training.micro_batch_size}" for one in candidates
        ],
        "marker": {"color": color, "size": 7, "line": {"color": CARD, "width": 1}},
        "line": {"color": color, "width": 1},
        "hovertemplate": "%{text}: %{y:,.1f} ms, %{x:.2f} GiB<extra></extra>",
    }


def _describe(found: Search) -> str:
    return f"Least time and memory of {len(found.fitting)} variants that fit into one {found.processor.name}"
