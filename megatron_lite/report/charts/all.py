"""Which chart stands in which section."""

from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.report.charts.figure import Figure, axis, layout, named
from megatron_lite.report.charts.memory_curve import memory_curve
from megatron_lite.report.charts.roofline import roofline
from megatron_lite.report.colors import BLUE, GREY, ORANGE, PURPLE, ROW_COLORS, SERIES, VERMILION
from megatron_lite.report.sections.step import NOTHING, row_title

# --- every step of the run: the trace shows a few of them only

MIN_STEPS = 20  # fewer say nothing that the sentences do not
MAX_POINTS = 2000


def run_steps(report: Report) -> Figure | None:
    """Milliseconds of each step, ordinary ones apart from those that compile, save, evaluate or are profiled."""
    run = report.facts.run
    if run is None or run.steps < MIN_STEPS:
        return None
    kinds = {"ordinary": BLUE, "profiled": PURPLE, "others: first, evaluating, saving, compiling": GREY}
    of_step = _kinds(run)
    data = []
    for kind, color in kinds.items():
        rows = [at for at in _shown(run) if of_step[at] == kind]
        if rows:
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": kind,
                    "x": [run.iterations[at] for at in rows],
                    "y": [run.step_ms[at] for at in rows],
                    "marker": {"color": color, "size": 5},
                    "hovertemplate": "iteration %{x}: %{y:.1f} ms<extra></extra>",
                }
            )
    y = axis("ms", type="log" if max(run.step_ms) > 10 * (run.steady_step_ms or max(run.step_ms)) else "linear")
    return Figure("How long every step of the run took", data, layout(240, axis("iteration"), y)) if data else None


def _kinds(run: Run) -> list[str]:
    return [
        "profiled" if profiled else "ordinary" if ordinary else "others: first, evaluating, saving, compiling"
        for ordinary, profiled in zip(run.ordinary, run.profiled)
    ]


def _shown(run: Run) -> list[int]:
    """Every n-th ordinary step of long runs, and the longest of each stretch: those are what one looks for."""
    every = max(run.steps // (MAX_POINTS // 2), 1)
    stretches = [range(at, min(at + every, run.steps)) for at in range(0, run.steps, every)]
    return sorted({at for stretch in stretches for at in (stretch[0], max(stretch, key=lambda row: run.step_ms[row]))})


# --- when the phases of one step run: the device's clock, or the host's without a GPU

HUES = tuple(color for color in SERIES[:-2] if color not in (VERMILION, ORANGE))  # those two as in the bars of a step
SHARED = {"communication": VERMILION, "copies": ORANGE}
MAX_SPANS = 400  # longer ones first; beyond that a picture shows nothing more


def timeline(report: Report) -> Figure | None:
    """A row per phase, a bar per span of a representative step. None for a single phase."""
    rank = report.facts.critical
    if rank is None or not rank.time.timeline:
        return None
    spans = sorted(
        sorted(rank.time.timeline, key=lambda span: span.start_ns - span.end_ns)[:MAX_SPANS],
        key=lambda span: span.start_ns,
    )
    if len({span.name for span in spans}) < 2:
        return None
    begin = spans[0].start_ns
    names = list(dict.fromkeys(span.name for span in spans))
    rows = {name: f"{named(name, 22)}" for name in names}
    colors = {name: SHARED.get(name, HUES[at % len(HUES)]) for at, name in enumerate(names)}
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [rows[span.name] for span in spans],
            "base": [(span.start_ns - begin) / 1e6 for span in spans],
            "x": [(span.end_ns - span.start_ns) / 1e6 for span in spans],
            "marker": {"color": [colors[span.name] for span in spans]},
            "hovertemplate": "%{y}: %{x:.3f} ms from %{base:.3f} ms<extra></extra>",
        }
    ]
    clock = "device" if rank.time.on_gpu else "host"
    x, y = axis(f"ms of the step, {clock}'s clock"), axis(autorange="reversed", type="category", showgrid=False)
    return Figure(
        "When the phases of one step run", data, layout(70 + 28 * len(names), x, y, barmode="overlay", bargap=0.35)
    )


# --- where the step of each rank goes, one bar per rank

MAX_RANKS = 64


def step_bars(report: Report) -> Figure | None:
    """One stacked bar per rank; the bar's length is the step. None for a single rank: its table has bars."""
    ranks = [rank for rank in report.facts.ranks_seen if rank.time.step_ms > 0][:MAX_RANKS]
    if len(ranks) < 2:
        return None
    names = [f"file {at}" if rank.time.rank is None else f"rank {rank.time.rank}" for at, rank in enumerate(ranks)]
    on_gpu = ranks[0].time.on_gpu
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": row_title(row, on_gpu),
            "y": names,
            "x": [rank.time.rows.get(row, 0.0) for rank in ranks],
            "marker": {"color": ROW_COLORS.get(row, GREY)},
            "hovertemplate": "%{fullData.name}: %{x:.3f} ms<extra>%{y}</extra>",
        }
        for row in ROW_TITLES
        if any(rank.time.rows.get(row, 0.0) > NOTHING * rank.time.step_ms for rank in ranks)
    ]
    x, y = axis("ms per step"), axis(autorange="reversed", type="category", showgrid=False)
    return Figure(
        "Where a step of each rank goes, in milliseconds",
        data,
        layout(60 + 26 * len(ranks), x, y, barmode="stack", bargap=0.3),
    )


# --- which chart stands in which section


def charts_of(report: Report) -> dict[str, Figure]:
    """Section.key: its chart; none where the bars of a table show as much."""
    makers = {"step": step_bars, "phases": timeline, "roofline": roofline, "memory": memory_curve, "run": run_steps}
    made = {key: make(report) for key, make in makers.items()}
    return {key: figure for key, figure in made.items() if figure is not None}
