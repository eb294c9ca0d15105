"""The charts of the page: figures for Plotly as plain dicts, and which one stands in which section."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_lite.analysis.kernels.kernel_results import RooflineRow
from megatron_lite.analysis.memory.memory_results import Moment
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.estimate.prediction import CATEGORIES
from megatron_lite.report.sections.step import NOTHING, row_title
from megatron_lite.report.text import (
    BLUE,
    CARD,
    CATEGORY_COLORS,
    GREY,
    INK,
    LINE,
    ORANGE,
    PURPLE,
    ROLE_COLORS,
    ROW_COLORS,
    SERIES,
    SLATE,
    VERMILION,
    fit,
)
from megatron_lite.units import significant, size

if TYPE_CHECKING:
    from megatron_lite.config.simulated_schedule import TimedTurn

# --- what charts share: quiet axes, safe names

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
NAME_WIDTH = 48
TICKS = (
    (1.2, (1, 1.5, 2, 3, 4, 5, 6, 8)),
    (4.0, (1, 2, 5)),
    (math.inf, (1,)),
)  # below so many decades: digits with a tick


@dataclass(frozen=True)
class Figure:
    """One chart: what it shows in a sentence (for readers who cannot see it), and Plotly's data and layout."""

    says: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]

    @property
    def legend(self) -> list[tuple[str, str]]:
        """(name, color) of each series that has a name: the page writes it, since Plotly's does not wrap on phones."""
        found = []
        for series in self.data:
            if "name" in series and series.get("showlegend", True):
                color = series.get("marker", {}).get("color") or series.get("fillcolor") or series["line"]["color"]
                found.append((series["name"], color))
        return found


def escape_name(text: str, width: int = NAME_WIDTH) -> str:
    """A foreign name as Plotly takes it, which reads <b> and &amp; in any text."""
    return html.escape(fit(text, width), quote=False)


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """A quiet axis: light grid, no box."""
    look = {"gridcolor": LINE, "zeroline": False, "automargin": True, "fixedrange": True}
    ticks = {"ticks": "outside", "ticklen": 6, "tickcolor": "rgba(0,0,0,0)"}
    named = {"title": {"text": title, "standoff": 8, "font": {"size": 13}}} if title else {}
    return {**look, **ticks, **named, **more}


def log_axis(title: str, lowest: float, highest: float, **more: Any) -> dict[str, Any]:
    """A logarithmic axis with ticks at round numbers, the more in each decade the fewer decades there are."""
    decades = range(math.floor(math.log10(lowest)) - 1, math.ceil(math.log10(highest)) + 1)
    digits = next(digits for most, digits in TICKS if math.log10(highest / lowest) < most)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    return axis(title, type="log", tickvals=ticks, ticktext=[significant(tick, 1) for tick in ticks], **more)


def layout(height: int, x: dict[str, Any], y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The look of every chart."""
    return {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 13, "color": INK},
        "xaxis": x,
        "yaxis": y,
        "hoverlabel": {"font": {"family": FONT, "size": 13}, "align": "left", "namelength": -1},
        "showlegend": False,
        "dragmode": False,  # else a finger on the chart does not scroll the page
        **more,
    }


# --- memory over time, by what holds it

MAX_CURVE_POINTS = 1500  # more than a chart has pixels
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def memory_curve(report: Report) -> Figure | None:
    """Stacked categories, the reserved bytes above, the peak marked."""
    snapshot = report.facts.highest_snapshot
    if snapshot is None or len(snapshot.curve) < 2:
        return None
    curve = thinned(snapshot.curve, MAX_CURVE_POINTS)
    unit, of = next((pair for pair in UNITS if snapshot.peak_bytes >= pair[1]), UNITS[-1])
    seconds = [moment.time_us / 1e6 for moment in curve]
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "held",
            "name": category,
            "x": seconds,
            "y": [moment.by_category[at] / of for moment in curve],
            "line": {"width": 0, "shape": "hv"},
            "fillcolor": CATEGORY_COLORS[category],
            "hovertemplate": f"%{{fullData.name}}: %{{y:.2f}} {unit}<extra></extra>",
        }
        for at, category in enumerate(CATEGORIES)
        if any(moment.by_category[at] for moment in curve)
    ]
    if any(moment.reserved for moment in curve):
        data.append({
            "type": "scatter",
            "mode": "lines",
            "name": "reserved",
            "x": seconds,
            "y": [moment.reserved / of for moment in curve],
            "line": {"color": SLATE, "width": 1.5, "dash": "dot", "shape": "hv"},
            "hovertemplate": f"reserved: %{{y:.2f}} {unit}<extra></extra>",
        })  # fmt: skip
    # the peak's text stands on the side that has more room
    late = 2 * snapshot.peak_time_us / 1e6 > seconds[0] + seconds[-1]
    where = f" in {snapshot.peak_phase}" if snapshot.peak_phase.isidentifier() else ""
    peak = {
        "x": snapshot.peak_time_us / 1e6,
        "y": snapshot.peak_bytes / of,
        "text": f"peak {size(snapshot.peak_bytes)}{where}",
        "showarrow": True,
        "arrowhead": 0,
        "arrowcolor": SLATE,
        "ax": -20 if late else 20,
        "xanchor": "right" if late else "left",
        "ay": -22,
        "bgcolor": CARD,
    }
    x, y = axis("seconds since the record began"), axis(unit, rangemode="tozero")
    look = layout(350, x, y, hovermode="x", annotations=[peak])
    return Figure("Allocated memory over time by category", data, look)


def thinned(curve: tuple[Moment, ...], most: int) -> list[Moment]:
    """At most `most` moments: of each stretch the one with the most allocated, so that no peak is lost."""
    if len(curve) <= most:
        return list(curve)
    edges = [at * len(curve) // most for at in range(most + 1)]
    return [max(curve[begin:end], key=lambda moment: moment.allocated) for begin, end in pairwise(edges)]


# --- operators by arithmetic intensity against the hardware's two limits

MAX_SHAPES = 300
MAX_PX, MIN_PX = 34, 6


def roofline(report: Report) -> Figure | None:
    """A point per operator and shape, as large as its time, below the hardware's limits; None if those are unknown."""
    rank = report.facts.critical
    known = rank.kernels.roofline if rank else ()
    rows = [row for row in known if row.flops > 0 and row.num_bytes > 0 and row.ms > 0]
    rows = sorted(rows, key=lambda row: -row.ms)[:MAX_SHAPES]
    if len(rows) < 2 or not any(row.bound_ms for row in rows):
        return None
    data: list[dict[str, Any]] = []
    for role in dict.fromkeys(row.role for row in rows):
        own = [row for row in rows if row.role == role]
        texts = []
        for row in own:
            text = f"{escape_name(row.operator)} {escape_name(row.shape, 80)}<br>"
            text += f"{row.ms:.3f} ms per step in {escape_name(row.phase or 'no phase')}"
            reached = f"<br>{row.efficiency:.0%} of what {row.bound_by} allows" if row.efficiency is not None else ""
            texts.append(text + reached)
        data.append({
            "type": "scatter",
            "mode": "markers",
            "name": str(role),
            "x": [row.flops / row.num_bytes for row in own],
            "y": [row.flops / row.ms / 1e9 for row in own],
            "marker": {
                "color": ROLE_COLORS[role],
                "opacity": 0.75,
                "line": {"color": CARD, "width": 1},
                "size": [max(MAX_PX * (row.ms / rows[0].ms) ** 0.5, MIN_PX) for row in own],
            },
            "text": texts,
            "hovertemplate": "%{text}<br>%{y:.3r} TFLOP/s at %{x:.3r} FLOP per byte<extra></extra>",
        })  # fmt: skip
    intensities = [row.flops / row.num_bytes for row in rows]
    lowest, highest = min(intensities) / 2, max(intensities) * 2
    data += _build_ceilings(known, lowest, highest)
    speeds = [speed for line in data for speed in line["y"]]
    x, y = log_axis("FLOP per byte", lowest, highest), log_axis("TFLOP/s", min(speeds), max(speeds))
    return Figure("How fast operators are against what memory and arithmetic units allow", data, layout(400, x, y))


def _build_ceilings(rows: tuple[RooflineRow, ...], lowest: float, highest: float) -> list[dict[str, Any]]:
    """The limits that the rows' bounds were made of: arithmetic per number format, and memory."""
    peaks = {row.dtype: row.flops / row.bound_ms / 1e9 for row in rows if row.bound_by == "compute" and row.bound_ms}
    bandwidths = [row.num_bytes / row.bound_ms / 1e9 for row in rows if row.bound_by == "memory" and row.bound_ms]
    limits = [
        ([lowest, highest], [peak, peak], f"{peak:,.0f} TFLOP/s in {escape_name(dtype)}", "top right")
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
            "type": "scatter",
            "mode": "lines+text",
            "x": x,
            "y": y,
            "name": name,
            "line": {"color": SLATE, "width": 1.5, "dash": "dot"},
            "showlegend": False,  # the name stands at the line's beginning
            "hovertemplate": f"{name}<extra></extra>",
            "text": [name, ""],
            "textposition": side,
            "textfont": {"size": 12, "color": SLATE},
        }
        for x, y, name, side in limits
    ]


# --- every step of the run: the trace shows a few of them only

MIN_STEPS = 20  # fewer say nothing that the sentences do not
MAX_POINTS = 2000
OTHER_STEPS = "others: first, evaluating, saving, compiling"


def run_steps(report: Report) -> Figure | None:
    """Milliseconds of each step, ordinary ones apart from those that compile, save, evaluate or are profiled."""
    run = report.facts.run
    if run is None or run.steps < MIN_STEPS:
        return None
    # of long runs every n-th step, and the longest of each stretch: those are what one looks for
    begins = range(0, run.steps, max(run.steps // (MAX_POINTS // 2), 1))
    longest = [begin + int(run.step_ms[begin : begin + begins.step].argmax()) for begin in begins]
    shown = np.array(sorted({*begins, *longest}))
    profiled, ordinary = run.profiled[shown], run.ordinary[shown]
    rows = {
        "ordinary": shown[ordinary & ~profiled],
        "profiled": shown[profiled],
        OTHER_STEPS: shown[~ordinary & ~profiled],
    }
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": kind,
            "x": run.iterations[of_kind].tolist(),
            "y": run.step_ms[of_kind].tolist(),
            "marker": {"color": color, "size": 5},
            "hovertemplate": "iteration %{x}: %{y:.1f} ms<extra></extra>",
        }
        for (kind, of_kind), color in zip(rows.items(), (BLUE, PURPLE, GREY))
        if len(of_kind)
    ]
    y = axis("ms", type="log" if run.step_ms.max() > 10 * (run.steady_step_ms or run.step_ms.max()) else "linear")
    return Figure("How long every step of the run took", data, layout(240, axis("iteration"), y))


# --- bars: when the phases of one step run (the device's clock, or the host's without a GPU); the step of each rank

COLORS = tuple(color for color in SERIES[:-2] if color not in (VERMILION, ORANGE))  # those two as in the bars of a step
SHARED = {"communication": VERMILION, "copies": ORANGE}
MAX_SPANS = 400  # longer ones first; beyond that a picture shows nothing more
MAX_RANKS = 64


def timeline(report: Report) -> Figure | None:
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
    bars = {
        "type": "bar",
        "orientation": "h",
        "y": [escape_name(span.name, 22) for span in spans],
        "base": [(span.start_ns - spans[0].start_ns) / 1e6 for span in spans],
        "x": [(span.end_ns - span.start_ns) / 1e6 for span in spans],
        "marker": {"color": [colors[span.name] for span in spans]},
        "hovertemplate": "%{y}: %{x:.3f} ms from %{base:.3f} ms<extra></extra>",
    }
    x = axis(f"ms of the step, {'device' if rank.time.on_gpu else 'host'}'s clock")
    y = axis(autorange="reversed", type="category", showgrid=False)
    look = layout(70 + 28 * len(names), x, y, barmode="overlay", bargap=0.35)
    return Figure("When the phases of one step run", [bars], look)


def step_bars(report: Report) -> Figure | None:
    """One stacked bar per rank; the bar's length is the step. None for a single rank: its table has bars."""
    ranks = [rank for rank in report.facts.ranks_seen if rank.time.step_ms > 0][:MAX_RANKS]
    if len(ranks) < 2:
        return None
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": row_title(row, ranks[0].time.on_gpu),
            "y": [f"file {at}" if one.time.rank is None else f"rank {one.time.rank}" for at, one in enumerate(ranks)],
            "x": [rank.time.rows.get(row, 0.0) for rank in ranks],
            "marker": {"color": ROW_COLORS.get(row, GREY)},
            "hovertemplate": "%{fullData.name}: %{x:.3f} ms<extra>%{y}</extra>",
        }
        for row in ROW_TITLES
        if any(rank.time.rows.get(row, 0.0) > NOTHING * rank.time.step_ms for rank in ranks)
    ]
    x, y = axis("ms per step"), axis(autorange="reversed", type="category", showgrid=False)
    look = layout(60 + 26 * len(ranks), x, y, barmode="stack", bargap=0.3)
    return Figure("Where a step of each rank goes, in milliseconds", data, look)


TURN_COLORS = {"forward": BLUE, "backward": ORANGE, "weights": GREY}


def schedule_chart(report: Report) -> Figure | None:
    """Of the schedule with the stages' measured times."""
    found = report.facts.pipeline
    return draw_schedule(found.turns, "ms of a step, with the stages' measured times") if found else None


def draw_schedule(turns: "Sequence[TimedTurn]", title: str) -> Figure | None:
    """A row per stage, a bar per turn."""
    data = []
    for kind, color in TURN_COLORS.items():
        own = [one for one in turns if one.kind == kind]
        bars = {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": [f"stage {one.stage + 1}" for one in own],
            "base": [one.start_ms for one in own],
            "x": [one.end_ms - one.start_ms for one in own],
            "customdata": [one.micro_batch + 1 for one in own],
            "marker": {"color": color, "line": {"color": CARD, "width": 0.5}},
            "hovertemplate": f"micro-batch %{{customdata}}, {kind}: %{{x:.2f}} ms from %{{base:.2f}} ms<extra>%{{y}}</extra>",
        }
        data += [bars] if own else []
    y = axis(autorange="reversed", type="category", showgrid=False)
    stages = len({one.stage for one in turns})
    look = layout(80 + 28 * stages, axis(title), y, barmode="overlay", bargap=0.25)
    says = "The schedule of the pipeline: which micro-batch each stage computes when, and where it waits"
    return Figure(says, data, look) if turns else None


def build_charts(report: Report) -> dict[str, Figure]:
    """Section.key: its chart; none where the bars of a table show as much."""
    makers = {
        "step": step_bars, "phases": timeline, "roofline": roofline, "memory": memory_curve, "pipeline": schedule_chart,
        "run": run_steps,
    }  # fmt: skip
    made = {key: make(report) for key, make in makers.items()}
    return {key: figure for key, figure in made.items() if figure is not None}
