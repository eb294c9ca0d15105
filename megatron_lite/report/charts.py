"""The charts of a report, and the section that each belongs to."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.kernels.kernel_results import RooflineRow
from megatron_lite.analysis.memory.memory_results import Moment, Snapshot
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

MAX_CURVE_POINTS = 1000  # more than a chart has pixels


def memory_curve(report: Report) -> CurveChart | None:
    """Stacked categories, the reserved bytes above, the peak marked."""
    snapshot = report.facts.highest_snapshot
    if snapshot is None or len(snapshot.curve) < 2:
        return None
    moments = thinned(snapshot.curve, MAX_CURVE_POINTS)
    unit, bytes_of_unit = draw.choose_unit(snapshot.peak_bytes)
    seconds = [moment.time_us / 1e6 for moment in moments]
    curves = []
    for number, category in enumerate(CATEGORIES):
        held = [moment.by_category[number] / bytes_of_unit for moment in moments]
        if any(held):
            curves.append(Curve(category, seconds, held, palette.HELD[category], Look.AREA))
    if any(moment.reserved for moment in moments):
        reserved = [moment.reserved / bytes_of_unit for moment in moments]
        curves.append(Curve("reserved", seconds, reserved, palette.INK, Look.STAIRS, is_dotted=True))
    x = Axis("seconds since the record began")
    y = Axis(unit, lowest=0.0)
    peak = _mark_peak(snapshot, bytes_of_unit)
    return CurveChart("Allocated memory over time by category", curves, x, y, 280, peak)


def _mark_peak(snapshot: Snapshot, bytes_of_unit: int) -> Mark:
    """Mark the peak with its size and, where a phase has a plain name, its phase."""
    text = f"peak {size(snapshot.peak_bytes)}"
    if snapshot.peak_phase.isidentifier():
        text += f" in {snapshot.peak_phase}"
    return Mark(snapshot.peak_time_us / 1e6, snapshot.peak_bytes / bytes_of_unit, text)


def thinned(curve: tuple[Moment, ...], most: int) -> list[Moment]:
    """Reduce a curve to at most `most` moments: of each stretch the one with the most allocated, so that no peak is
    lost."""
    if len(curve) <= most:
        return list(curve)
    edges = [number * len(curve) // most for number in range(most + 1)]
    highest = []
    for begin, end in pairwise(edges):
        highest.append(max(curve[begin:end], key=lambda moment: moment.allocated))
    return highest


# --- operators by arithmetic intensity against the hardware's two limits

MAX_CHART_SHAPES = 300
MAX_PX = 34  # of the point that takes longest, across
MIN_PX = 6


def roofline(report: Report) -> CurveChart | None:
    """A point per operator and shape, as large as its time, below the hardware's limits; None if those are unknown."""
    rank = report.facts.critical
    known = rank.kernels.roofline if rank else ()
    rows = [row for row in known if row.flops > 0 and row.num_bytes > 0 and row.ms > 0]
    rows = sorted(rows, key=lambda row: -row.ms)[:MAX_CHART_SHAPES]
    if len(rows) < 2 or not any(row.bound_ms for row in rows):
        return None
    curves = _build_role_curves(rows)
    intensities = [_compute_intensity(row) for row in rows]
    lowest = min(intensities) / 2
    highest = max(intensities) * 2
    curves += _build_ceilings(known, lowest, highest)
    x = Axis("FLOP per byte", is_log=True, lowest=lowest, highest=highest)
    y = Axis("TFLOP/s", is_log=True)
    says = "How fast operators are against what memory and arithmetic units allow"
    return CurveChart(says, curves, x, y, 330)


def _build_role_curves(rows: Sequence[RooflineRow]) -> list[Curve]:
    """Build the points of operators, a curve per role. `rows`: the longest one first."""
    longest_ms = rows[0].ms
    curves = []
    for role in dict.fromkeys(row.role for row in rows):
        own = [row for row in rows if row.role == role]
        # areas, not diameters, are proportional to time
        diameters = [MAX_PX * (row.ms / longest_ms) ** 0.5 for row in own]
        curves.append(
            Curve(
                name=str(role),
                x=[_compute_intensity(row) for row in own],
                y=[_compute_tflops(row, row.ms) for row in own],
                color=palette.ROLES[role],
                look=Look.POINTS,
                sizes=[max(diameter, MIN_PX) for diameter in diameters],
                texts=[_describe_shape(row) for row in own],
            )
        )
    return curves


def _compute_intensity(row: RooflineRow) -> float:
    """FLOP per byte of an operator."""
    return row.flops / row.num_bytes


def _compute_tflops(row: RooflineRow, ms: float) -> float:
    return row.flops / ms / 1e9


def _describe_shape(row: RooflineRow) -> str:
    """Describe an operator with its shape: its time, how much of the limit it reaches, and its speed."""
    name = f"{fit(row.operator, 48)} {fit(row.shape, 80)}"
    phase = fit(row.phase or "no phase", 48)
    reached = ""
    if row.efficiency is not None:
        reached = f", {row.efficiency:.0%} of what {row.bound_by} allows"
    tflops = significant(_compute_tflops(row, row.ms))
    return f"{name}: {row.ms:.3f} ms per step in {phase}{reached}, {tflops} TFLOP/s"


def _build_ceilings(rows: Sequence[RooflineRow], lowest: float, highest: float) -> list[Curve]:
    """Build the limits that the rows' bounds were made of: arithmetic per number format, and memory.

    Args:
        rows: the operators.
        lowest: FLOP per byte at the left end.
        highest: FLOP per byte at the right end.
    """
    peaks = {}
    bandwidths = []
    for row in rows:
        if not row.bound_ms:
            continue
        if row.bound_by == "compute":
            peaks[row.dtype] = _compute_tflops(row, row.bound_ms)
        elif row.bound_by == "memory":
            bandwidths.append(row.num_bytes / row.bound_ms / 1e9)
    limits = []
    for dtype, peak in peaks.items():
        name = f"{peak:,.0f} TFLOP/s in {fit(dtype, 22)}"
        limits.append(_build_limit(name, [lowest, highest], [peak, peak]))
    if bandwidths:
        # TFLOP/s = FLOP per byte x TB/s
        tb_s = max(bandwidths)
        end = highest
        if peaks:
            end = min(highest, max(peaks.values()) / tb_s)
        if end > lowest:
            name = f"memory, {tb_s * 1000:,.0f} GB/s"
            limits.append(_build_limit(name, [lowest, end], [lowest * tb_s, end * tb_s]))
    return limits


def _build_limit(name: str, x: list[float], y: list[float]) -> Curve:
    """Build a dotted line that no operator can be above."""
    return Curve(name, x, y, palette.SLATE, Look.LINE, is_dotted=True, is_limit=True)


# --- every step of the run, of which the trace shows a few only, and its losses

MIN_CHART_STEPS = 20  # fewer say nothing that the sentences do not
OTHER_STEPS = "others: first, evaluating, saving, compiling"


def run_steps(report: Report) -> CurveChart | None:
    """Milliseconds of each step, ordinary ones apart from those that compile, save, evaluate or are profiled."""
    run = report.facts.run
    if run is None or run.steps < MIN_CHART_STEPS:
        return None
    shown = _choose_steps(run)
    profiled = run.profiled[shown]
    ordinary = run.ordinary[shown] & ~profiled
    kinds = {
        "ordinary": (ordinary, palette.BLUE),
        "profiled": (profiled, palette.PURPLE),
        OTHER_STEPS: (~ordinary & ~profiled, palette.GREY),
    }
    curves = []
    for name, (is_kind, color) in kinds.items():
        steps = shown[is_kind]
        if len(steps):
            iterations = run.iterations[steps].tolist()
            curves.append(Curve(name, iterations, run.step_ms[steps].tolist(), color, Look.POINTS))
    longest_ms = run.step_ms.max()
    y = Axis("ms", lowest=0.0)
    if longest_ms > 10 * (run.steady_step_ms or longest_ms):
        y = Axis("ms", is_log=True)
    return CurveChart("How long every step of the run took", curves, Axis("iteration"), y, 180)


def _choose_steps(run: Run) -> NDArray[np.int64]:
    """Choose the steps that are drawn: of long runs every n-th one, and the longest of each stretch, for which one
    looks."""
    begins = range(0, run.steps, max(run.steps // (draw.MAX_POINTS // 2), 1))
    chosen = set(begins)
    for begin in begins:
        stretch_ms = run.step_ms[begin : begin + begins.step]
        chosen.add(begin + int(stretch_ms.argmax()))
    return np.array(sorted(chosen))


def losses(report: Report) -> CurveChart | None:
    """Draw the losses of the run that is reported."""
    return draw.losses({"loss": report.facts.run})


# --- bars: when the phases of one step run (the device's clock, or the host's without a GPU); the step of each rank

MAX_SPANS = 400  # longer ones first; beyond that a picture shows nothing more
MAX_CHART_RANKS = 64


def timeline(report: Report) -> BarChart | None:
    """A row per phase, a bar per span of a typical step, from its begin to its end. None for a single phase."""
    rank = report.facts.critical
    if rank is None or not rank.time.timeline:
        return None
    begin_ns, end_ns = _find_ends(rank.time)
    spans = _choose_spans(rank.time.timeline, READS_AS_ZERO * (end_ns - begin_ns))
    names = list(dict.fromkeys(span.name for span in spans))
    if len(names) < 2:
        return None
    # colors do not depend on which phases are long enough to be drawn
    colors = color_phases([*names, *(phase.name for phase in rank.time.phases)])
    rows = dict(zip(names, draw.fit_names(names)))
    bars = Bars(
        name="",
        rows=[rows[span.name] for span in spans],
        values=[(span.end_ns - span.start_ns) / 1e6 for span in spans],
        colors=[colors[span.name] for span in spans],
        begins=[(span.start_ns - begin_ns) / 1e6 for span in spans],
    )
    clock = "device" if rank.time.on_gpu else "host"
    axis = Axis(f"ms of a step, {clock}'s clock", highest=(end_ns - begin_ns) / 1e6)
    return BarChart("When the phases of one step run", [bars], axis, Arrangement.OVERLAID, 28)


def _find_ends(time: RankTime) -> tuple[int, int]:
    """Where the step that is drawn begins and ends, in ns: a device that idles at its begin or end does so in the
    picture too."""
    begins = [span.start_ns for span in time.timeline]
    ends = [span.end_ns for span in time.timeline]
    if time.timeline_step is not None:
        step = time.steps[time.timeline_step]
        begins.append(step.start_ns)
        ends.append(step.end_ns)
    return min(begins), max(ends)


def _choose_spans(timeline: Sequence[Span], least_ns: float) -> list[Span]:
    """The longest spans, by start, of those names that together take more than `least_ns`."""
    longest = sorted(timeline, key=lambda span: span.start_ns - span.end_ns)[:MAX_SPANS]
    lengths_ns = Counter[str]()
    for span in longest:
        lengths_ns[span.name] += span.end_ns - span.start_ns
    kept = [span for span in longest if lengths_ns[span.name] > least_ns]
    return sorted(kept, key=lambda span: span.start_ns)


def step_bars(report: Report) -> BarChart | None:
    """Draw a stacked bar per rank, as long as its step. None for a single rank, whose table has bars."""
    ranks = [rank for rank in report.facts.ranks_seen if rank.time.step_ms > 0][:MAX_CHART_RANKS]
    if len(ranks) < 2:
        return None
    rows_by_name = {}
    for number, rank in enumerate(ranks):
        name = f"file {number}" if rank.time.rank is None else f"rank {rank.time.rank}"
        rows_by_name[name] = rank.time.rows
    return draw.steps("Where a step of each rank goes, in milliseconds", rows_by_name, ranks[0].time.on_gpu)


def schedule_chart(report: Report) -> BarChart | None:
    """Draw the pipeline's schedule with the measured times of its stages."""
    found = report.facts.pipeline
    return draw.schedule(found.actions, "ms of a step, with the stages' measured times") if found else None


def build_charts(report: Report) -> dict[str, Figure]:
    """Build the charts by the key of their section; none where the bars of a table show as much."""
    charts: dict[str, Figure | None] = {
        "step": step_bars(report),
        "phases": timeline(report),
        "roofline": roofline(report),
        "memory": memory_curve(report),
        "pipeline": schedule_chart(report),
        "run": run_steps(report),
        "losses": losses(report),
    }
    return {key: figure for key, figure in charts.items() if figure is not None}
