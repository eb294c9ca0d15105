"""A Report as one page: no network, every foreign string escaped, the plotting library inside (docs/decisions/016)."""

import importlib.util
import json
from functools import singledispatch
from pathlib import Path

from megatron_lite.analysis.report import REPORT_SCHEMA, Report
from megatron_lite.report.charts.all import charts_of
from megatron_lite.report.charts.figure import Figure
from megatron_lite.report.json_file import plain
from megatron_lite.report.page_script import SCRIPT
from megatron_lite.report.page_style import CSS
from megatron_lite.report.page_text import escaped, table_html
from megatron_lite.report.section import Card, Lines, Section, Table
from megatron_lite.report.sections.all import confidence_of, gaps_of, sections_of
from megatron_lite.report.tiles import tiles_of

# Whatever a name smuggles in: the page may load nothing and talk to nobody.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
MOST_LINES, MOST_QUIET_LINES = 12, 5


def html_page(report: Report) -> str:
    """The whole page as text."""
    shown = sections_of(report, True)
    places = {section.key for section in shown}
    charts = {key: figure for key, figure in charts_of(report).items() if key in places}
    library = _plotly() if charts else ""
    sections = [_section(section, charts.get(section.key) if library else None) for section in shown]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escaped(report.title)}</title><style>{CSS}</style></head><body>",
            _head(report),
            *sections,
            _gaps(report),
            _foot(bool(charts) and not library),
            f'<script type="application/json" id="charts">{_data(charts if library else {})}</script>',
            f"<script>{library}</script><script>{SCRIPT}</script></body></html>",
            "",
        ]
    )


def _plotly() -> str:
    """plotly.js as the plotly package brings it, without importing that package; '' where it is not installed."""
    found = importlib.util.find_spec("plotly")
    folders = found.submodule_search_locations if found else None
    script = Path(folders[0]) / "package_data" / "plotly.min.js" if folders else None
    return script.read_text(encoding="utf-8") if script and script.is_file() else ""


def _data(charts: dict[str, Figure]) -> str:
    """JSON that no name in it can end: < does not occur."""
    figures = {key: {"data": figure.data, "layout": figure.layout} for key, figure in charts.items()}
    return json.dumps(plain(figures), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _head(report: Report) -> str:
    tiles = "".join(
        f"<div><b>{escaped(tile.value)}</b><span>{escaped(tile.name)}</span></div>" for tile in tiles_of(report)
    )
    kind = "verdict inconclusive" if report.verdict.bound == "inconclusive" else "verdict"
    return (
        f"<header><h1>{escaped(report.title)}</h1><div>megatron-lite report</div></header>"
        f'<section class="{kind}"><p>{escaped(report.verdict.sentence)}</p>'
        f"<small>{escaped(confidence_of(report))}</small>"
        f'<div class="tiles">{tiles}</div></section>'
    )


def _section(section: Section, figure: Figure | None) -> str:
    chart = (
        f'<div class="chart" id="chart-{section.key}" role="img" aria-label="{escaped(figure.says)}"></div>'
        if figure
        else ""
    )
    blocks = "".join(_drawn(block) for block in section.blocks)
    return (
        f'<section id="{section.key}"><h2>{escaped(section.title)}<span class="of">{escaped(section.of)}</span></h2>'
        f"{chart}{blocks}</section>"
    )


@singledispatch
def _drawn(block) -> str:
    raise TypeError(f"{type(block).__name__} cannot be drawn on a page")


@_drawn.register
def _table(table: Table) -> str:
    return table_html(table)


@_drawn.register
def _lines(lines: Lines) -> str:
    kind = ' class="quiet"' if lines.quiet else ""
    most = MOST_QUIET_LINES if lines.quiet else MOST_LINES
    shown = "".join(f"<p{kind}>{escaped(text)}</p>" for text in lines.texts[:most])
    rest = len(lines.texts) - most
    return shown + (f'<p class="more">and {rest} more: report --all</p>' if rest > 0 else "")


@_drawn.register
def _card(card: Card) -> str:
    evidence = "".join(f"<li>{escaped(text)}</li>" for text in card.evidence)
    return (
        f"<article><h3><span>{card.number}. {escaped(card.title)} <code>{escaped(card.code)}</code></span>"
        f"<b>{escaped(card.cost)}</b>"
        f'</h3><ul>{evidence}</ul><div class="try">Try: {escaped(card.advice)}</div></article>'
    )


def _gaps(report: Report) -> str:
    gaps = "".join(f"<li>{escaped(gap)}</li>" for gap in gaps_of(report))
    return f'<section id="gaps"><h2>What could not be seen</h2><ul class="gaps">{gaps}</ul></section>' if gaps else ""


def _foot(without_charts: bool) -> str:
    missing = (
        " Charts are missing: the package plotly is not installed where this page was made." if without_charts else ""
    )
    return (
        f"<footer>The same numbers for programs: report.json (schema {REPORT_SCHEMA}). "
        f"Click a column's title to sort.{missing}"
        "<noscript> Charts need JavaScript; the tables have their numbers.</noscript></footer>"
    )
