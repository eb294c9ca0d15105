"""Sections of a report in words and numbers, and how a terminal draws them; the page draws the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TypeVar

from megatron_lite.report.text import BAR_WIDTH, WIDTH, Style, fit, heading, percent, share, shorten, wrapped
from megatron_lite.terminal import escape

MIN_COLUMN = 6
READS_AS_ZERO = 0.0005  # of a step
Row = TypeVar("Row")


@dataclass(frozen=True)
class Table:
    """A table of texts. `align` has a letter per column, l or r."""

    rows: Sequence[Sequence[str]]
    align: str
    head: Sequence[str] = ()  # () for none
    shares: Sequence[float | None] = ()  # a bar behind each row; None for a row without one
    hidden: int = 0  # rows that were left out
    colors: Sequence[str] = ()  # of the rows' bars on a page; () for one color
    faint: Sequence[bool] = ()  # rows that say nothing new; () for none


@dataclass(frozen=True)
class Lines:
    """A block of sentences, each a line or more."""

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


PASSED = "passed"
FAILED = "failed"
NOT_VISIBLE = "not visible"


@dataclass(frozen=True)
class CheckCard:
    """A question to the run and its answer, with what the answer rests on."""

    number: int
    answer: str  # PASSED, FAILED or NOT_VISIBLE
    question: str
    name: str  # the question in a few words
    reasons: Sequence[str]
    hidden: int  # reasons that were left out
    remedy: str  # "try: ..." or "to see it: ..."; "" for what passed
    code: str  # of the finding that explains it; "" for none
    in_full: bool


Block = Table | Lines | Card | CheckCard


@dataclass(frozen=True)
class Section:
    """A part of a report: a title, at its right a subtitle that says what the numbers are of, and the blocks below."""

    key: str  # also the place of its chart
    title: str
    subtitle: str
    blocks: Sequence[Block]


def limit_rows(rows: Sequence[Row], limit: int, everything: bool) -> tuple[Sequence[Row], int]:
    """Choose the rows of a table to show. A single row is never hidden: the line that says so would take its place.

    Args:
        rows: all rows.
        limit: how many to show.
        everything: show all.

    Returns:
        The rows to show, and how many are hidden.
    """
    if everything or len(rows) <= limit + 1:
        return rows, 0
    return rows[:limit], len(rows) - limit


def drop_empty_columns(table: Table) -> Table:
    """Remove the columns in which no row has anything; both renderers begin with it."""
    is_filled = [any(cells) for cells in zip(*table.rows)]
    return replace(
        table,
        rows=[list(compress(row, is_filled)) for row in table.rows],
        align="".join(compress(table.align, is_filled)),
        head=list(compress(table.head, is_filled)),
    )


def build_share_table(
    parts: Sequence[tuple[str, float]],
    whole: float,
    write: Callable[[float], str],
    colors: Sequence[str] = (),
) -> Table:
    """Build a table with a bar in each row: a name, its value, and the value's share of the whole.

    Args:
        parts: (name, value) of each row.
        whole: the value that is 100%.
        write: writes a value with its unit.
        colors: the color of each bar.
    """
    rows = []
    shares = []
    for name, value in parts:
        part = share(value, whole)
        rows.append((name, write(value), percent(part)))
        shares.append(part)
    return Table(rows, "lrr", shares=shares, colors=colors)


# --- on a terminal


def section_lines(section: Section, style: Style) -> list[str]:
    """Write a section as lines for a terminal, its title first."""
    lines = [heading(section.title, section.subtitle, style)]
    for block in section.blocks:
        if isinstance(block, Table):
            lines += table_lines(block, style) if block.rows else []
        elif isinstance(block, Card):
            lines += _write_card(block, style)
        elif isinstance(block, CheckCard):
            lines += _write_check_card(block, style)
        else:
            lines += _write_sentences(block, style)
    return lines


def _write_card(card: Card, style: Style) -> list[str]:
    """Write a finding: its title with its cost at the right, and in full with evidence and advice."""
    indent = "  "
    cost = escape(card.cost)
    room = WIDTH - len(indent) - len(cost)
    title = fit(f"{card.number:>2}. {card.code}: {card.title}", room - 2)
    gap = " " * (room - len(title))
    first = f"{indent}{style.bold(title)}{gap}{style.warm(cost)}"
    lines = [first.rstrip()]
    if card.in_full:
        for text in (*card.evidence, f"try: {card.advice}"):
            lines += wrapped(text, "      ", "        ")
    return lines


ANSWER_WIDTH = len(NOT_VISIBLE)
NAME_WIDTH = 31
ANSWER_INDENT = " " * (ANSWER_WIDTH + 7)


def _write_check_card(block: CheckCard, style: Style) -> list[str]:
    """Write an answer in a line: the question's name and what was seen first, or what is missing. In full write all."""
    answer = block.answer
    paint = style.dim
    if answer == PASSED:
        paint = style.accent
    elif answer == FAILED:
        answer = answer.upper()
        paint = style.warm
    painted = paint(answer.ljust(ANSWER_WIDTH))
    begin = f"  {painted}  {block.number:>2} "
    room = WIDTH - len(ANSWER_INDENT)
    if block.in_full:
        question = style.bold(fit(block.question, room))
        return [begin + question, *_write_answer_details(block, style)]
    is_seen = answer != NOT_VISIBLE and len(block.reasons) > 0
    reason = block.reasons[0] if is_seen else block.remedy
    name = fit(block.name, NAME_WIDTH).ljust(NAME_WIDTH)
    shown = shorten(reason, room - NAME_WIDTH - 2)
    return [f"{begin}{name}  {shown}".rstrip()]


def _write_answer_details(block: CheckCard, style: Style) -> list[str]:
    """Write what stands below a question in full: the reasons of its answer, what to do, and where it is explained."""
    hanging = ANSWER_INDENT + "  "
    lines = []
    for reason in block.reasons:
        lines += wrapped(reason, ANSWER_INDENT, hanging)
    if block.hidden:
        hint = f"{ANSWER_INDENT}and {block.hidden} more with --all"
        lines.append(style.dim(hint))
    if block.remedy:
        lines += wrapped(block.remedy, ANSWER_INDENT, hanging)
    if block.code:
        lines += wrapped(f"megatron-lite explain {block.code}", ANSWER_INDENT)
    return lines


def _write_sentences(block: Lines, style: Style) -> list[str]:
    lines = []
    for text in block.texts:
        lines += wrapped(text, hanging="    ")
    if block.quiet:
        return [style.dim(line) for line in lines]
    return lines


def table_lines(table: Table, style: Style) -> list[str]:
    """Draw a table for a terminal: columns two spaces apart, the widest cut until they fit, and bars at the end."""
    table = drop_empty_columns(table)
    head = [table.head] if table.head else []
    texts = [list(map(escape, row)) for row in (*head, *table.rows)]
    lines = _align_columns(texts, table)
    if head:
        lines[0] = style.dim(lines[0].rstrip())
    first = len(head)
    for number, is_faint in enumerate(table.faint, first):
        if is_faint:
            lines[number] = style.dim(lines[number].rstrip())
    for number, part in enumerate(table.shares, first):
        if part is not None:
            bar = style.accent(style.bar(part))
            lines[number] += f"  {bar}"
    lines = [line.rstrip() for line in lines]
    if table.hidden:
        lines.append(style.dim(f"  and {table.hidden} more with --all"))
    return lines


def _align_columns(lines: list[list[str]], table: Table) -> list[str]:
    """Write lines with their cells in columns that leave room for the table's bars."""
    # two spaces stand before each column
    room = WIDTH - 2 * len(table.align)
    if table.shares:
        room -= BAR_WIDTH + 2
    widths = [max(map(len, cells)) for cells in zip(*lines)]
    while sum(widths) > room and max(widths) > MIN_COLUMN:
        widest = widths.index(max(widths))
        widths[widest] -= 1
    drawn = []
    for line in lines:
        padded = []
        for cell, width, side in zip(line, widths, table.align):
            text = fit(cell, width)
            padded.append(text.rjust(width) if side == "r" else text.ljust(width))
        drawn.append("  " + "  ".join(padded))
    return drawn
