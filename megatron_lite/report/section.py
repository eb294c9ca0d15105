"""Sections of a report in words and numbers, and how a terminal draws them; the page draws the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from megatron_lite.report.text import BAR_WIDTH, WIDTH, Style, fit, heading, percent, share, wrapped
from megatron_lite.terminal import escape

MIN_COLUMN = 6
Row = TypeVar("Row")


@dataclass(frozen=True)
class Table:
    """Rows of texts. `align` has a letter per column, l or r."""

    rows: Sequence[Sequence[str]]
    align: str
    head: Sequence[str] = ()  # () for none
    shares: Sequence[float | None] = ()  # a bar behind each row; None for a row without one
    hidden: int = 0  # rows that were left out
    colors: Sequence[str] = ()  # of the rows' bars on a page; () for one color
    faint: Sequence[bool] = ()  # rows that say nothing new; () for none


@dataclass(frozen=True)
class Lines:
    """Sentences, a line or more each."""

    texts: Sequence[str]
    quiet: bool = False  # detail rather than message
    is_hint: bool = False  # what to type next, for readers who have a command line before them


@dataclass(frozen=True)
class Card:
    """A finding with its evidence and advice."""

    number: int
    code: str
    title: str
    cost: str
    evidence: Sequence[str]
    advice: str
    in_full: bool
    shown_in: Sequence[str] = ()  # keys of sections that show it


Block = Table | Lines | Card


@dataclass(frozen=True)
class Section:
    """A title, at its right what its numbers are of, and what stands below."""

    key: str  # also the place of its chart
    title: str
    of: str
    blocks: Sequence[Block]


def limit_rows(rows: Sequence[Row], most: int, everything: bool) -> tuple[Sequence[Row], int]:
    """Choose the rows of a table to show. A single row is never hidden: the line that says so would take its place.

    Args:
        rows: all rows.
        most: how many to show.
        everything: show all.

    Returns:
        The rows to show, and how many are hidden.
    """
    if everything or len(rows) <= most + 1:
        return rows, 0
    return rows[:most], len(rows) - most


def drop_empty_columns(table: Table) -> Table:
    """Remove the columns in which no row has anything; both renderers begin with it."""
    keep = [at for at in range(len(table.align)) if any(row[at] for row in table.rows)]
    rows, align = [[row[at] for at in keep] for row in table.rows], "".join(table.align[at] for at in keep)
    return replace(table, rows=rows, align=align, head=[table.head[at] for at in keep] if table.head else ())


def build_share_table(
    parts: Sequence[tuple[str, float]], whole: float, write: Callable[[float], str], colors: Sequence[str] = ()
) -> Table:
    """Build a table with a bar in each row: a name, its value, and the value's share of the whole.

    Args:
        parts: (name, value) of each row.
        whole: the value that is 100%.
        write: writes a value with its unit.
        colors: the color of each bar.
    """
    shares = [share(value, whole) for _, value in parts]
    rows = [(name, write(value), percent(part)) for (name, value), part in zip(parts, shares)]
    return Table(rows, "lrr", shares=shares, colors=colors)


# --- on a terminal


def section_lines(section: Section, style: Style) -> list[str]:
    """A section under its title."""
    lines = [heading(section.title, section.of, style)]
    for block in section.blocks:
        if isinstance(block, Table):
            lines += table_lines(block, style) if block.rows else []
        elif isinstance(block, Card):
            cost = escape(block.cost)
            text = fit(f"{block.number:>2}. {block.code}: {block.title}", WIDTH - len(cost) - 4)
            gap = " " * (WIDTH - 2 - len(text) - len(cost))
            lines.append(f"  {style.bold(text)}{gap}{style.warm(cost)}".rstrip())
            for said in (*block.evidence, f"try: {block.advice}") if block.in_full else ():
                lines += wrapped(said, "      ", "        ")
        else:
            drawn = [line for text in block.texts for line in wrapped(text, hanging="    ")]
            lines += [style.dim(line) for line in drawn] if block.quiet else drawn
    return lines


def table_lines(table: Table, style: Style) -> list[str]:
    """Draw a table for a terminal: columns two spaces apart, the widest ones cut until they fit, and bars at the end."""
    table = drop_empty_columns(table)
    lines = [*([table.head] if table.head else []), *table.rows]
    drawn = _align_columns([[escape(cell) for cell in line] for line in lines], table)
    first = 0
    if table.head:
        drawn[0] = style.dim(drawn[0].rstrip())
        first = 1
    for at, is_faint in enumerate(table.faint, first):
        if is_faint:
            drawn[at] = style.dim(drawn[at].rstrip())
    for at, part in enumerate(table.shares, first):
        if part is not None:
            drawn[at] += "  " + style.accent(style.bar(part))
    drawn = [line.rstrip() for line in drawn]
    if table.hidden:
        drawn.append(style.dim(f"  and {table.hidden} more with --all"))
    return drawn


def _align_columns(lines: list[list[str]], table: Table) -> list[str]:
    """Write lines with their cells in columns that leave room for the table's bars."""
    room = WIDTH - 2 - 2 * (len(table.align) - 1)
    if table.shares:
        room -= BAR_WIDTH + 2
    widths = [max(len(line[at]) for line in lines) for at in range(len(table.align))]
    while sum(widths) > room and max(widths) > MIN_COLUMN:
        widths[widths.index(max(widths))] -= 1
    drawn = []
    for line in lines:
        padded = []
        for cell, width, side in zip(line, widths, table.align):
            text = fit(cell, width)
            padded.append(text.rjust(width) if side == "r" else text.ljust(width))
        drawn.append("  " + "  ".join(padded))
    return drawn
