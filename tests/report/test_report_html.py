"""The page: one file that loads nothing, draws its charts, and shows foreign names as nothing but text."""

import dataclasses
import errno
import functools
import html
import html.parser
import re
import shutil
import sys
import tempfile
from unittest.mock import Mock

import numpy as np
import pytest
from support import report_cases as cases
from support.wording import wording

from megatron_lite.analysis.findings.checks import QUESTIONS
from megatron_lite.analysis.findings.rules import RULES
from megatron_lite.analysis.memory.memory_results import CurvePoint
from megatron_lite.analysis.time.time_results import Span
from megatron_lite.cli.main import main
from megatron_lite.report import draw, svg
from megatron_lite.report import html as page_module
from megatron_lite.report.charts import build_charts, thin_moments
from megatron_lite.report.figure import Axis, Curve, CurveChart, Look
from megatron_lite.report.html import build_tiles, html_page
from megatron_lite.report.sections.all import SECTIONS, build_sections

MAX_BYTES = 600_000
HOSTILE = cases.HOSTILE.replace("alert(1)", "document.title='owned'")
REPORTS = {
    "gpu": cases.report,
    "cpu": lambda: cases.report(None),
    "hostile": lambda: cases.report(name=HOSTILE),
    "run": lambda: cases.report(ranks_seen=(), snapshots=(), ranks=None),
}


class Elements(html.parser.HTMLParser):
    """What a browser would make of the text: element names, attributes, and what stands between."""

    def __init__(self, text: str):
        super().__init__()
        self.names, self.values, self.texts = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.names.append(tag)
        self.values += [name for name, _ in attributes]

    def handle_data(self, data):
        self.texts.append(data)


@functools.cache
def page(kind: str) -> str:
    return html_page(REPORTS[kind]())


@pytest.mark.parametrize("kind", REPORTS)
def test_nothing_is_loaded_from_elsewhere(kind):
    text = page(kind)
    assert "default-src 'none'" in text
    assert len(text.encode()) < MAX_BYTES
    elements = Elements(text)
    assert not {"img", "iframe", "object", "embed", "base", "form"} & set(elements.names)
    assert "src" not in elements.values and "onerror" not in elements.values


def test_foreign_names_are_text_only_in_charts_too():
    elements = Elements(page("hostile"))
    assert elements.names.count("script") == 1 and "img" not in elements.names
    assert any("</script><img src=x onerror=document.title='owned'>" in text for text in elements.texts)
    drawn = page("hostile")[page("hostile").index('id="chart-phases"') :]
    drawn = drawn[: drawn.index("</svg>")]
    assert "&lt;/script&gt;&lt;img" in drawn and "<img" not in drawn


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("gpu", {"step", "phases", "roofline", "memory"}), ("cpu", {"step", "phases", "memory"}), ("run", set())],
)
def test_only_charts_that_say_something_are_made(kind, keys):
    assert set(build_charts(REPORTS[kind]())) == keys


def test_step_bars_hold_every_rank_and_sum_to_its_step():
    figure = build_charts(cases.report())["step"]
    sums = [sum(values) for values in zip(*(one.values for one in figure.series))]
    assert figure.rows == ["rank 0", "rank 1"] and sums == pytest.approx([100.0, 100.0])


def test_the_roofline_s_lines_are_the_bounds_of_its_rows():
    limits = [one for one in build_charts(cases.report())["roofline"].curves if one.is_limit]
    assert [one.name for one in limits] == ["533 TFLOP/s in bf16", "memory, 3,000 GB/s"]
    kernels, change = cases.rank_kernels(0), dataclasses.replace
    unknown = tuple(change(row, bound_ms=None, bound_by="", efficiency=None) for row in kernels.roofline)
    seen = tuple(change(rank, kernels=change(kernels, roofline=unknown)) for rank in cases.report().facts.ranks_seen)
    assert "roofline" not in build_charts(cases.report(ranks_seen=seen)), "points without limits say nothing"


def test_tiles_say_what_holds_for_all_ranks():
    """The rank that waits least is the run's, but not the one whose waiting a reader looks for."""
    first, second = cases.report().facts.ranks_seen
    rows = second.time.rows | {"compute": 41.0, "exposed_communication": 39.0}
    waits = dataclasses.replace(second.time, rows=rows, busy_ms=82.2)
    seen = (first, dataclasses.replace(second, time=waits))
    shown = {name: value for value, name in build_tiles(cases.report(ranks_seen=seen))}
    assert shown["communication not overlapped, by rank"] == "20% to 39%"
    assert shown["device busy"] == "82%"


def test_a_chart_without_its_section_is_left_out():
    alone = dataclasses.replace(cases.report().facts.ranks_seen[0].time, phases=())
    seen = (dataclasses.replace(cases.report().facts.ranks_seen[0], time=alone),)
    report = cases.report(ranks_seen=seen, ranks=None)
    drawn = set(re.findall(r'id="chart-(\w+)"', html_page(report)))
    assert "phases" in build_charts(report) and drawn == {"roofline", "memory"}


@pytest.mark.parametrize(
    ("lowest", "highest", "within"), [(60.0, 90.0, 2), (1.0, 900.0, 8), (1e-6, 1e6, 6), (5.0, 5.0, 0)]
)
def test_a_logarithmic_axis_has_ticks_in_its_range(lowest, highest, within):
    ticks = svg.Scale(lowest, highest, is_log=True).list_ticks()
    assert within <= len(ticks) < 20


def test_a_thinned_curve_keeps_its_peak():
    curve = tuple(CurvePoint(at, 99 if at == 12_345 else at % 7, 100, ()) for at in range(50_000))
    few = thin_moments(curve, 500)
    assert len(few) == 500 and max(moment.allocated for moment in few) == 99
    assert [moment.time_us for moment in few] == sorted(moment.time_us for moment in few)


def test_long_runs_are_thinned_but_keep_their_slowest_step():
    many = 100_000
    slow = dataclasses.replace(cases.run_of(many), step_ms=np.where(np.arange(many) == 77_777, 900.0, 100.0))
    curves = build_charts(cases.report(run=slow))["run"].curves
    assert sum(len(one.x) for one in curves) <= 2100 and max(max(one.y) for one in curves) == 900.0


def test_the_largest_charts_keep_a_page_small():
    """As many ranks, spans, shapes, moments and steps as charts show at most."""
    ranks = tuple(dataclasses.replace(cases.report().facts.ranks_seen[0], time=many_spans(at)) for at in range(64))
    steps = 100_000
    noise = np.random.default_rng(0).uniform(50, 150, steps)
    run = dataclasses.replace(cases.run_of(steps), step_ms=noise, losses=noise)
    snapshot = cases.report().facts.highest_snapshot
    held = tuple(range(1, 2 + len(snapshot.curve[0].by_category)))[1:]
    curve = tuple(
        CurvePoint(at, at % 977 * 2**20, 2**32, tuple(at % (31 + part) * 2**20 for part in held))
        for at in range(50_000)
    )
    snapshots = (dataclasses.replace(snapshot, curve=curve),)
    charts = build_charts(cases.report(run=run, ranks_seen=ranks, snapshots=snapshots))
    assert set(charts) == {"step", "phases", "roofline", "memory", "run", "losses"}
    assert sum(len(svg.draw(chart)) for chart in charts.values()) < MAX_BYTES - 150_000


def many_spans(rank: int):
    time = cases.rank_time(rank)
    spans = [Span(f"phase {at % 20}", at * 1000, at * 1000 + 900) for at in range(2000)]
    return dataclasses.replace(time, timeline=tuple(spans), timeline_step=None)


def test_long_tables_are_cut_and_say_so():
    run = dataclasses.replace(cases.rank_time().phases[0], name="x" * 2000)
    seen = cases.report().facts.ranks_seen[0]
    many = dataclasses.replace(seen, time=dataclasses.replace(seen.time, phases=(run,) * 300))
    text = html_page(cases.report(ranks_seen=(many,), ranks=None))
    phases = text[text.index('<section id="phases"') : text.index('<section id="kernels"')]
    rows = phases[phases.rindex("<table") :]
    assert rows.count("<tr>") == 201 and wording("report/and-more-in-report", 100) in rows and "x" * 401 not in phases
    assert wording("report/p-class-quiet-paper", 176) in rows


@pytest.mark.parametrize("one", RULES.values(), ids=lambda one: one.code)
def test_every_rule_names_sections_of_the_report_with_its_evidence(one):
    keys = {section.__name__.removesuffix("_section") for section in SECTIONS} - {"findings"} | {"losses"}
    assert {section.key for section in build_sections(cases.report(), True)} <= keys | {"findings"}
    assert one.subjects and set(one.subjects) <= keys and len(set(one.subjects)) == len(one.subjects)


def test_a_finding_is_explained_in_its_card_as_explain_does_it(capsys):
    found = (dataclasses.replace(cases.findings()[0], code="starved-loader"),)
    text = html_page(dataclasses.replace(cases.report(), findings=found))
    card = text[text.index('id="finding-starved-loader"') : text.index("</article>")]
    said = re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", "", card)))
    assert main(["explain", "starved-loader"]) == 0
    paragraphs = re.sub(r"\n +", " ", capsys.readouterr().out).split("\n")[2:]
    assert len(paragraphs) > 5 and all(one in said for one in paragraphs) and "<details><summary>" in card


def test_the_page_ends_with_the_checks_and_leads_to_their_findings():
    page = html_page(cases.report())
    section = page[page.index('<section id="checked"') :]
    said = html.unescape(section)
    places = [said.index(question.text) for question in QUESTIONS]
    assert places == sorted(places) and section.count('<article class="answer">') == len(QUESTIONS)
    assert '<a href="#finding-sync-in-step">' in section and 'id="finding-sync-in-step"' in page
    assert '<section id="' not in section[1:].partition('<section id="gaps"')[0]


def test_the_numbers_of_a_chart_are_its_points():
    """Series with the same places stand beside each other; a curve keeps its highest point."""
    numbers = {key: figure.numbers for key, figure in build_charts(cases.report()).items()}
    step, memory, roofline = numbers["step"], numbers["memory"], numbers["roofline"]
    assert step.head[:2] == ["", "compute"] and [row[:2] for row in step.rows] == [
        ("rank 0", "60.00"),
        ("rank 1", "60.00"),
    ]
    assert memory.head[:2] == [
        wording("report/seconds-since-record-began"),
        "parameters",
    ] and memory.align == "r" * len(memory.head)
    assert len(memory.rows) <= 60 and memory.hidden + len(memory.rows) == 200
    assert max(float(row[memory.head.index("moments")]) for row in memory.rows) == 8.0
    assert roofline.head == ["series", "point", "FLOP per byte", "TFLOP/s"] and "aten::addmm" in roofline.rows[0][1]
    assert [len(row) for row in numbers["phases"].rows] == [3, 3, 3]
    curve = Curve("", [1.0, 2.0], [0.00012, 500.0], "", Look.POINTS)
    small = CurveChart("", [curve], Axis("x"), Axis("y", is_log=True), 100)
    assert [row[1] for row in small.numbers.rows] == ["0.00012", "500"]


def test_losses_of_a_run_and_of_two_are_curves():
    run = dataclasses.replace(cases.run_of(30), losses=np.linspace(3.0, 2.0, 30))
    assert build_charts(cases.report(run=run))["losses"].curves[0].y[-1] == 2.0
    assert [line.name for line in draw.losses({"A": run, "B": run}).curves] == ["A", "B"]
    assert draw.losses({"A": None, "B": cases.run_of(30)}) is None
    assert 'id="chart-losses"' in html_page(cases.report(run=run)) and 'id="losses"' not in page("gpu")


# --- the template's compiled form is kept where Python keeps that of the folder's modules


def test_a_compiled_template_is_kept_and_not_needed(tmp_path, monkeypatch):
    folder = tmp_path / "report"
    kept = folder / "__pycache__"
    shutil.copytree(page_module.FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    monkeypatch.setattr(page_module, "FOLDER", folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    page = html_page(cases.report())
    assert not kept.exists()  # as where the folder cannot be written
    kept.mkdir()
    with monkeypatch.context() as full:
        full.setattr(tempfile, "NamedTemporaryFile", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        assert html_page(cases.report()) == page and not any(kept.iterdir())
    assert html_page(cases.report()) == page
    [compiled] = kept.iterdir()
    compiled.write_bytes(compiled.read_bytes()[:100])
    assert html_page(cases.report()) == page
    template = folder / "page.html.jinja"
    template.write_text(template.read_text().replace("Skip to contents", "Another text"))
    assert "Another text" in html_page(cases.report())
