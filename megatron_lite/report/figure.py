"""The charts of a page before anybody draws them: bars to the right, and curves or points over two axes; their numbers
as a table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from megatron_lite.report.section import Table
from megatron_lite.units import significant

MAX_NUMBERS = 48  # rows of a chart's table


class Arrangement(Enum):
    """How the bars of several series share a row."""

    STACKED = "stacked"
    BESIDE = "beside each other"
    OVERLAID = "overlaid"


class Look(Enum):
    """How a curve is drawn."""

    POINTS = "points"
    LINE = "line"
    JOINED_POINTS = "joined points"
    STAIRS = "stairs"
    AREA = "area"  # upon the areas before it


@dataclass(frozen=True)
class Axis:
    """The quantity of an axis and its range; a limit of None lets the axis go as far as the values."""

    title: str
    is_log: bool = False
    lowest: float | None = None
    highest: float | None = None


@dataclass(frozen=True)
class Bars:
    """A series of bars, each in the row that it names."""

    name: str  # "" of a single series, which needs no legend
    rows: Sequence[str]
    values: Sequence[float]
    colors: Sequence[str]  # one of all bars, or one for each
    begins: Sequence[float] = ()  # () at zero, or where the series before ends
    micro_batches: Sequence[int] = ()


@dataclass(frozen=True)
class Curve:
    """A series of points in the order of x, or a limit with its name beside it."""

    name: str  # "" of a single series, which needs no legend
    x: Sequence[float]
    y: Sequence[float]
    color: str
    look: Look
    width: float = 1.5
    is_dotted: bool = False
    is_limit: bool = False
    sizes: Sequence[float] = ()  # of points, in pixels
    texts: Sequence[str] = ()  # what each point is


@dataclass(frozen=True)
class Mark:
    """A point that has a text beside it."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class BarChart:
    """A chart of bars, in rows from the top down.

    `description` says in a sentence what it shows, for readers who cannot see it.
    """

    description: str
    series: Sequence[Bars]
    axis: Axis
    arrangement: Arrangement = Arrangement.STACKED
    row_px: int = 26
    limit: float | None = None  # a dotted line across all rows

    @property
    def rows(self) -> list[str]:
        """List the names of the rows from the top down, each once."""
        return list(dict.fromkeys(row for one in self.series for row in one.rows))

    @property
    def legend(self) -> list[tuple[str, str]]:
        """List the names and colors of the series that have a name."""
        return [(one.name, one.colors[0]) for one in self.series if one.name]

    @property
    def numbers(self) -> Table:
        """Build a table with a row for each of the chart and a column per series; of bars that begin somewhere with a
        row per bar."""
        if any(series.begins for series in self.series):
            return self._list_bars()
        head = [""]
        columns: list[Sequence[Any]] = [self.rows]
        for series in self.series:
            values = dict(zip(series.rows, series.values))
            head.append(series.name or self.axis.title)
            columns.append([values.get(row, 0.0) for row in self.rows])
        return _build_table(head, columns)

    def _list_bars(self) -> Table:
        """Build a table with a row per bar."""
        names: list[str] = []
        micro_batches: list[str] = []
        rows: list[str] = []
        begins: list[float] = []
        values: list[float] = []
        for series in self.series:
            bars = len(series.rows)
            names += [series.name] * bars
            micro_batches += map(str, series.micro_batches) if series.micro_batches else [""] * bars
            rows += series.rows
            begins += series.begins
            values += series.values
        head = ["series", "micro-batch", "", "begins", self.axis.title]
        return _build_table(head, [names, micro_batches, rows, begins, values])


@dataclass(frozen=True)
class CurveChart:
    """A chart of curves and points.

    `description` says in a sentence what it shows, for readers who cannot see it.
    """

    description: str
    curves: Sequence[Curve]
    x: Axis
    y: Axis
    plot_px: int
    mark: Mark | None = None

    @property
    def legend(self) -> list[tuple[str, str]]:
        """List the names and colors of the series that have a name; a limit's is written beside it instead."""
        return [(one.name, one.color) for one in self.curves if one.name and not one.is_limit]

    @property
    def numbers(self) -> Table:
        """Build a table with a row per place and a column per curve where all have the same places, else with a row per
        point."""
        places = list(self.curves[0].x)
        if any(list(curve.x) != places or curve.texts for curve in self.curves):
            return self._list_points()
        head = [self.x.title]
        columns: list[Sequence[Any]] = [places]
        for curve in self.curves:
            head.append(curve.name or self.y.title)
            columns.append(curve.y)
        logs = [self.x.is_log, *(self.y.is_log for _ in self.curves)]
        return _build_table(head, columns, logs)

    def _list_points(self) -> Table:
        """Build a table with a row per point."""
        names: list[str] = []
        texts: list[str] = []
        x: list[float] = []
        y: list[float] = []
        for curve in self.curves:
            names += [curve.name] * len(curve.x)
            texts += curve.texts or [""] * len(curve.x)
            x += curve.x
            y += curve.y
        head = ["series", "point", self.x.title, self.y.title]
        return _build_table(head, [names, texts, x, y], [False, False, self.x.is_log, self.y.is_log])


Figure = BarChart | CurveChart


def _build_table(head: Sequence[str], columns: Sequence[Sequence[Any]], logs: Sequence[bool] = ()) -> Table:
    """Build a table of evenly chosen rows of many, and each column's largest; columns without any text are left out.

    Args:
        head: a name per column.
        columns: texts, or numbers.
        logs: for each column whether its axis is logarithmic: such numbers are written each alone. () for none.
    """
    length = len(columns[0])
    chosen = _choose_rows(columns)
    shown_head = []
    written = []
    align = ""
    for number, column in enumerate(columns):
        if not any(part != "" for part in column):
            continue
        shown_head.append(head[number])
        is_log = bool(logs) and logs[number]
        written.append(_write_column([column[row] for row in chosen], is_log))
        align += "l" if isinstance(column[0], str) else "r"
    return Table(list(zip(*written)), align, shown_head, hidden=length - len(chosen))


def _choose_rows(columns: Sequence[Sequence[Any]]) -> list[int]:
    """Choose about MAX_NUMBERS rows: every n-th one, and the largest of each column of numbers."""
    length = len(columns[0])
    every = -(-length // MAX_NUMBERS)
    chosen = set(range(0, length, every))
    for column in columns:
        if not isinstance(column[0], str):
            chosen.add(int(np.argmax(column)))
    return sorted(chosen)


def _write_column(values: Sequence[Any], is_log: bool) -> list[str]:
    """Write texts as they are; numbers with the decimals that make sense beside the largest, of a logarithmic axis
    each alone."""
    largest = max((abs(value) for value in values if isinstance(value, float)), default=0.0)
    decimals = 0
    if largest > 0:
        decimals = max(0, 3 - math.floor(math.log10(largest)))
    written = []
    for value in values:
        if isinstance(value, str):
            written.append(value)
        elif isinstance(value, int):
            written.append(f"{value:,}")
        elif is_log:
            written.append(significant(value, 4))
        else:
            written.append(f"{value:,.{decimals}f}")
    return written
