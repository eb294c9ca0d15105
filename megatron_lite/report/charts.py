"""The charts of a report, and the section that each belongs to."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.kernels.kernel_results import RooflineRow
from megatron_lite.analysis.memory.memory_results import CurvePoint, Snapshot
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.time.time_results import RankTime, Span
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.report import draw, palette
from megatron_lite.report.figure import Arrangement, Axis, BarChart, Bars, Curve, CurveChart, Figure, Look, Mark
from megatron_lite.report.phase_colors import color_phases
from megatron_lite.report.section import READS_AS_ZERO
from megatron_lite.report.text import fit
from megatron_lite.units import significant, size

# --- memory over time, by what holds it


def build_memory_curve(report: Report) -> CurveChart | None:
    """Stack the categories over time, with the reserved bytes above and the peak marked; None without a snapshot."""
    snapshot = report.facts.highest_snapshot
    if snapshot is None or len(snapshot.curve) < 2:
        return None
    moments = thin_moments(snapshot.curve, draw.MAX_POINTS)
    unit, bytes_of_unit = draw.choose_unit(snapshot.peak_bytes)
    seconds = [moment.time_us / 1e6 for moment in moments]
    curves = []
    for number, category in enumerate(CATEGORIES):
        held = [moment.by_category[number] / bytes_of_unit for moment in moments]
        if any(held):
            color = palette.HELD[category]
            curves.append(Curve(category, seconds, held, color, Look.AREA))
    reserved = [moment.reserved / bytes_of_unit for moment in moments]
    if any(reserved):
        curves.append(Curve("reserved", seconds, reserved, palette.INK, Look.STAIRS, is_dotted=True))
    return CurveChart(
        description="Allocated memory over time by category",
        curves=curves,
        x=Axis("seconds since the record began"),
        y=Axis(unit, lowest=0.0),
        plot_px=280,
        mark=_mark_peak(snapshot, bytes_of_unit),
    )


def _mark_peak(snapshot: Snapshot, bytes_of_unit: int) -> Mark:
    """Mark the peak with its size and, where a phase has a plain name, its phase."""
    text = f"peak {size(snapshot.peak_bytes)}"
    if snapshot.peak_phase.isidentifier():
        text += f" in {snapshot.peak_phase}"
    return Mark(snapshot.peak_time_us / 1e6, snapshot.peak_bytes / bytes_of_unit, text)


def thin_moments(moments: Sequence[CurvePoint], limit: int) -> list[CurvePoint]:
    """Reduce moments to at most `limit`: of each stretch the one with the most allocated, so that no peak is lost."""
    if len(moments) <= limit:
        return list(moments)
    edges = [number * len(moments) // limit for number in range(limit + 1)]
    highest = []
    for begin, end in pairwise(edges):
        stretch = moments[begin:end]
        highest.append(max(stretch, key=lambda moment: moment.allocated))
    return highest


# --- operators by arithmetic intensity against the hardware's two limits

MAX_CHART_SHAPES = 300
MAX_PX = 34  # of the point that takes longest, across
MIN_PX = 6


def build_roofline(report: Report) -> CurveChart | None:
    """Place a point per operator and shape, as large as its time, below the hardware's limits; None if those are
    unknown."""
    rank = report.facts.critical
    known = rank.kernels.roofline if rank else ()
    rows = [row for row in known if row.flops > 0 and row.num_bytes > 0 and row.ms > 0]
    rows.sort(key=lambda row: -row.ms)
    rows = rows[:MAX_CHART_SHAPES]
    if len(rows) < 2 or not any(row.bound_ms for row in rows):
        return None
    intensities = list(map(_compute_intensity, rows))
    # some room at both ends
    lowest = min(intensities) / 2
    highest = max(intensities) * 2
    points = _build_role_curves(rows)
    limits = _build_ceilings(known, lowest, highest)
    return CurveChart(
        description="How fast operators are against what memory and arithmetic units allow",
        curves=[*points, *limits],
        x=Axis("FLOP per byte", is_log=True, lowest=lowest, highest=highest),
        y=Axis("TFLOP/s", is_log=True),
        plot_px=330,
    )


def _build_role_curves(rows: Sequence[RooflineRow]) -> list[Curve]:
    """Build the points of operators, a curve per role. `rows`: the longest one first."""
    longest_ms = rows[0].ms
    curves = []
    for role in dict.fromkeys(row.role for row in rows):
        own = [row for row in rows if row.role == role]
        curve = Curve(
            name=str(role),
            x=list(map(_compute_intensity, own)),
            y=[_compute_tflops(row, row.ms) for row in own],
            color=palette.ROLES[role],
            look=Look.POINTS,
            sizes=[_choose_diameter(row.ms / longest_ms) for row in own],
            texts=list(map(_describe_shape, own)),
        )
        curves.append(curve)
    return curves


def _choose_diameter(share: float) -> float:
    """Choose the pixels across a point, by its time as a share of the longest: areas, not diameters, are proportional
    to time."""
    diameter = MAX_PX * math.sqrt(share)
    return max(diameter, MIN_PX)


def _compute_intensity(row: RooflineRow) -> float:
    """Compute the arithmetic intensity of an operator, in FLOP per byte."""
    return row.flops / row.num_bytes


def _compute_tflops(row: RooflineRow, ms: float) -> float:
    return row.flops / ms / 1e9


def _describe_shape(row: RooflineRow) -> str:
    """Describe an operator with its shape: its time, how much of the limit it reaches, and its speed."""
    operator = fit(row.operator, 48)
    shape = fit(row.shape, 80)
    phase = fit(row.phase or "no phase", 48)
    reached = ""
    if row.efficiency is not None:
        reached = f", {row.efficiency:.0%} of what {row.bound_by} allows"
    tflops = significant(_compute_tflops(row, row.ms))
    return f"{operator} {shape}: {row.ms:.3f} ms per step in {phase}{reached}, {tflops} TFLOP/s"


def _build_ceilings(rows: Sequence[RooflineRow], lowest: float, highest: float) -> list[Curve]:
    """Build the limits that the rows' bounds were made of: arithmetic per number format, and memory.

    Args:
        rows: the operators.
        lowest: FLOP per byte at the left end.
        highest: FLOP per byte at the right end.
    """
    tflops_by_dtype = {}
    tb_s = 0.0
    for row in rows:
        if not row.bound_ms:
            continue
        if row.bound_by == "compute":
            tflops_by_dtype[row.dtype] = _compute_tflops(row, row.bound_ms)
        elif row.bound_by == "memory":
            tb_s = max(tb_s, row.num_bytes / row.bound_ms / 1e9)
    limits = []
    for dtype, tflops in tflops_by_dtype.items():
        name = f"{tflops:,.0f} TFLOP/s in {fit(dtype, 22)}"
        limits.append(_build_limit(name, [lowest, highest], [tflops, tflops]))
    end = highest
    if tflops_by_dtype and tb_s:
        # where memory would be faster than arithmetic
        end = min(highest, max(tflops_by_dtype.values()) / tb_s)
    if tb_s and end > lowest:
        name = f"memory, {tb_s * 1000:,.0f} GB/s"
        # TFLOP/s = FLOP per byte x TB/s
        limits.append(_build_limit(name, [lowest, end], [lowest * tb_s, end * tb_s]))
    return limits


def _build_limit(name: str, x: list[float], y: list[float]) -> Curve:
    """Build a dotted line that no operator can be above."""
    return Curve(name, x, y, palette.SLATE, Look.LINE, is_dotted=True, is_limit=True)


# --- every step of the run, of which the trace shows a few only, and its losses

MIN_CHART_STEPS = 20  # fewer say nothing that the sentences do not
OTHER_STEPS = "others: first, evaluating, saving, compiling"


def build_run_steps(report: Report) -> CurveChart | None:
    """Place a point per step, at its milliseconds: ordinary ones apart from those that compile, save, evaluate or are
    profiled. None for a short run."""
    run = report.facts.run
    if run is None or run.steps < MIN_CHART_STEPS:
        return None
    shown = _choose_steps(run)
    profiled = run.profiled[shown]
    ordinary = run.ordinary[shown] & ~profiled
    kinds = [
        ("ordinary", ordinary, palette.BLUE),
        ("profiled", profiled, palette.PURPLE),
        (OTHER_STEPS, ~ordinary & ~profiled, palette.GREY),
    ]
    curves = []
    for name, is_kind, color in kinds:
        steps = shown[is_kind]
        if len(steps):
            iterations = run.iterations[steps].tolist()
            step_ms = run.step_ms[steps].tolist()
            curves.append(Curve(name, iterations, step_ms, color, Look.POINTS))
    return CurveChart(
        description="How long every step of the run took",
        curves=curves,
        x=Axis("iteration"),
        y=_choose_step_axis(run),
        plot_px=180,
    )


def _choose_step_axis(run: Run) -> Axis:
    """Choose the axis of the steps' times: logarithmic where one took far longer than the others."""
    longest_ms = run.step_ms.max()
    usual_ms = run.steady_step_ms or longest_ms
    if longest_ms > 10 * usual_ms:
        return Axis("ms", is_log=True)
    return Axis("ms", lowest=0.0)


def _choose_steps(run: Run) -> NDArray[np.int64]:
    """Choose the steps that are drawn: of long runs every n-th one, and the longest of each stretch, for which one
    looks."""
    # two of each stretch
    stretches = draw.MAX_POINTS // 2
    every = max(run.steps // stretches, 1)
    chosen = set()
    for begin in range(0, run.steps, every):
        stretch_ms = run.step_ms[begin : begin + every]
        longest = begin + int(stretch_ms.argmax())
        chosen |= {begin, longest}
    return np.array(sorted(chosen))


# --- bars: when the phases of one step run (the device's clock, or the host's without a GPU); the step of each rank

MAX_SPANS = 400  # longer ones first; beyond that a picture shows nothing more
MAX_CHART_RANKS = 64


def build_timeline(report: Report) -> BarChart | None:
    """Place a row per phase, and a bar per span of a typical step from its begin to its end. None for a single
    phase."""
    rank = report.facts.critical
    if rank is None or not rank.time.timeline:
        return None
    time = rank.time
    begin_ns, end_ns = _find_ends(time)
    step_ns = end_ns - begin_ns
    spans = _choose_spans(time.timeline, READS_AS_ZERO * step_ns)
    names = list(dict.fromkeys(span.name for span in spans))
    if len(names) < 2:
        return None
    # colors do not depend on which phases are long enough to be drawn
    colors = color_phases([*names, *(phase.name for phase in time.phases)])
    rows = dict(zip(names, draw.fit_names(names)))
    bars = Bars(
        name="",
        rows=[rows[span.name] for span in spans],
        values=[_measure_ns(span) / 1e6 for span in spans],
        colors=[colors[span.name] for span in spans],
        begins=[(span.start_ns - begin_ns) / 1e6 for span in spans],
    )
    clock = "device" if time.on_gpu else "host"
    return BarChart(
        description="When the phases of one step run",
        series=[bars],
        axis=Axis(f"ms of a step, {clock}'s clock", highest=step_ns / 1e6),
        arrangement=Arrangement.OVERLAID,
        row_px=28,
    )


def _measure_ns(span: Span) -> int:
    return span.end_ns - span.start_ns


def _find_ends(time: RankTime) -> tuple[int, int]:
    """Find where the step that is drawn begins and ends, in ns: a device that idles at its begin or end does so in the
    picture too."""
    begins = [span.start_ns for span in time.timeline]
    ends = [span.end_ns for span in time.timeline]
    if time.timeline_step is not None:
        step = time.steps[time.timeline_step]
        begins.append(step.start_ns)
        ends.append(step.end_ns)
    return min(begins), max(ends)


def _choose_spans(timeline: Sequence[Span], least_ns: float) -> list[Span]:
    """Choose the longest spans, in the order in which they start, of those names that together take more than
    `least_ns`."""
    longest = sorted(timeline, key=_measure_ns, reverse=True)
    longest = longest[:MAX_SPANS]
    ns_by_name = Counter[str]()
    for span in longest:
        ns_by_name[span.name] += _measure_ns(span)
    kept = [span for span in longest if ns_by_name[span.name] > least_ns]
    return sorted(kept, key=lambda span: span.start_ns)


def build_step_bars(report: Report) -> BarChart | None:
    """Place a stacked bar per rank, as long as its step. None for a single rank, whose table has bars."""
    times = [rank.time for rank in report.facts.ranks_seen if rank.time.step_ms > 0]
    times = times[:MAX_CHART_RANKS]
    if len(times) < 2:
        return None
    rows_by_name = {}
    for number, time in enumerate(times):
        name = f"file {number}" if time.rank is None else f"rank {time.rank}"
        rows_by_name[name] = time.rows
    description = "Where a step of each rank goes, in milliseconds"
    return draw.steps(description, rows_by_name, times[0].on_gpu)


def build_schedule(report: Report) -> BarChart | None:
    """Place the actions of the pipeline's schedule, with the measured times of its stages. None without a pipeline."""
    found = report.facts.pipeline
    if found is None:
        return None
    return draw.schedule(found.actions, "ms of a step, with the stages' measured times")


def build_charts(report: Report) -> dict[str, Figure]:
    """Build the charts by the key of their section; none where the bars of a table show as much."""
    charts: dict[str, Figure | None] = {
        "step": build_step_bars(report),
        "phases": build_timeline(report),
        "roofline": build_roofline(report),
        "memory": build_memory_curve(report),
        "pipeline": build_schedule(report),
        "run": build_run_steps(report),
        "losses": draw.losses({"loss": report.facts.run}),
    }
    return {key: figure for key, figure in charts.items() if figure is not None}
