"""The charts of a report, and the section that each belongs to."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megatron_lite.analysis.kernels.kernel_results import RooflineRow
from megatron_lite.analysis.memory.memory_results import Moment
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.time.time_results import RankTime, Span
from megatron_lite.formats.memory_categories import CATEGORIES
from megatron_lite.report import draw, palette
from megatron_lite.report.figure import Arrangement, Axis, BarChart, Bars, Curve, CurveChart, Figure, Look, Mark
from megatron_lite.report.phase_colors import color_phases
from megatron_lite.report.sections.step import NOTHING
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
    unit, of = draw.choose_unit(snapshot.peak_bytes)
    seconds = [moment.time_us / 1e6 for moment in moments]
    curves = []
    for at, category in enumerate(CATEGORIES):
        held = [moment.by_category[at] / of for moment in moments]
        if any(held):
            curves.append(Curve(category, seconds, held, palette.HELD[category], Look.AREA))
    if any(moment.reserved for moment in moments):
        reserved = [moment.reserved / of for moment in moments]
        curves.append(Curve("reserved", seconds, reserved, palette.INK, Look.STAIRS, is_dotted=True))
    where = f" in {snapshot.peak_phase}" if snapshot.peak_phase.isidentifier() else ""
    text = f"peak {size(snapshot.peak_bytes)}{where}"
    peak = Mark(snapshot.peak_time_us / 1e6, snapshot.peak_bytes / of, text)
    x, y = Axis("seconds since the record began"), Axis(unit, lowest=0.0)
    return CurveChart("Allocated memory over time by category", curves, x, y, 280, peak)


def thinned(curve: tuple[Moment, ...], most: int) -> list[Moment]:
    """Reduce a curve to at most `most` moments: of each stretch the one with the most allocated, so that no peak is
    lost."""
    if len(curve) <= most:
        return list(curve)
    edges = [at * len(curve) // most for at in range(most + 1)]
    return [max(curve[begin:end], key=lambda moment: moment.allocated) for begin, end in pairwise(edges)]


# --- operators by arithmetic intensity against the hardware's two limits

MAX_SHAPES = 300
MAX_PX, MIN_PX = 34, 6


def roofline(report: Report) -> CurveChart | None:
    """A point per operator and shape, as large as its time, below the hardware's limits; None if those are unknown."""
    rank = report.facts.critical
    known = rank.kernels.roofline if rank else ()
    rows = [row for row in known if row.flops > 0 and row.num_bytes > 0 and row.ms > 0]
    rows = sorted(rows, key=lambda row: -row.ms)[:MAX_SHAPES]
    if len(rows) < 2 or not any(row.bound_ms for row in rows):
        return None
    curves = []
    for role in dict.fromkeys(row.role for row in rows):
        own = [row for row in rows if row.role == role]
        curves.append(Curve(
            name=str(role),
            x=[row.flops / row.num_bytes for row in own],
            y=[_compute_tflops(row, row.ms) for row in own],
            color=palette.ROLES[role],
            look=Look.POINTS,
            sizes=[max(MAX_PX * (row.ms / rows[0].ms) ** 0.5, MIN_PX) for row in own],
            texts=[_describe_shape(row) for row in own],
        ))  # fmt: skip
    intensities = [row.flops / row.num_bytes for row in rows]
    lowest = min(intensities) / 2
    highest = max(intensities) * 2
    curves += _build_ceilings(known, lowest, highest)
    x = Axis("FLOP per byte", is_log=True, lowest=lowest, highest=highest)
    says = "How fast operators are against what memory and arithmetic units allow"
    return CurveChart(says, curves, x, Axis("TFLOP/s", is_log=True), 330)


def _compute_tflops(row: RooflineRow, ms: float) -> float:
    return row.flops / ms / 1e9


def _describe_shape(row: RooflineRow) -> str:
    text = (
        f"{fit(row.operator, 48)} {fit(row.shape, 80)}: {row.ms:.3f} ms per step in {fit(row.phase or 'no phase', 48)}"
    )
    reached = "" if row.efficiency is None else f", {row.efficiency:.0%} of what {row.bound_by} allows"
    return f"{text}{reached}, {significant(_compute_tflops(row, row.ms))} TFLOP/s"


def _build_ceilings(rows: Sequence[RooflineRow], lowest: float, highest: float) -> list[Curve]:
    """The limits that the rows' bounds were made of: arithmetic per number format, and memory."""
    bounds = [row for row in rows if row.bound_ms]
    peaks = {row.dtype: _compute_tflops(row, row.bound_ms or 1.0) for row in bounds if row.bound_by == "compute"}
    bandwidths = [row.num_bytes / (row.bound_ms or 1.0) / 1e9 for row in bounds if row.bound_by == "memory"]
    limits = [
        (f"{peak:,.0f} TFLOP/s in {fit(dtype, 22)}", [lowest, highest], [peak, peak]) for dtype, peak in peaks.items()
    ]
    if bandwidths:
        # TFLOP/s = FLOP per byte x TB/s
        tb_s = max(bandwidths)
        end = min(highest, max(peaks.values()) / tb_s) if peaks else highest
        if end > lowest:
            limits.append((f"memory, {tb_s * 1000:,.0f} GB/s", [lowest, end], [lowest * tb_s, end * tb_s]))
    return [Curve(name, x, y, palette.SLATE, Look.LINE, is_dotted=True, is_limit=True) for name, x, y in limits]


# --- every step of the run, of which the trace shows a few only, and its losses

MIN_STEPS = 20  # fewer say nothing that the sentences do not
OTHER_STEPS = "others: first, evaluating, saving, compiling"


def run_steps(report: Report) -> CurveChart | None:
    """Milliseconds of each step, ordinary ones apart from those that compile, save, evaluate or are profiled."""
    run = report.facts.run
    if run is None or run.steps < MIN_STEPS:
        return None
    # of long runs every n-th step, and the longest of each stretch: those are what one looks for
    begins = range(0, run.steps, max(run.steps // (draw.MAX_POINTS // 2), 1))
    longest = [begin + int(run.step_ms[begin : begin + begins.step].argmax()) for begin in begins]
    shown = np.array(sorted({*begins, *longest}))
    profiled, ordinary = run.profiled[shown], run.ordinary[shown]
    rows = {"ordinary": shown[ordinary & ~profiled], "profiled": shown[profiled]}
    rows[OTHER_STEPS] = shown[~ordinary & ~profiled]
    curves = []
    for (kind, at), color in zip(rows.items(), (palette.BLUE, palette.PURPLE, palette.GREY)):
        if len(at):
            curves.append(Curve(kind, run.iterations[at].tolist(), run.step_ms[at].tolist(), color, Look.POINTS))
    y = Axis("ms", lowest=0.0)
    if run.step_ms.max() > 10 * (run.steady_step_ms or run.step_ms.max()):
        y = Axis("ms", is_log=True)
    return CurveChart("How long every step of the run took", curves, Axis("iteration"), y, 180)


def losses(report: Report) -> CurveChart | None:
    """Draw the losses of the run that is reported."""
    return draw.losses({"loss": report.facts.run})


# --- bars: when the phases of one step run (the device's clock, or the host's without a GPU); the step of each rank

MAX_SPANS = 400  # longer ones first; beyond that a picture shows nothing more
MAX_RANKS = 64


def timeline(report: Report) -> BarChart | None:
    """A row per phase, a bar per span of a typical step, from its begin to its end. None for a single phase."""
    rank = report.facts.critical
    if rank is None or not rank.time.timeline:
        return None
    begin_ns, end_ns = _find_ends(rank.time)
    spans = _choose_spans(rank.time.timeline, NOTHING * (end_ns - begin_ns))
    names = list(dict.fromkeys(span.name for span in spans))
    if len(names) < 2:
        return None
    colors = color_phases([*names, *(phase.name for phase in rank.time.phases)])
    rows = dict(zip(names, draw.fit_names(names)))
    bars = Bars(
        name="",
        rows=[rows[span.name] for span in spans],
        values=[(span.end_ns - span.start_ns) / 1e6 for span in spans],
        colors=[colors[span.name] for span in spans],
        begins=[(span.start_ns - begin_ns) / 1e6 for span in spans],
    )
    axis = Axis(f"ms of a step, {'device' if rank.time.on_gpu else 'host'}'s clock", highest=(end_ns - begin_ns) / 1e6)
    return BarChart("When the phases of one step run", [bars], axis, Arrangement.OVERLAID, 28)


def _find_ends(time: RankTime) -> tuple[int, int]:
    """Where the step that is drawn begins and ends, in ns: a device that idles at its begin or end does so in the picture too."""
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
    lengths: dict[str, int] = {}
    for span in longest:
        lengths[span.name] = lengths.get(span.name, 0) + span.end_ns - span.start_ns
    return sorted((span for span in longest if lengths[span.name] > least_ns), key=lambda span: span.start_ns)


def step_bars(report: Report) -> BarChart | None:
    """Draw a stacked bar per rank, as long as its step. None for a single rank, whose table has bars."""
    ranks = [rank for rank in report.facts.ranks_seen if rank.time.step_ms > 0][:MAX_RANKS]
    if len(ranks) < 2:
        return None
    names = [f"file {at}" if one.time.rank is None else f"rank {one.time.rank}" for at, one in enumerate(ranks)]
    rows = {name: one.time.rows for name, one in zip(names, ranks)}
    return draw.steps("Where a step of each rank goes, in milliseconds", rows, ranks[0].time.on_gpu)


def schedule_chart(report: Report) -> BarChart | None:
    """Draw the pipeline's schedule with the measured times of its stages."""
    found = report.facts.pipeline
    return draw.schedule(found.turns, "ms of a step, with the stages' measured times") if found else None


def build_charts(report: Report) -> dict[str, Figure]:
    """Section.key: its chart; none where the bars of a table show as much."""
    makers = {
        "step": step_bars, "phases": timeline, "roofline": roofline, "memory": memory_curve, "pipeline": schedule_chart,
        "run": run_steps, "losses": losses,
    }  # fmt: skip
    made = {key: make(report) for key, make in makers.items()}
    return {key: figure for key, figure in made.items() if figure is not None}
