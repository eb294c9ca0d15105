"""The charts of a page before anybody draws them: bars to the right, and curves or points over two axes; their numbers as a table."""

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
    """Rows from the top down. `says`: what it shows in a sentence, for readers who cannot see it."""

    says: str
    series: Sequence[Bars]
    axis: Axis
    arrangement: Arrangement = Arrangement.STACKED
    row_px: int = 26
    limit: float | None = None  # a dotted line across all rows

    @property
    def rows(self) -> list[str]:
        """Names in their order, each once."""
        return list(dict.fromkeys(row for one in self.series for row in one.rows))

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Names and colors of the series that have a name."""
        return [(one.name, one.colors[0]) for one in self.series if one.name]

    @property
    def numbers(self) -> Table:
        """A row for each of the chart with a column per series; of bars that begin somewhere a row for each bar."""
        if not any(one.begins for one in self.series):
            by_row = [dict(zip(one.rows, one.values)) for one in self.series]
            columns = [[of_row.get(row, 0.0) for row in self.rows] for of_row in by_row]
            return _build_table(["", *(one.name or self.axis.title for one in self.series)], [self.rows, *columns])
        names = [one.name for one in self.series for _ in one.rows]
        batches = [str(batch) for one in self.series for batch in one.micro_batches or ("",) * len(one.rows)]
        rows = [row for one in self.series for row in one.rows]
        begins = [begin for one in self.series for begin in one.begins]
        values = [value for one in self.series for value in one.values]
        head = ["series", "micro-batch", "", "begins", self.axis.title]
        return _build_table(head, [names, batches, rows, begins, values])


@dataclass(frozen=True)
class CurveChart:
    """Curves and points. `says`: what it shows in a sentence, for readers who cannot see it."""

    says: str
    curves: Sequence[Curve]
    x: Axis
    y: Axis
    plot_px: int
    mark: Mark | None = None

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Names and colors of the series that have a name; a limit's is written beside it instead."""
        return [(one.name, one.color) for one in self.curves if one.name and not one.is_limit]

    @property
    def numbers(self) -> Table:
        """A row per place with a column per curve where all have the same places, else a row per point."""
        first = self.curves[0]
        if not any(list(one.x) != list(first.x) or one.texts for one in self.curves):
            head = [self.x.title, *(one.name or self.y.title for one in self.curves)]
            logs = [self.x.is_log, *(self.y.is_log for _ in self.curves)]
            return _build_table(head, [first.x, *(one.y for one in self.curves)], logs)
        names = [one.name for one in self.curves for _ in one.x]
        texts = [text for one in self.curves for text in one.texts or [""] * len(one.x)]
        x, y = ([value for one in self.curves for value in getattr(one, side)] for side in "xy")
        logs = [False, False, self.x.is_log, self.y.is_log]
        return _build_table(["series", "point", self.x.title, self.y.title], [names, texts, x, y], logs)


Figure = BarChart | CurveChart


def _build_table(head: Sequence[str], columns: Sequence[Sequence[Any]], logs: Sequence[bool] = ()) -> Table:
    """Evenly chosen rows of many, and each column's largest; columns without any text are left out.

    Args:
        head: a name per column.
        columns: texts, or numbers.
        logs: for each column whether its axis is logarithmic: such numbers are written each alone. () for none.
    """
    length = len(columns[0])
    largest = {int(np.argmax(column)) for column in columns if not isinstance(column[0], str)}
    chosen = sorted({*range(0, length, -(-length // MAX_NUMBERS)), *largest})
    keep = [at for at, column in enumerate(columns) if any(part != "" for part in column)]
    written = []
    for at in keep:
        values = [columns[at][row] for row in chosen]
        written.append(_write_column(values, is_log=bool(logs) and logs[at]))
    align = "".join("l" if isinstance(columns[at][0], str) else "r" for at in keep)
    return Table(list(zip(*written)), align, [head[at] for at in keep], hidden=length - len(chosen))


def _write_column(values: Sequence[Any], is_log: bool) -> list[str]:
    """Texts as they are; numbers with the decimals that make sense beside the largest, of a logarithmic axis each alone."""
    largest = max((abs(one) for one in values if isinstance(one, float)), default=0.0)
    decimals = max(0, 3 - math.floor(math.log10(largest))) if largest > 0 else 0

    def write(one: str | float) -> str:
        if isinstance(one, str):
            return one
        if isinstance(one, int):
            return f"{one:,}"
        return significant(one, 4) if is_log else f"{one:,.{decimals}f}"

    return list(map(write, values))
