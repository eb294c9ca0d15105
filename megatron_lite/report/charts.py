"""The charts of the page: figures for Plotly as plain dicts, the same numbers as a table, and which one stands in which section."""

from itertools import pairwise
from typing import Any

import numpy as np

from megatron_lite.analysis.kernels.kernel_results import RooflineRow
from megatron_lite.analysis.memory.memory_results import Moment
from megatron_lite.analysis.report import Report
from megatron_lite.estimate.prediction import CATEGORIES
from megatron_lite.report import draw, palette
from megatron_lite.units import size

# --- memory over time, by what holds it

MAX_CURVE_POINTS = 1500  # more than a chart has pixels


def memory_curve(report: Report) -> draw.Figure | None:
    """Stacked categories, the reserved bytes above, the peak marked."""
    snapshot = report.facts.highest_snapshot
    if snapshot is None or len(snapshot.curve) < 2:
        return None
    curve = thinned(snapshot.curve, MAX_CURVE_POINTS)
    unit, of = draw.choose_unit(snapshot.peak_bytes)
    seconds = [moment.time_us / 1e6 for moment in curve]
    look: dict[str, Any] = {"type": "scatter", "mode": "lines", "x": seconds}
    look["hovertemplate"], data = f"%{{fullData.name}}: %{{y:.2f}} {unit}<extra></extra>", []
    for at, category in enumerate(CATEGORIES):
        held = [moment.by_category[at] / of for moment in curve]
        area = {"line": {"width": 0, "shape": "hv"}, "stackgroup": "held", "fillcolor": palette.HELD[category]}
        data += [look | {"name": category, "y": held} | area] if any(held) else []
    if any(moment.reserved for moment in curve):
        line = {"color": palette.SLATE, "width": 1.5, "dash": "dot", "shape": "hv"}
        data.append(look | {"name": "reserved", "y": [moment.reserved / of for moment in curve], "line": line})
    # the peak's text stands on the side that has more room
    late = 2 * snapshot.peak_time_us / 1e6 > seconds[0] + seconds[-1]
    where = f" in {snapshot.peak_phase}" if snapshot.peak_phase.isidentifier() else ""
    peak = {
        "x": snapshot.peak_time_us / 1e6, "y": snapshot.peak_bytes / of,
        "text": f"peak {size(snapshot.peak_bytes)}{where}", "bgcolor": palette.CARD,
        "showarrow": True, "arrowhead": 0, "arrowcolor": palette.SLATE, "ax": -20 if late else 20, "ay": -22,
        "xanchor": "right" if late else "left",
    }  # fmt: skip
    x, y = draw.axis("seconds since the record began"), draw.axis(unit, rangemode="tozero")
    shape = draw.layout(350, x, y, hovermode="x", annotations=[peak])
    return draw.Figure("Allocated memory over time by category", data, shape)


def thinned(curve: tuple[Moment, ...], most: int) -> list[Moment]:
    """At most `most` moments: of each stretch the one with the most allocated, so that no peak is lost."""
    if len(curve) <= most:
        return list(curve)
    edges = [at * len(curve) // most for at in range(most + 1)]
    return [max(curve[begin:end], key=lambda moment: moment.allocated) for begin, end in pairwise(edges)]


# --- operators by arithmetic intensity against the hardware's two limits

MAX_SHAPES = 300
MAX_PX, MIN_PX = 34, 6


def roofline(report: Report) -> draw.Figure | None:
    """A point per operator and shape, as large as its time, below the hardware's limits; None if those are unknown."""
    rank = report.facts.critical
    known = rank.kernels.roofline if rank else ()
    rows = [row for row in known if row.flops > 0 and row.num_bytes > 0 and row.ms > 0]
    rows = sorted(rows, key=lambda row: -row.ms)[:MAX_SHAPES]
    if len(rows) < 2 or not any(row.bound_ms for row in rows):
        return None
    data: list[dict[str, Any]] = []
    hover = "%{text}<br>%{y:.3r} TFLOP/s at %{x:.3r} FLOP per byte<extra></extra>"
    for role in dict.fromkeys(row.role for row in rows):
        own = [row for row in rows if row.role == role]
        speeds = [row.flops / row.ms / 1e9 for row in own]
        sizes = [max(MAX_PX * (row.ms / rows[0].ms) ** 0.5, MIN_PX) for row in own]
        look = {
            "color": palette.ROLES[role],
            "opacity": 0.75,
            "line": {"color": palette.CARD, "width": 1},
            "size": sizes,
        }
        more: dict[str, Any] = {"name": str(role), "marker": look, "text": [_describe_shape(row) for row in own]}
        data.append(draw.points([row.flops / row.num_bytes for row in own], speeds, "", hover, **more))
    intensities = [row.flops / row.num_bytes for row in rows]
    lowest, highest = min(intensities) / 2, max(intensities) * 2
    data += _build_ceilings(known, lowest, highest)
    speeds = [speed for line in data for speed in line["y"]]
    x, y = draw.log_axis("FLOP per byte", lowest, highest), draw.log_axis("TFLOP/s", min(speeds), max(speeds))
    return draw.Figure(
        "How fast operators are against what memory and arithmetic units allow", data, draw.layout(400, x, y)
    )


def _describe_shape(row: RooflineRow) -> str:
    text = f"{draw.escape_name(row.operator)} {draw.escape_name(row.shape, 80)}<br>"
    text += f"{row.ms:.3f} ms per step in {draw.escape_name(row.phase or 'no phase')}"
    return text + (f"<br>{row.efficiency:.0%} of what {row.bound_by} allows" if row.efficiency is not None else "")


def _build_ceilings(rows: tuple[RooflineRow, ...], lowest: float, highest: float) -> list[dict[str, Any]]:
    """The limits that the rows' bounds were made of: arithmetic per number format, and memory."""
    peaks = {row.dtype: row.flops / row.bound_ms / 1e9 for row in rows if row.bound_by == "compute" and row.bound_ms}
    bandwidths = [row.num_bytes / row.bound_ms / 1e9 for row in rows if row.bound_by == "memory" and row.bound_ms]
    limits = [
        ([lowest, highest], [peak, peak], f"{peak:,.0f} TFLOP/s in {draw.escape_name(dtype)}", "top right")
        for dtype, peak in peaks.items()
    ]
    if bandwidths:
        tb_s = max(bandwidths)  # TFLOP/s = FLOP per byte x TB/s
        end = min(highest, max(peaks.values()) / tb_s) if peaks else highest
        if end > lowest:
            # its name stands below the line, which rises
            name = f"memory, {tb_s * 1000:,.0f} GB/s"
            limits.append(([lowest, end], [lowest * tb_s, end * tb_s], name, "bottom right"))
    return [
        {
            "type": "scatter", "mode": "lines+text", "x": x, "y": y, "name": name, "hovertemplate": f"{name}<extra></extra>",
            "line": {"color": palette.SLATE, "width": 1.5, "dash": "dot"}, "showlegend": False,  # the name stands at its beginning
            "text": [name, ""], "textposition": side, "textfont": {"size": 12, "color": palette.SLATE},
        }
        for x, y, name, side in limits
    ]  # fmt: skip


# --- every step of the run, of which the trace shows a few only, and its losses

MIN_STEPS = 20  # fewer say nothing that the sentences do not
MAX_POINTS = 2000
OTHER_STEPS = "others: first, evaluating, saving, compiling"


def run_steps(report: Report) -> draw.Figure | None:
    """Milliseconds of each step, ordinary ones apart from those that compile, save, evaluate or are profiled."""
    run = report.facts.run
    if run is None or run.steps < MIN_STEPS:
        return None
    # of long runs every n-th step, and the longest of each stretch: those are what one looks for
    begins = range(0, run.steps, max(run.steps // (MAX_POINTS // 2), 1))
    longest = [begin + int(run.step_ms[begin : begin + begins.step].argmax()) for begin in begins]
    shown = np.array(sorted({*begins, *longest}))
    profiled, ordinary = run.profiled[shown], run.ordinary[shown]
    rows = {"ordinary": shown[ordinary & ~profiled], "profiled": shown[profiled]}
    rows[OTHER_STEPS] = shown[~ordinary & ~profiled]
    hover = "iteration %{x}: %{y:.1f} ms<extra></extra>"
    data = [
        draw.points(run.iterations[of_kind].tolist(), run.step_ms[of_kind].tolist(), color, hover, name=kind)
        for (kind, of_kind), color in zip(rows.items(), (palette.BLUE, palette.PURPLE, palette.GREY))
        if len(of_kind)
    ]
    y = draw.axis("ms", rangemode="tozero")
    if run.step_ms.max() > 10 * (run.steady_step_ms or run.step_ms.max()):
        y = draw.log_axis("ms", run.step_ms.min(), run.step_ms.max())
    return draw.Figure("How long every step of the run took", data, draw.layout(240, draw.axis("iteration"), y))


def losses(report: Report) -> draw.Figure | None:
    """Of the run itself."""
    return draw.losses({"loss": report.facts.run})


# --- bars: when the phases of one step run (the device's clock, or the host's without a GPU); the step of each rank

SHARED = {"communication": palette.VERMILION, "copies": palette.ORANGE}  # as in the bars of a step
COLORS = tuple(color for color in palette.SERIES[:-2] if color not in SHARED.values())
MAX_SPANS = 400  # longer ones first; beyond that a picture shows nothing more
MAX_RANKS = 64


def timeline(report: Report) -> draw.Figure | None:
    """A row per phase, a bar per span of a representative step. None for a single phase."""
    rank = report.facts.critical
    if rank is None or not rank.time.timeline:
        return None
    longest = sorted(rank.time.timeline, key=lambda span: span.start_ns - span.end_ns)[:MAX_SPANS]
    spans = sorted(longest, key=lambda span: span.start_ns)
    names = list(dict.fromkeys(span.name for span in spans))
    if len(names) < 2:
        return None
    colors = {name: SHARED.get(name, COLORS[at % len(COLORS)]) for at, name in enumerate(names)}
    series = draw.bars(
        [draw.escape_name(span.name, 22) for span in spans],
        [(span.end_ns - span.start_ns) / 1e6 for span in spans],
        [colors[span.name] for span in spans],
        "%{y}: %{x:.3f} ms from %{base:.3f} ms<extra></extra>",
        base=[(span.start_ns - spans[0].start_ns) / 1e6 for span in spans],
    )
    x = draw.axis(f"ms of the step, {'device' if rank.time.on_gpu else 'host'}'s clock")
    look = draw.layout(70 + 28 * len(names), x, draw.name_axis(), barmode="overlay", bargap=0.35)
    return draw.Figure("When the phases of one step run", [series], look)


def step_bars(report: Report) -> draw.Figure | None:
    """One stacked bar per rank; the bar's length is the step. None for a single rank: its table has bars."""
    ranks = [rank for rank in report.facts.ranks_seen if rank.time.step_ms > 0][:MAX_RANKS]
    if len(ranks) < 2:
        return None
    names = [f"file {at}" if one.time.rank is None else f"rank {one.time.rank}" for at, one in enumerate(ranks)]
    rows = {name: one.time.rows for name, one in zip(names, ranks)}
    return draw.steps("Where a step of each rank goes, in milliseconds", rows, ranks[0].time.on_gpu)


def schedule_chart(report: Report) -> draw.Figure | None:
    """Of the schedule with the stages' measured times."""
    found = report.facts.pipeline
    return draw.schedule(found.turns, "ms of a step, with the stages' measured times") if found else None


def build_charts(report: Report) -> dict[str, draw.Figure]:
    """Section.key: its chart; none where the bars of a table show as much."""
    makers = {
        "step": step_bars, "phases": timeline, "roofline": roofline, "memory": memory_curve, "pipeline": schedule_chart,
        "run": run_steps, "losses": losses,
    }  # fmt: skip
    made = {key: make(report) for key, make in makers.items()}
    return {key: figure for key, figure in made.items() if figure is not None}
