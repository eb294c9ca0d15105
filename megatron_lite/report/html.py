"""A Report as one page: no network, every foreign string escaped, charts drawn inside (docs/decisions/016)."""

import contextlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.analysis.report import REPORT_SCHEMA, Report
from megatron_lite.report.charts import build_charts
from megatron_lite.report.figure import Figure
from megatron_lite.report.section import Card, Section, Table, drop_empty_columns
from megatron_lite.report.sections.all import build_limitations, build_sections
from megatron_lite.report.text import milliseconds, percent
from megatron_lite.terminal import escape
from megatron_lite.units import count, significant, size

FOLDER = Path(__file__).parent
MAX_PAGE_ROWS = 200
MAX_PAPER_ROWS = 24  # as page.css has it
MAX_CELL_LETTERS = 400  # a kernel's template arguments can fill a page
MAX_UNBROKEN_LETTERS = 20  # of a cell that stays on one line
MAX_LETTERS_ON_A_PHONE = 44  # of all columns together
NAMED_EXPLANATION = re.compile(r"^(?:(\w[\w ]*): )?(.+)$", re.MULTILINE)


def build_tiles(report: Report) -> list[tuple[str, str]]:
    """Build the few numbers beside the verdict, each with its name: only what was measured.

    Times are those of the rank that waits least; shares of a step are of all ranks.
    """
    tiles = _build_trace_tiles(report)
    run = report.facts.run
    if run and run.steady_step_ms:
        tiles.append((f"{milliseconds(run.steady_step_ms)} ms", "step time without the profiler"))
    if run and run.tokens_per_second:
        tiles.append((count(run.tokens_per_second), "tokens/s"))
    snapshot = report.facts.highest_snapshot
    if snapshot:
        where = f" in {snapshot.peak_phase}" if snapshot.peak_phase else ""
        tiles.append((size(snapshot.peak_bytes), f"peak memory{where}"))
    return tiles


def _build_trace_tiles(report: Report) -> list[tuple[str, str]]:
    """Build the numbers that come from traces; [] without a trace of a steady step."""
    rank = report.facts.critical
    if rank is None or rank.time.step_ms <= 0:
        return []
    times = [one.time for one in report.facts.ranks_seen if one.time.step_ms > 0]
    name = "step time in the trace"
    if len(times) > 1 and rank.time.rank is not None:
        name += f", rank {rank.time.rank}"
    tiles = [(f"{milliseconds(rank.time.step_ms)} ms", name)]
    if rank.time.on_gpu:
        busy = [time.busy_ms / time.step_ms for time in times]
        tiles.append(_build_share_tile("device busy", busy))
    if any(time.communication_ms > 0 for time in times):
        exposed = []
        for time in times:
            exposed_ms = time.rows.get("exposed_communication", 0.0)
            exposed.append(exposed_ms / time.step_ms)
        tiles.append(_build_share_tile("communication not overlapped", exposed))
    kernels = rank.kernels
    if kernels.mfu is not None:
        peak = significant(kernels.peak_tflops or 0.0, 4)
        tiles.append((percent(kernels.mfu), f"of {peak} TFLOP/s {kernels.peak_dtype}"))
    return tiles


def _build_share_tile(name: str, by_rank: list[float]) -> tuple[str, str]:
    """Write a share of the step, from the least to the most of all ranks where they differ."""
    least = percent(min(by_rank))
    most = percent(max(by_rank))
    if least == most:
        return least, name
    return f"{least} to {most}", f"{name}, by rank"


def html_page(report: Report) -> str:
    """Write a report as the HTML of one page."""
    charts = build_charts(report)
    sections = build_sections(report, True)
    next_steps = [report.verdict.next_steps] if report.verdict.next_steps else []
    if "losses" in charts:
        sections.append(Section("losses", "Losses", "of every step", []))
    return render_page(
        sections,
        charts,
        title=report.title,
        command="report",
        sentences=[*re.split(r"(?<=\.) ", report.verdict.headline), *next_steps],
        confidence=report.verdict.why,
        trust=_name_trust(report),
        tiles=build_tiles(report),
        explanations=_explain_findings(report),
        gaps_title="What could not be seen",
        gaps=build_limitations(report),
        numbers=f"report.json (schema {REPORT_SCHEMA})",
    )


def _explain_findings(report: Report) -> dict[str, list[tuple[str, str]]]:
    """List what `explain` says of each finding, as (label, text), by code."""
    texts = {}
    for finding in report.findings:
        page = report.find_page(finding)
        if page:
            unfolded = re.sub(r"\n +", " ", page.text)
            texts[finding.code] = NAMED_EXPLANATION.findall(unfolded)
    return texts


def _name_trust(report: Report) -> str:
    """Name the confidence of the verdict: high, low or inconclusive."""
    verdict = report.verdict
    return "inconclusive" if verdict.bound == "inconclusive" else verdict.confidence


def render_page(sections: Sequence[Section], charts: Mapping[str, Figure | None], **texts: Any) -> str:
    """Fill page.html.jinja, whose every expression loses what a terminal or browser would obey.

    Args:
        sections: the sections of the page.
        charts: charts by the key of their section.
        texts: the other names that the template has.
    """
    from megatron_lite.report import svg  # here: reports without a page do not wait for it

    shown = {section.key: figure for section in sections if (figure := charts.get(section.key))}
    known = {
        "confidence": "",
        "trust": "",
        "tiles": [],
        "explanations": {},
        "sections": sections,
        "charts": shown,
        "cards": _list_cards_by_section(sections),
        "draw": svg.draw,
        "measure_gutter": svg.measure_gutter,
        "place_rows": svg.place_rows,
        "css": (FOLDER / "page.css").read_text(encoding="utf-8"),
        "script": (FOLDER / "page.js").read_text(encoding="utf-8"),
        "max_rows": MAX_PAGE_ROWS,
        "max_paper_rows": MAX_PAPER_ROWS,
        "max_cell_letters": MAX_CELL_LETTERS,
        "choose_layout": _choose_layout,
        "cell_classes": _choose_cell_classes,
        "drop_empty_columns": drop_empty_columns,
    }
    # as globals, so that macros see them
    page: str = _make_environment().get_template("page.html.jinja", globals={**known, **texts}).render()
    return page


def _list_cards_by_section(sections: Sequence[Section]) -> dict[str, list[Card]]:
    """List the findings that a section shows, by its key."""
    cards = [block for section in sections for block in section.blocks if isinstance(block, Card)]
    by_section = {}
    for section in sections:
        by_section[section.key] = [card for card in cards if section.key in card.shown_in]
    return by_section


def _make_environment() -> Any:
    import jinja2  # here: reports without a page do not wait for it
    from markupsafe import Markup

    class Compiled(jinja2.FileSystemBytecodeCache):
        def dump_bytecode(self, bucket: Any) -> None:
            with contextlib.suppress(OSError):  # a full disk: compiled again next time
                super().dump_bytecode(bucket)

    compiled = FOLDER / "__pycache__"  # where Python keeps what it has compiled of this folder
    is_kept = os.access(compiled, os.W_OK) and not sys.dont_write_bytecode
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else escape(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        bytecode_cache=Compiled(str(compiled)) if is_kept else None,
    )


def _choose_layout(table: Table) -> str:
    """Choose the layout of a table: bars, few (a phone shows its columns beside each other) or many."""
    if table.shares:
        return "bars"
    lines = list(table.rows)
    if table.head:
        # a head is broken into lines of a word each
        lines.insert(0, [max(name.split() or [""], key=len) for name in table.head])
    letters = sum(max(map(len, column)) for column in zip(*lines))
    return "many" if letters > MAX_LETTERS_ON_A_PHONE else "few"


def _choose_cell_classes(table: Table) -> list[str]:
    """Choose each column's classes: l or r, and w where its texts may be broken into several lines."""
    classes = []
    for column, side in enumerate(table.align):
        is_long = any(len(row[column]) > MAX_UNBROKEN_LETTERS for row in table.rows)
        classes.append("l w" if is_long and side == "l" else side)
    return classes
