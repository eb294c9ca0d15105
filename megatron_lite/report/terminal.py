"""A Report as lines for a terminal: verdict, where a step goes, findings, tables, at last what could not be seen."""

from functools import singledispatch

from megatron_lite.analysis.report import Report
from megatron_lite.report.section import Card, Hint, Lines, Section, Table
from megatron_lite.report.sections.all import confidence_of, gaps_of, sections_of
from megatron_lite.report.text import WIDTH, Style, fit, heading, table_lines, wrapped
from megatron_lite.terminal import escape

# --- A section as lines for a terminal


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


# --- A Report as lines for a terminal: verdict, where a step goes, findings, tables, at last what could not be seen


GAPS_SHOWN = 2
MAX_LINES = 82  # with the line that says what was left out: two screens
LEFT_OUT_FIRST = ("collectives", "roofline", "kernels", "operators", "phases")  # what says least to most people


def terminal_lines(report: Report, style: Style, everything: bool = False) -> list[str]:
    """At most about 80 lines of WIDTH columns, or all rows of all tables."""
    head, gaps = _head(report, style), _gaps(report, style, everything)
    sections = {section.key: section for section in sections_of(report, everything)}
    drawn = {key: ["", *section_lines(section, style)] for key, section in sections.items()}
    left_out = []
    for key in () if everything else LEFT_OUT_FIRST:
        if len(head) + len(gaps) + sum(map(len, drawn.values())) <= MAX_LINES:
            break
        if drawn.pop(key, None):
            left_out.append(sections[key].title)
    more = ["", style.dim(f"With --all: {', '.join(left_out)}")] if left_out else []
    return [*head, *(line for lines in drawn.values() for line in lines), *more, *gaps]


def _head(report: Report, style: Style) -> list[str]:
    sentence = wrapped(report.verdict.sentence)
    return [
        heading(report.title, f"read in {report.read_s:.1f} s", style),
        "",
        *(style.warm(line) for line in sentence),
        *(style.dim(line) for line in wrapped(confidence_of(report))),
    ]


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
