"""The page: one file that loads nothing, draws its charts, and shows foreign names as nothing but text."""

import dataclasses
import functools
import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import report_cases as cases
from waiting import LIMIT_S

from megatron_lite.analysis.memory.figures import Moment
from megatron_lite.report import html as page_module
from megatron_lite.report.charts.all import charts_of
from megatron_lite.report.charts.figure import log_axis
from megatron_lite.report.charts.memory_curve import thinned
from megatron_lite.report.html import html_page
from megatron_lite.report.page_text import table_html
from megatron_lite.report.section import Table

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium")
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
    elements = Elements(text.replace(page_module._plotly(), ""))
    assert not {"img", "iframe", "object", "embed", "base", "form"} & set(elements.names)
    assert "src" not in elements.values and "onerror" not in elements.values


def test_foreign_names_are_text_only():
    elements = Elements(page("hostile").replace(page_module._plotly(), ""))
    assert elements.names.count("script") == 3 and "img" not in elements.names
    assert any("</script><img src=x onerror=document.title='owned'>" in text for text in elements.texts)


def test_chart_data_cannot_end_its_script_and_shows_names_as_text():
    data = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page("hostile"), re.DOTALL)[1]
    assert "<" not in data
    rows = json.loads(data)["phases"]["data"][0]["y"]
    assert any(row.startswith("&lt;/script&gt;&lt;img") for row in rows), "Plotly reads <b> in any text"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("gpu", {"step", "phases", "roofline", "memory"}),
        ("cpu", {"step", "phases", "memory"}),
        ("run", set()),
    ],
)
def test_only_charts_that_say_something_are_made(kind, keys):
    assert set(charts_of(REPORTS[kind]())) == keys


def test_step_bars_hold_every_rank_and_sum_to_its_step():
    figure = charts_of(cases.report())["step"]
    sums = [sum(values) for values in zip(*(trace["x"] for trace in figure.data))]
    assert figure.data[0]["y"] == ["rank 0", "rank 1"] and sums == pytest.approx([100.0, 100.0])


def test_the_roofline_s_lines_are_the_bounds_of_its_rows():
    lines = [trace for trace in charts_of(cases.report())["roofline"].data if trace.get("mode", "").startswith("lines")]
    assert [line["name"] for line in lines] == ["533 TFLOP/s in bf16", "memory, 3,000 GB/s"]
    unknown = tuple(
        dataclasses.replace(row, bound_ms=None, bound_by="", efficiency=None) for row in cases.rank_kernels(0).roofline
    )
    seen = tuple(
        dataclasses.replace(rank, kernels=dataclasses.replace(rank.kernels, roofline=unknown))
        for rank in cases.report().facts.ranks_seen
    )
    assert "roofline" not in charts_of(cases.report(ranks_seen=seen)), "points without limits say nothing"


def test_a_chart_without_its_section_is_left_out():
    alone = dataclasses.replace(cases.report().facts.ranks_seen[0].time, phases=())
    seen = (dataclasses.replace(cases.report().facts.ranks_seen[0], time=alone),)
    report = cases.report(ranks_seen=seen, ranks=None)
    data = re.search(r'id="charts">(.*?)</script>', html_page(report), re.DOTALL)[1]
    assert "phases" in charts_of(report) and set(json.loads(data)) == {"roofline", "memory"}


@pytest.mark.parametrize(
    ("lowest", "highest", "within"), [(60.0, 90.0, 2), (1.0, 900.0, 8), (1e-6, 1e6, 12), (5.0, 5.0, 0)]
)
def test_a_logarithmic_axis_has_ticks_in_its_range(lowest, highest, within):
    axis = log_axis("x", lowest, highest)
    assert sum(lowest <= tick <= highest for tick in axis["tickvals"]) >= within and len(axis["tickvals"]) < 40


def test_a_thinned_curve_keeps_its_peak():
    curve = tuple(Moment(at, 99 if at == 12_345 else at % 7, 100, ()) for at in range(50_000))
    few = thinned(curve, 500)
    assert len(few) == 500 and max(moment.allocated for moment in few) == 99
    assert [moment.time_us for moment in few] == sorted(moment.time_us for moment in few)


def test_long_runs_are_thinned_but_keep_their_slowest_step():
    run = cases.run_of()
    many = 100_000
    slow = dataclasses.replace(
        run,
        steps=many,
        iterations=tuple(range(1, many + 1)),
        ordinary=(True,) * many,
        profiled=(False,) * many,
        step_ms=(*(100.0,) * 77_777, 900.0, *(100.0,) * (many - 77_778)),
    )
    data = charts_of(cases.report(run=slow))["run"].data
    assert sum(len(trace["x"]) for trace in data) <= 2100 and max(max(trace["y"]) for trace in data) == 900.0


def test_without_the_plotting_library_the_page_says_so(monkeypatch):
    monkeypatch.setattr(page_module.importlib.util, "find_spec", lambda name: None)
    text = html_page(cases.report())
    assert "the package plotly is not installed" in text and 'class="chart"' not in text and "Where a step goes" in text


def test_the_library_is_found_without_importing_its_package():
    code = (
        "import sys; from megatron_lite.report.html import _plotly; assert 'Plotly' in _plotly()[-10**7:]; "
        "assert 'plotly' not in sys.modules"
    )
    subprocess.run([cases.PYTHON, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_long_tables_are_cut_and_say_so():
    text = table_html(Table([["x" * 2000, "1"]] * 300, "lr", ["name", "ms"], hidden=5))
    assert text.count("<tr>") == 201 and "and 105 more in report.json" in text and "x" * 401 not in text


def opened(text: str, folder: Path) -> tuple[str, str, set[str]]:
    """In a real browser: (elements after the scripts ran, console, origins of pages that asked the network)."""
    (folder / "report.html").write_text(text, encoding="utf-8")
    log = folder / "net.json"
    shown = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--window-size=1280,3000",
            "--virtual-time-budget=5000",
            "--no-first-run",
            "--enable-logging=stderr",
            f"--log-net-log={log}",
            f"--user-data-dir={folder / 'browser'}",
            "--dump-dom",
            (folder / "report.html").as_uri(),
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    console = "\n".join(line for line in shown.stderr.splitlines() if "CONSOLE" in line)
    asked = set(re.findall(r'"initiator":"([^"]*)"', log.read_text(errors="replace")))
    return shown.stdout, console, asked - {"not an origin"}  # what the browser asks for itself


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("kind", ["gpu", "hostile"])
def test_a_browser_draws_it_without_complaint_or_request(kind, tmp_path):
    shown, console, asked = opened(page(kind), tmp_path)
    assert (console, asked) == ("", set())
    assert re.search(r"<title>(.*?)</title>", shown, re.DOTALL)[1] != "owned"
    for key in charts_of(REPORTS[kind]()):
        assert re.search(rf'<div class="chart[^"]*" id="chart-{key}".*?<svg class="main-svg"', shown, re.DOTALL), key


@pytest.mark.slow
@needs_browser
def test_a_page_that_did_ask_would_be_seen(tmp_path):
    _, console, asked = opened("<script>oh no</script><img src='http://127.0.0.1:9/x.png'>", tmp_path)
    assert "CONSOLE" in console and asked
