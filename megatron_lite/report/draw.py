"""Charts that several pages share: stacked bars, steps, losses, and the schedule of a pipeline."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.pipeline_schedule import TimedAction
from megatron_lite.report import palette
from megatron_lite.report.figure import Arrangement, Axis, BarChart, Bars, Curve, CurveChart, Look
from megatron_lite.report.section import READS_AS_ZERO
from megatron_lite.report.sections.step import row_title
from megatron_lite.report.text import fit

ROW_NAME_WIDTH = 28  # letters of a row's name
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
MIN_DRAWN_LOSSES = 20  # fewer say nothing that a sentence does not
MAX_POINTS = 1000  # more than a chart has pixels
MAX_DRAWN_ACTIONS = 20_000


def stacks(
    description: str, parts_by_name: Mapping[str, Mapping[str, float]], colors: Mapping[str, str], unit: str
) -> BarChart:
    """Draw a bar for each name, made of its parts; parts that are too short to be seen are left out.

    Args:
        description: what the chart shows, for those who do not see it.
        parts_by_name: the values of the parts, in `unit`, by name of the bar and of the part.
        colors: the color of each part, in the order in which parts follow each other.
        unit: the unit of the axis.
    """
    lengths = [sum(parts.values()) for parts in parts_by_name.values()]
    least = READS_AS_ZERO * max(lengths, default=0.0)
    rows = fit_names(list(parts_by_name))
    series = []
    for part, color in colors.items():
        values = [parts.get(part, 0.0) for parts in parts_by_name.values()]
        if max(values) > least:
            series.append(Bars(part, rows, values, [color]))
    return BarChart(description, series, Axis(unit))


def fit_names(names: Sequence[str], width: int = ROW_NAME_WIDTH) -> list[str]:
    """Shorten names so that they stand at the left of a chart, and are still different from each other."""
    short = [fit(name, width) for name in names]
    different = []
    for number, name in enumerate(short, 1):
        if short.count(name) > 1:
            begin = fit(name, width - 4)
            name = f"{begin} {number}"
        different.append(name)
    return different


def choose_unit(num_bytes: float) -> tuple[str, int]:
    """Choose the unit in which so many bytes are a short number: its name, and its bytes."""
    for name, bytes_of_unit in UNITS:
        if num_bytes >= bytes_of_unit:
            return name, bytes_of_unit
    return UNITS[-1]


def steps(description: str, rows_by_name: Mapping[str, Mapping[str, float]], on_gpu: bool) -> BarChart:
    """Draw a stacked bar for each name, made of the rows of its step.

    Args:
        description: what the chart shows, for those who do not see it.
        rows_by_name: milliseconds per step, by name of the bar and key of the row.
        on_gpu: whether the rows are those of a device, not of the host.
    """
    titles = {}
    colors = {}
    for row in ROW_TITLES:
        title = row_title(row, on_gpu)
        titles[row] = title
        colors[title] = palette.ROWS.get(row, palette.GREY)
    parts_by_name = {}
    for name, rows in rows_by_name.items():
        parts_by_name[name] = {titles[row]: ms for row, ms in rows.items()}
    return stacks(description, parts_by_name, colors, "ms per step")


def losses(runs: Mapping[str, Run | None]) -> CurveChart | None:
    """Draw a line for each run, or two, that knows losses; None where neither does."""
    looks = [(palette.BLUE, 1.5)]
    if len(runs) > 1:
        # the first is wider, so that equal losses hide no line
        looks.insert(0, (palette.GREY, 4.0))
    curves = []
    for (name, run), (color, width) in zip(runs.items(), looks):
        steps = _choose_steps_with_losses(run)
        if run is not None and len(steps):
            iterations = run.iterations[steps].tolist()
            values = run.losses[steps].tolist()
            curves.append(Curve(name, iterations, values, color, Look.LINE, width))
    if not curves:
        return None
    return CurveChart("The loss of every step", curves, Axis("iteration"), Axis("loss"), 200)


def _choose_steps_with_losses(run: Run | None) -> NDArray[np.int64]:
    """Choose the steps whose losses are drawn, of long runs every n-th; none where too few are known."""
    if run is None:
        return np.zeros(0, np.int64)
    steps = np.flatnonzero(np.isfinite(run.losses))
    if len(steps) < MIN_DRAWN_LOSSES:
        return steps[:0]
    every = max(len(steps) // MAX_POINTS, 1)
    return steps[::every]


def schedule(actions: Sequence[TimedAction], title: str) -> BarChart | None:
    """Draw a row per stage, and a bar per action of the pipeline's schedule; None without actions.

    Args:
        actions: when each stage computes which micro-batch.
        title: of the axis, which says whose times they are.
    """
    if not actions:
        return None
    if len(actions) > MAX_DRAWN_ACTIONS:
        actions = sorted(actions, key=lambda action: action.start_ms)[:MAX_DRAWN_ACTIONS]
        title = f"{title}; the first {MAX_DRAWN_ACTIONS:,} passes of micro-batches"
    series = []
    for kind, color in palette.ACTIONS.items():
        own = [action for action in actions if action.kind == kind]
        # a sort keeps the order of the actions of a stage
        own.sort(key=lambda action: action.stage)
        if own:
            series.append(_build_actions(kind, own, color))
    return BarChart(
        description="The schedule of the pipeline: which micro-batch each stage computes when, and where it waits",
        series=series,
        axis=Axis(title),
        arrangement=Arrangement.OVERLAID,
        row_px=28,
    )


def _build_actions(kind: str, actions: Sequence[TimedAction], color: str) -> Bars:
    """Build the bars of the actions of one kind, forward or backward."""
    return Bars(
        name=kind,
        rows=[f"stage {action.stage + 1}" for action in actions],
        values=[action.end_ms - action.start_ms for action in actions],
        colors=[color],
        begins=[action.start_ms for action in actions],
        micro_batches=[action.micro_batch + 1 for action in actions],
    )
