"""A section as lines for a terminal."""

from functools import singledispatch

from megatron_lite.report.section import Card, Hint, Lines, Section, Table
from megatron_lite.report.text import WIDTH, Style, fit, heading, table_lines, wrapped
from megatron_lite.terminal import escape


def section_lines(section: Section, style: Style) -> list[str]:
    """A section under its title."""
    lines = [heading(section.title, section.of, style)]
    for block in section.blocks:
        lines += _drawn(block, style)
    return lines


@singledispatch
def _drawn(block, style: Style) -> list[str]:
    raise TypeError(f"{type(block).__name__} cannot be drawn on a terminal")


@_drawn.register
def _table(table: Table, style: Style) -> list[str]:
    return table_lines(table, style) if table.rows else []


@_drawn.register
def _lines(lines: Lines, style: Style) -> list[str]:
    drawn = [line for text in lines.texts for line in wrapped(text, hanging="    ")]
    return [style.dim(line) for line in drawn] if lines.quiet else drawn


@_drawn.register
def _hint(hint: Hint, style: Style) -> list[str]:
    return [style.dim(line) for line in wrapped(hint.text, hanging="    ")]


@_drawn.register
def _card(card: Card, style: Style) -> list[str]:
    cost = escape(card.cost)
    text = fit(f"{card.number:>2}. {card.code}: {card.title}", WIDTH - len(cost) - 4)
    lines = [f"  {style.bold(text)}{' ' * (WIDTH - 2 - len(text) - len(cost))}{style.warm(cost)}".rstrip()]
    if not card.in_full:
        return lines
    evidence = [line for text in card.evidence for line in wrapped(text, "      ", "        ")]
    return [*lines, *evidence, *wrapped(f"try: {card.advice}", "      ", "        ")]
