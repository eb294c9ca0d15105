"""A Report as lines for a terminal: verdict, where a step goes, findings, tables, at last what could not be seen."""

from functools import singledispatch

from megatron_lite.analysis.report import Report
from megatron_lite.report.section import Card, Lines, Section, Table
from megatron_lite.report.sections.all import confidence_of, gaps_of, sections_of
from megatron_lite.report.text import WIDTH, Style, fit, harmless, heading, table_lines, wrapped

GAPS_SHOWN = 4


def terminal_lines(report: Report, style: Style, everything: bool = False) -> list[str]:
    """At most about 80 lines of WIDTH columns, or all rows of all tables."""
    lines = _head(report, style)
    for section in sections_of(report, everything):
        lines += ["", *section_lines(section, style)]
    return lines + _gaps(report, style, everything)


def _head(report: Report, style: Style) -> list[str]:
    sentence = wrapped(report.verdict.sentence)
    return [
        heading(report.title, f"read in {report.read_s:.1f} s", style),
        "",
        *(style.warm(line) for line in sentence),
        *(style.dim(line) for line in wrapped(confidence_of(report))),
    ]


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
def _card(card: Card, style: Style) -> list[str]:
    cost = harmless(card.cost)
    text = fit(f"{card.number:>2}. {card.code}: {card.title}", WIDTH - len(cost) - 4)
    lines = [f"  {style.bold(text)}{' ' * (WIDTH - 2 - len(text) - len(cost))}{style.warm(cost)}".rstrip()]
    if not card.in_full:
        return lines
    evidence = [line for text in card.evidence for line in wrapped(text, "      ", "        ")]
    return [*lines, *evidence, *wrapped(f"try: {card.advice}", "      ", "        ")]


def _gaps(report: Report, style: Style, everything: bool) -> list[str]:
    gaps = gaps_of(report)
    if not gaps:
        return []
    shown = gaps if everything else gaps[:GAPS_SHOWN]
    lines = ["", heading("What could not be seen", "", style)]
    for gap in shown:
        lines += wrapped(gap, "  - ", "    ")
    if len(gaps) > len(shown):
        lines.append(style.dim(f"  and {len(gaps) - len(shown)} more with --all"))
    return lines
