"""What charts of all pages share: quiet axes, safe names, series and stacks for Plotly as plain dicts, their numbers as a table."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.time.time_results import ROW_TITLES
from megatron_lite.report import palette
from megatron_lite.report.section import Table
from megatron_lite.report.sections.step import NOTHING, row_title
from megatron_lite.report.text import fit
from megatron_lite.units import significant

if TYPE_CHECKING:
    from megatron_lite.config.simulated_schedule import TimedTurn

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
NAME_WIDTH = 48
MAX_NUMBERS = 48  # rows of a chart's table
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
TURNS = {"forward": palette.BLUE, "backward": palette.ORANGE, "weights": palette.GREY}
MIN_LOSSES = 20  # fewer say nothing that a sentence does not
MAX_POINTS = 2000
# below so many decades: digits with a tick
TICKS = ((1.2, (1, 1.5, 2, 3, 4, 5, 6, 8)), (4.0, (1, 2, 5)), (math.inf, (1,)))


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

    @property
    def numbers(self) -> Table:
        """A row per place with a column per series where all have the same places, else a row per point. Of many rows
        evenly chosen ones, and each series' largest."""
        across = self.data[0].get("orientation") == "h"
        place, value = ("y", "x") if across else ("x", "y")
        names = [_read_text(self.layout[f"{side}axis"].get("title", {}).get("text", "")) for side in (place, value)]
        first, more = self.data[0], [one for one in self.data[1:] if one[place] != self.data[0][place]]
        if more or "base" in first or "text" in first:
            columns = [[one.get("name", "") for one in self.data for _ in one[place]]]
            order = {"customdata": "micro-batch", "text": "point", place: names[0], "base": "begins", value: names[1]}
            keys = [key for key in order if any(key in one for one in self.data)]
            columns += [[part for one in self.data for part in one.get(key, [""] * len(one[place]))] for key in keys]
            head = ["series", *(order[key] for key in keys)]
            largest = {int(np.argmax(columns[-1]))}
        else:
            columns = [first[place], *(one[value] for one in self.data)]
            head = [names[0], *(_read_text(one.get("name", names[1])) for one in self.data)]
            largest = {int(np.argmax(column)) for column in columns[1:]}
        keep = [at for at, column in enumerate(columns) if any(part != "" for part in column)]
        length = len(columns[0])
        chosen = sorted({*range(0, length, -(-length // MAX_NUMBERS)), *largest})
        logs = {title for side, title in zip((place, value), names) if self.layout[f"{side}axis"].get("type") == "log"}
        written = [_write_column([columns[at][row] for row in chosen], head[at] in logs) for at in keep]
        align = "".join("l" if isinstance(columns[at][0], str) else "r" for at in keep)
        return Table(list(zip(*written)), align, [head[at] for at in keep], hidden=length - len(chosen))


def _write_column(values: Sequence[Any], is_log: bool) -> list[str]:
    """Texts as they are read; numbers with the decimals that make sense beside the largest, of a logarithmic axis each alone."""
    largest = max((abs(one) for one in values if isinstance(one, float)), default=0.0)
    decimals = max(0, 3 - math.floor(math.log10(largest))) if largest > 0 else 0

    def write(one: str | float) -> str:
        if isinstance(one, str):
            return _read_text(one)
        if isinstance(one, int):
            return f"{one:,}"
        return significant(one, 4) if is_log else f"{one:,.{decimals}f}"

    return list(map(write, values))


def _read_text(text: str) -> str:
    """Plotly's text as it is read."""
    return html.unescape(text.replace("<br>", ", "))


def escape_name(text: str, width: int = NAME_WIDTH) -> str:
    """A foreign name as Plotly takes it, which reads <b> and &amp; in any text."""
    return html.escape(fit(text, width), quote=False)


def axis(title: str = "", **more: Any) -> dict[str, Any]:
    """A quiet axis: light grid, no box."""
    look = {"gridcolor": palette.LINE, "zeroline": False, "automargin": True, "fixedrange": True}
    ticks = {"ticks": "outside", "ticklen": 6, "tickcolor": "rgba(0,0,0,0)"}
    named = {"title": {"text": title, "standoff": 8, "font": {"size": 13}}} if title else {}
    return {**look, **ticks, **named, **more}


def name_axis(**more: Any) -> dict[str, Any]:
    """Names from the top down, a bar or more for each."""
    return axis(autorange="reversed", type="category", showgrid=False, **more)


def log_axis(title: str, lowest: float, highest: float, **more: Any) -> dict[str, Any]:
    """A logarithmic axis with ticks at round numbers, the more in each decade the fewer decades there are."""
    decades = range(math.floor(math.log10(lowest)) - 1, math.ceil(math.log10(highest)) + 1)
    digits = next(digits for most, digits in TICKS if math.log10(highest / lowest) < most)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    return axis(title, type="log", tickvals=ticks, ticktext=[significant(tick, 1) for tick in ticks], **more)


def layout(height: int, x: dict[str, Any], y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The look of every chart."""
    font = {"family": FONT, "size": 13}
    return {
        "height": height, "margin": {"l": 8, "r": 16, "t": 8, "b": 8}, "xaxis": x, "yaxis": y, "showlegend": False,
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font": font | {"color": palette.INK},
        "hoverlabel": {"font": font, "align": "left", "namelength": -1},
        "dragmode": False,  # else a finger on the chart does not scroll the page
        **more,
    }  # fmt: skip


def bars(names: Sequence[str], values: Sequence[float], color: Any, hover: str, **more: Any) -> dict[str, Any]:
    """A series of bars to the right, one for each name. color: of all, or one for each; hover: Plotly's template."""
    look = {"marker": {"color": color}, "hovertemplate": hover}
    return {"type": "bar", "orientation": "h", "y": list(names), "x": list(values), **look, **more}


def points(x: Sequence[float], y: Sequence[float], color: str, hover: str, **more: Any) -> dict[str, Any]:
    """A series of points."""
    look = {"marker": {"color": color, "size": 5}, "hovertemplate": hover}
    return {"type": "scatter", "mode": "markers", "x": list(x), "y": list(y), **look, **more}


def stacks(says: str, parts_of: Mapping[str, Mapping[str, float]], colors: Mapping[str, str], unit: str) -> Figure:
    """A bar for each name, made of its parts in the order of `colors`; what is too short to be seen is left out."""
    whole, data = max((sum(parts.values()) for parts in parts_of.values()), default=0.0), []
    hover = f"%{{fullData.name}}: %{{x:.4r}} {unit}<extra>%{{y}}</extra>"
    for name, color in colors.items():
        values = [parts.get(name, 0.0) for parts in parts_of.values()]
        data += [bars(list(parts_of), values, color, hover, name=name)] if max(values) > NOTHING * whole else []
    look = layout(60 + 26 * len(parts_of), axis(unit), name_axis(), barmode="stack", bargap=0.3)
    return Figure(says, data, look)


def choose_unit(num_bytes: float) -> tuple[str, int]:
    """The name and the bytes of the unit in which so many are a short number."""
    return next((pair for pair in UNITS if num_bytes >= pair[1]), UNITS[-1])


def steps(says: str, rows_of: Mapping[str, Mapping[str, float]], on_gpu: bool) -> Figure:
    """A stacked bar for each name, made of the rows of its step."""
    titles = {row: row_title(row, on_gpu) for row in ROW_TITLES}
    parts_of = {name: {titles[row]: ms for row, ms in rows.items()} for name, rows in rows_of.items()}
    colors = {title: palette.ROWS.get(row, palette.GREY) for row, title in titles.items()}
    return stacks(says, parts_of, colors, "ms per step")


def losses(runs: Mapping[str, Run | None]) -> Figure | None:
    """A line for each run that knows losses; of long runs every n-th step."""
    data = []
    # equal losses hide no line
    looks = ((palette.BLUE, 1.5),) if len(runs) == 1 else ((palette.GREY, 4), (palette.BLUE, 1.5))
    for (name, run), (color, width) in zip(runs.items(), looks):
        at = np.flatnonzero(np.isfinite(run.losses)) if run else np.zeros(0, int)
        if run is None or len(at) < MIN_LOSSES:
            continue
        at = at[:: max(len(at) // MAX_POINTS, 1)]
        line = {"mode": "lines", "line": {"color": color, "width": width}, "name": name}
        hover = f"{name}, iteration %{{x}}: %{{y:.4f}}<extra></extra>"
        data.append(points(run.iterations[at].tolist(), run.losses[at].tolist(), color, hover, **line))
    look = layout(260, axis("iteration"), axis("loss"), hovermode="x")
    return Figure("The loss of every step", data, look) if data else None


def schedule(turns: "Sequence[TimedTurn]", title: str) -> Figure | None:
    """A row per stage, a bar per turn."""
    data = []
    for kind, color in TURNS.items():
        own = [one for one in turns if one.kind == kind]
        names, ms = [f"stage {one.stage + 1}" for one in own], [one.end_ms - one.start_ms for one in own]
        hover = f"micro-batch %{{customdata}}, {kind}: %{{x:.2f}} ms from %{{base:.2f}} ms<extra>%{{y}}</extra>"
        series = bars(names, ms, color, hover, name=kind, base=[one.start_ms for one in own])
        series["customdata"] = [one.micro_batch + 1 for one in own]
        series["marker"]["line"] = {"color": palette.CARD, "width": 0.5}
        data += [series] if own else []
    stages = len({one.stage for one in turns})
    look = layout(80 + 28 * stages, axis(title), name_axis(), barmode="overlay", bargap=0.25)
    says = "The schedule of the pipeline: which micro-batch each stage computes when, and where it waits"
    return Figure(says, data, look) if turns else None
