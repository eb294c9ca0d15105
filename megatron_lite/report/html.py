"""A Report as one page: no network, every foreign string escaped, the plotting library inside (docs/decisions/016)."""

import importlib.util
import json
import re
from pathlib import Path

from megatron_lite.analysis.findings.rules import page_of
from megatron_lite.analysis.report import REPORT_SCHEMA, Report
from megatron_lite.report.charts.all import charts_of
from megatron_lite.report.charts.figure import Figure
from megatron_lite.report.json_file import plain
from megatron_lite.report.section import Table
from megatron_lite.report.sections.all import confidence_of, gaps_of, sections_of
from megatron_lite.report.tiles import tiles_of
from megatron_lite.terminal import escape

FOLDER = Path(__file__).parent
MAX_ROWS = 200
MAX_CELL_LETTERS = 400  # a kernel's template arguments can fill a page
MAX_UNBROKEN_LETTERS = 20  # of a cell that stays on one line
MAX_LETTERS_ON_A_PHONE = 44  # of all columns together
EXPLAINED = re.compile(r"^(?:(\w[\w ]*): )?(.+)$", re.MULTILINE)


def html_page(report: Report) -> str:
    """The whole page as text."""
    sections = sections_of(report, True)
    places = {section.key for section in sections}
    charts = {key: figure for key, figure in charts_of(report).items() if key in places}
    library = _plotly() if charts else ""
    shown = charts if library else {}
    return _template().render(
        report=report,
        confidence=confidence_of(report),
        tiles=tiles_of(report),
        sections=sections,
        charts=shown,
        about=_explained(report),
        gaps=gaps_of(report),
        schema=REPORT_SCHEMA,
        without_charts=bool(charts) and not library,
        css=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=(FOLDER / "page.js").read_text(encoding="utf-8"),
        library=library,
        data=_data(shown),
        max_rows=MAX_ROWS,
        max_cell_letters=MAX_CELL_LETTERS,
    )


def _template():
    """page.html.jinja, whose every expression is escaped and loses what a terminal or browser would obey."""
    import jinja2  # here: reports without a page do not wait for it
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else escape(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html.jinja", globals={"kind_of": _kind_of, "cell_classes": _cell_classes})


def _kind_of(table: Table) -> str:
    """bars, few (a phone shows its columns beside each other) or many."""
    heads = [max(name.split() or [""], key=len) for name in table.head]
    letters = sum(max(map(len, column)) for column in zip(*([heads] if heads else []), *table.rows))
    return "bars" if table.shares else "many" if letters > MAX_LETTERS_ON_A_PHONE else "few"


def _cell_classes(table: Table) -> list[str]:
    """For each column l or r, and w where its texts may be broken into several lines."""
    long = [any(len(row[at]) > MAX_UNBROKEN_LETTERS for row in table.rows) for at in range(len(table.align))]
    return [f"{side} w" if wide and side == "l" else side for side, wide in zip(table.align, long)]


def _explained(report: Report) -> dict[str, list[tuple[str, str]]]:
    """Code of a finding: what `explain` says of it, as (label, text)."""
    pages = {finding.code: page_of(finding.code) for finding in report.findings}
    return {code: EXPLAINED.findall(re.sub(r"\n +", " ", page)) for code, page in pages.items() if page}


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
