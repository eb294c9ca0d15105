"""A run on a terminal while it goes on: how `megatron-lite live` draws what cli/live_view.py collects."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_lite.report.text import Style, milliseconds, percent
from megatron_lite.terminal import escape
from megatron_lite.units import count, duration, significant

MIN_WIDE_COLUMNS = 100  # columns from which on two parts stand beside each other
GAP = 3  # columns between them
MAX_RANKS_IN_FULL = 8  # in full; of more the slowest, the median and the fastest one
MIN_CURVE_ROWS = 4
MAX_CURVE_ROWS = 16
GOOD_CURVE_ROWS = 10  # before other texts are shortened for the curve
MAX_SCREEN_ROWS = 50  # where no terminal limits them
PHASE_BAR_WIDTH = 14
MAX_TEXTS = 8  # warnings and findings
BRAILLE = 0x2800  # the letter without a dot
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])  # of a Braille letter, by row and column


class LossCurve(NamedTuple):
    """Losses over iterations: as many of both, in the order of iterations; none before the second loss."""

    iterations: Sequence[float]
    losses: Sequence[float]


class PhaseNow(NamedTuple):
    """How long a phase takes, in ms per step."""

    name: str
    now_ms: float  # in the newest steps
    usual_ms: float  # over the whole run

    @property
    def longer_ms(self) -> float:
        """Choose the longer of the phase's two times, in ms."""
        return max(self.now_ms, self.usual_ms)


@dataclass(frozen=True)
class RankNow:
    """Figures of a rank in the last console lines: ms per step, NaN for what is not known."""

    rank: int
    step_ms: float
    own_ms: float  # work without waiting for other ranks
    data_ms: float
    core_wait_ms: float


@dataclass(frozen=True)
class GpuNow:
    """Figures of a rank's GPU in the last lines; NaN for what is not known."""

    rank: int
    clock_mhz: float  # while it worked
    highest_mhz: float
    temperature_c: float
    power_w: float
    limits: str  # what holds the clock; "" for nothing


@dataclass(frozen=True)
class View:
    """Everything that the screen shows, in plain numbers and words."""

    title: str
    status: str
    started: float | None  # seconds since 1970
    ended: float | None
    iteration: int
    last_iteration: int | None  # that the run is to reach
    left_s: float | None
    figures: tuple[str, ...]  # of the newest steps
    curve: LossCurve
    phases: tuple[PhaseNow, ...]
    on_gpu: bool
    ranks: tuple[RankNow, ...]
    skew: str
    gpus: tuple[GpuNow, ...]
    memory: tuple[str, ...]
    warnings: tuple[str, ...]
    findings: tuple[str, ...]  # what `report` would say now
    slowest_ms: float  # of the newest steps


# --- on a terminal


def describe_progress(view: View, now: float | None = None) -> str:
    """Describe how far the run is, and how long it has taken and will take.

    Args:
        view: what the screen shows.
        now: seconds since 1970 of a run that goes on; None for the clock's.
    """
    done = count(view.iteration)
    progress = f"{done} iterations"
    if view.last_iteration:
        whole = count(view.last_iteration)
        share = view.iteration / view.last_iteration
        progress = f"{done} of {whole} iterations ({share:.0%})"
    parts = [progress]
    end = view.ended or now or time.time()
    if view.started is not None and end > view.started:
        gone = duration(end - view.started)
        parts.append(f"{gone} gone")
    is_running = view.ended is None and view.status.startswith("running")
    if view.left_s is not None and is_running:
        parts.append(f"{duration(view.left_s)} left")
    return ", ".join(parts)


def describe_newest(view: View) -> str:
    """Describe progress, figures and warnings in one line."""
    line = ", ".join([describe_progress(view), *view.figures])
    if not view.warnings:
        return line
    first = view.warnings[0]
    return f"{line}; {len(view.warnings)} warnings, the first: {first}"


def draw_view(view: View, note: str, console: Console, height: int | None = None) -> RenderableType:
    """Draw the screen for the console's width; in `height` lines, if that is given, what comes first.

    Args:
        view: what is shown.
        note: what `live` itself has to say, of silence or the end.
        console: the terminal.
        height: its lines; None where nothing limits them.
    """
    page = Page(console)
    head = Group(*_draw_head(view, note))
    head_rows = page.measure_whole(head)
    numbers = [_draw_phases(view, page.unicode), _draw_ranks(view), _draw_gpus(view), _draw_memory(view)]
    shown = [part for part in numbers if part]
    texts = _draw_texts(view, in_full=True)
    if height is not None:
        middle_rows = page.add_curve(GOOD_CURVE_ROWS, page.measure_numbers(shown))
        if head_rows + middle_rows + page.measure_whole(texts) > height:
            texts = _draw_texts(view, in_full=False)
    room_rows = (height or MAX_SCREEN_ROWS) - head_rows - page.measure_whole(texts)
    page.drop_numbers(shown, room_rows)
    curve_rows = page.choose_curve_rows(shown, room_rows)
    curve = draw_curve(view.curve, page.part_width, curve_rows, page.unicode)
    middle = page.arrange(curve, shown)
    if texts:
        middle.append(texts)
    return Group(head, *middle)


class Page:
    """The terminal's columns: the curve and the numbers stand beside each other where there is room, else below."""

    def __init__(self, console: Console):
        self.console = console
        self.unicode = not console.options.ascii_only
        self.is_wide = console.width >= MIN_WIDE_COLUMNS
        self.part_width = (console.width - GAP) // 2 if self.is_wide else console.width

    def measure_whole(self, part: RenderableType | None) -> int:
        """Count the lines of what is as wide as the terminal."""
        return self._measure(part, self.console.width)

    def measure_numbers(self, parts: Sequence[RenderableType]) -> int:
        """Count the lines of the tables of numbers, one below the other."""
        return sum(self._measure(part, self.part_width) for part in parts)

    def add_curve(self, curve_rows: int, number_rows: int) -> int:
        """Count the lines of the curve and the numbers together."""
        if self.is_wide:
            return max(curve_rows, number_rows)
        return curve_rows + number_rows

    def drop_numbers(self, parts: list[RenderableType], room_rows: int) -> None:
        """Take the last tables of numbers from `parts` until they fit into so many lines, beside or above a curve."""
        # a curve that stands below the numbers needs lines of its own: its title and some rows
        curve_rows = 0 if self.is_wide else MIN_CURVE_ROWS + 1
        while parts and self.measure_numbers(parts) > room_rows - curve_rows:
            parts.pop()

    def choose_curve_rows(self, numbers: Sequence[RenderableType], room_rows: int) -> int:
        """Choose the lines of the curve without its title: what the numbers leave of the room, within limits."""
        left_rows = room_rows
        if not self.is_wide:
            left_rows -= self.measure_numbers(numbers)
        curve_rows = max(left_rows - 1, MIN_CURVE_ROWS)
        return min(curve_rows, MAX_CURVE_ROWS)

    def arrange(self, curve: RenderableType | None, numbers: Sequence[RenderableType]) -> list[RenderableType]:
        """Put the curve and the numbers beside each other where there is room."""
        if curve is None:
            return [*numbers]
        if not self.is_wide or not numbers:
            return [curve, *numbers]
        grid = Table.grid(padding=(0, GAP, 0, 0))
        grid.add_column(width=self.part_width)
        grid.add_column(width=self.part_width)
        grid.add_row(curve, Group(*numbers))
        return [grid]

    def _measure(self, part: RenderableType | None, width: int) -> int:
        if not part:
            return 0
        options = self.console.options.update(width=width, height=None)
        return len(self.console.render_lines(part, options, pad=False))


def _draw_head(view: View, note: str) -> Iterator[RenderableType]:
    """Draw the title with the status, why it ended, progress and figures, and what `live` itself has to say."""
    status, _, why = view.status.partition(":")
    color = _choose_color(status)
    yield _join(Text(escape(view.title), "bold"), Text(escape(status), color))
    if why:
        yield Text(escape(f"{status}:{why}"), color)
    if view.last_iteration:
        bar = ProgressBar(total=view.last_iteration, completed=view.iteration)
        yield _join(bar, Text())
    yield _cut(describe_progress(view))
    if view.figures:
        yield Text(", ".join(view.figures))
    if note:
        yield Text(escape(note), style="bold yellow")


def _choose_color(status: str) -> str:
    """Choose the color of a run's status: one that runs but is not well is yellow."""
    if status in ("running", "finished"):
        return "green"
    return "yellow" if status.startswith("running") else "red"


def draw_curve(curve: LossCurve, width: int, rows: int, unicode: bool) -> RenderableType | None:
    """Draw the loss over iterations below a title; None without losses.

    Args:
        curve: what is drawn.
        width: columns.
        rows: lines below the title.
        unicode: whether the terminal shows more than ASCII.
    """
    if not curve.losses:
        return None
    highest = significant(max(curve.losses), 4)
    lowest = significant(min(curve.losses), 4)
    # only the first and the last line have a label
    labels = [""] * rows
    labels[0] = highest
    labels[-1] = lowest
    indent = max(len(highest), len(lowest))
    columns = max(width - indent - 1, 1)
    draw = _draw_dots if unicode else _draw_stars
    lines = draw(curve, columns, rows)
    first = count(curve.iterations[0])
    last = count(curve.iterations[-1])
    drawn = Text(f"Loss, iterations {first} to {last}", style="bold", no_wrap=True)
    for label, line in zip(labels, lines):
        drawn.append(f"\n{label:>{indent}} ", style="not bold")
        drawn.append(line, style="not bold cyan")
    return drawn


def _draw_dots(curve: LossCurve, columns: int, rows: int) -> list[str]:
    """Draw a curve with Braille letters, each of which has four rows of two dots.

    Args:
        curve: what is drawn.
        columns: letters of a line.
        rows: lines.
    """
    cells = np.zeros((rows, columns), int)
    for x, y in _trace_dots(curve, columns * 2, rows * 4):
        dot = DOTS[y % 4, x % 2]
        cells[y // 4, x // 2] |= dot
    lines = []
    for row in cells:
        letters = [chr(BRAILLE + cell) if cell else " " for cell in row]
        lines.append("".join(letters))
    return lines


def _draw_stars(curve: LossCurve, columns: int, rows: int) -> list[str]:
    """Draw a curve with stars, for terminals that show nothing but ASCII.

    Args:
        curve: what is drawn.
        columns: letters of a line.
        rows: lines.
    """
    cells = [[" "] * columns for _ in range(rows)]
    for x, y in _trace_dots(curve, columns, rows):
        cells[y][x] = "*"
    return ["".join(row) for row in cells]


def _trace_dots(curve: LossCurve, across: int, down: int) -> Iterator[tuple[int, int]]:
    """List the dots that a curve sets, as (column, row) from the top left; each joins the one before without a gap.

    Args:
        curve: what is drawn.
        across: columns of dots.
        down: rows of dots.
    """
    first = curve.iterations[0]
    last = curve.iterations[-1]
    places = np.linspace(first, last, across)
    values = np.interp(places, curve.iterations, curve.losses)
    highest = max(curve.losses)
    lowest = min(curve.losses)
    # of a curve that is level, all is at the top
    span = highest - lowest or 1.0
    share_from_top = (highest - values) / span
    heights = np.rint(share_from_top * (down - 1)).astype(int)
    before = heights[0]
    for x, y in enumerate(heights):
        upper = min(before, y)
        lower = max(before, y)
        for dot in range(upper, lower + 1):
            yield x, dot
        before = y


def _draw_phases(view: View, unicode: bool) -> RenderableType | None:
    """Draw a row per phase: its time now with a bar, and its time over the run."""
    if not view.phases:
        return None
    whole_ms = math.fsum(phase.now_ms for phase in view.phases)
    longest_ms = max(phase.longer_ms for phase in view.phases)
    clock = "the GPU's" if view.on_gpu else "the host's"
    table = _make_table(f"Step, {clock} ms", "now", "", "", "run")
    bars = table.columns[3]
    bars.justify = "left"
    bars.ratio = 1
    style = Style(unicode=unicode)
    for phase in view.phases:
        share = phase.now_ms / whole_ms if whole_ms else 0.0
        bar = Text(style.bar(share, PHASE_BAR_WIDTH), style="cyan")
        now = milliseconds(phase.now_ms, longest_ms)
        usual = milliseconds(phase.usual_ms, longest_ms)
        table.add_row(_cut(phase.name), now, percent(share), bar, usual)
    return table


def _draw_ranks(view: View) -> RenderableType | None:
    """Draw a row per rank; of many ranks the slowest, the median and the fastest."""
    if not view.ranks:
        return None
    longest_ms = max(one.step_ms for one in view.ranks)
    write = partial(milliseconds, largest=longest_ms)
    table = _make_table("Ranks, ms", "step", "own work", "data", "no core")
    for one in _choose_ranks(view.ranks):
        table.add_row(
            f"rank {one.rank}",
            write(one.step_ms),
            write(one.own_ms),
            write(one.data_ms),
            write(one.core_wait_ms),
        )
    if view.skew:
        return Group(table, Text(view.skew, style="dim"))
    return table


def _choose_ranks(ranks: Sequence[RankNow]) -> Sequence[RankNow]:
    """Choose the ranks that are shown: all of a few, else the three slowest, the median and the fastest."""
    if len(ranks) <= MAX_RANKS_IN_FULL:
        return ranks
    slowest_first = sorted(ranks, key=lambda one: -one.own_ms)
    median = slowest_first[len(ranks) // 2]
    return [*slowest_first[:3], median, slowest_first[-1]]


def _draw_gpus(view: View) -> RenderableType | None:
    """Draw a row per GPU; of many GPUs those with the lowest clocks, the median and the highest one."""
    if not view.gpus:
        return None
    table = _make_table("GPUs", "MHz", "of", "deg C", "W", "held by")
    for one in _choose_gpus(view.gpus):
        table.add_row(
            f"rank {one.rank}",
            _write_whole(one.clock_mhz),
            _write_whole(one.highest_mhz),
            _write_whole(one.temperature_c),
            _write_whole(one.power_w),
            one.limits,
        )
    return table


def _choose_gpus(gpus: Sequence[GpuNow]) -> Sequence[GpuNow]:
    """Choose the GPUs that are shown: all of a few, else the three lowest clocks, the median and the highest."""
    if len(gpus) <= MAX_RANKS_IN_FULL:
        return gpus
    lowest_first = sorted(gpus, key=_rate_clock)
    median = lowest_first[len(gpus) // 2]
    return [*lowest_first[:3], median, lowest_first[-1]]


def _rate_clock(one: GpuNow) -> float:
    """A GPU's clock; one that is not known is none to look at."""
    return math.inf if math.isnan(one.clock_mhz) else one.clock_mhz


def _write_whole(value: float) -> str:
    """Write a whole number; '' for one that is not known."""
    return "" if math.isnan(value) else f"{value:,.0f}"


def _draw_memory(view: View) -> RenderableType | None:
    if not view.memory:
        return None
    title = Text("Memory", style="bold")
    return Group(title, *map(_cut, view.memory))


def _draw_texts(view: View, in_full: bool) -> RenderableType | None:
    """Draw warnings, then what else a report would say; a line each, or in full. Warnings are always in full."""
    rows = []
    for text in view.warnings:
        rows.append(Text(escape(text), "yellow", overflow="ellipsis", no_wrap=False))
    for text in view.findings:
        rows.append(Text(escape(text), overflow="ellipsis", no_wrap=not in_full))
    if not rows:
        return None
    grid = Table.grid()
    for row in rows[:MAX_TEXTS]:
        grid.add_row("- ", row)
    if len(rows) > MAX_TEXTS:
        more = f"and {len(rows) - MAX_TEXTS} more: megatron-lite report"
        grid.add_row("", Text(more, "dim"))
    title = "Warnings" if view.warnings else "Findings"
    return Group(Text(title, "bold"), grid)


def _make_table(title: str, *names: str) -> Table:
    """Make a table without lines: a title over its first column, and names over the others."""
    table = Table(
        box=None,
        expand=True,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="dim",
        show_edge=False,
    )
    table.add_column(Text(title, "bold"), justify="left", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", no_wrap=True)
    return table


def _join(left: RenderableType, right: Text) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(justify="right", overflow="ellipsis", no_wrap=True)
    grid.add_row(left, right)
    return grid


def _cut(text: str) -> Text:
    """Make a text that is cut to one line."""
    return Text(escape(text), no_wrap=True, overflow="ellipsis")
