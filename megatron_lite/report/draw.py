"""Charts that several pages share: stacked bars, steps, losses, and the schedule of a pipeline."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.report import palette
from megatron_lite.report.figure import Arrangement, Axis, BarChart, Bars, Curve, CurveChart, Look
from megatron_lite.report.sections.step import NOTHING, row_title
from megatron_lite.report.text import fit

if TYPE_CHECKING:
    from megatron_lite.config.simulated_schedule import TimedTurn

NAME_WIDTH = 28  # letters of a row's name
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
MIN_LOSSES = 20  # fewer say nothing that a sentence does not
MAX_POINTS = 1000  # more than a chart has pixels
MAX_TURNS = 20_000


def stacks(says: str, parts_of: Mapping[str, Mapping[str, float]], colors: Mapping[str, str], unit: str) -> BarChart:
    """Draw a bar for each name, made of its parts; parts that are too short to be seen are left out.

    Args:
        says: what the chart shows, for those who do not see it.
        parts_of: the values of the parts, in `unit`, by name of the bar and of the part.
        colors: the color of each part, in the order in which parts follow each other.
        unit: the unit of the axis.
    """
    whole = max((sum(parts.values()) for parts in parts_of.values()), default=0.0)
    rows = fit_names(list(parts_of))
    series = []
    for name, color in colors.items():
        values = [parts.get(name, 0.0) for parts in parts_of.values()]
        if max(values) > NOTHING * whole:
            series.append(Bars(name, rows, values, [color]))
    return BarChart(says, series, Axis(unit))


def fit_names(names: Sequence[str], width: int = NAME_WIDTH) -> list[str]:
    """Names short enough to stand at the left of a chart, and still different from each other."""
    short = [fit(name, width) for name in names]
    return [f"{fit(name, width - 4)} {at + 1}" if short.count(name) > 1 else name for at, name in enumerate(short)]


def choose_unit(num_bytes: float) -> tuple[str, int]:
    """The name and the bytes of the unit in which so many are a short number."""
    return next((pair for pair in UNITS if num_bytes >= pair[1]), UNITS[-1])


def steps(says: str, rows_of: Mapping[str, Mapping[str, float]], on_gpu: bool) -> BarChart:
    """Draw a stacked bar for each name, made of the rows of its step.

    Args:
        says: what the chart shows, for those who do not see it.
        rows_of: milliseconds per step, by name of the bar and key of the row.
        on_gpu: whether the rows are those of a device, not of the host.
    """
    titles = {row: row_title(row, on_gpu) for row in ROW_TITLES}
    parts_of = {name: {titles[row]: ms for row, ms in rows.items()} for name, rows in rows_of.items()}
    colors = {title: palette.ROWS.get(row, palette.GREY) for row, title in titles.items()}
    return stacks(says, parts_of, colors, "ms per step")


def losses(runs: Mapping[str, Run | None]) -> CurveChart | None:
    """A line for each run that knows losses; of long runs every n-th step."""
    curves = []
    # equal losses hide no line
    looks = ((palette.BLUE, 1.5),) if len(runs) == 1 else ((palette.GREY, 4.0), (palette.BLUE, 1.5))
    for (name, run), (color, width) in zip(runs.items(), looks):
        at = np.flatnonzero(np.isfinite(run.losses)) if run else np.zeros(0, int)
        if run is None or len(at) < MIN_LOSSES:
            continue
        at = at[:: max(len(at) // MAX_POINTS, 1)]
        curves.append(Curve(name, run.iterations[at].tolist(), run.losses[at].tolist(), color, Look.LINE, width))
    chart = CurveChart("The loss of every step", curves, Axis("iteration"), Axis("loss"), 200)
    return chart if curves else None


def schedule(turns: "Sequence[TimedTurn]", title: str) -> BarChart | None:
    """A row per stage, a bar per turn."""
    if not turns:
        return None
    series = []
    if len(turns) > MAX_TURNS:
        turns = sorted(turns, key=lambda one: one.start_ms)[:MAX_TURNS]
        title = f"{title}; the first {MAX_TURNS:,} passes of micro-batches"
    stages = sorted({one.stage for one in turns})
    for kind, color in palette.TURNS.items():
        own = sorted((one for one in turns if one.kind == kind), key=lambda one: stages.index(one.stage))
        if own:
            series.append(Bars(
                name=kind,
                rows=[f"stage {one.stage + 1}" for one in own],
                values=[one.end_ms - one.start_ms for one in own],
                colors=[color],
                begins=[one.start_ms for one in own],
                micro_batches=[one.micro_batch + 1 for one in own],
            ))  # fmt: skip
    says = "The schedule of the pipeline: which micro-batch each stage computes when, and where it waits"
    return BarChart(says, series, Axis(title), Arrangement.OVERLAID, 28)
