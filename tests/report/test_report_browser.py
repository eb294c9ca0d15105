"""The page in Chromium: laid out for a phone, a tablet and a screen, light and dark; it asks for nothing."""

import dataclasses
import html
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import report_cases as cases
from support.prediction_cases import facts, measured, memory, record, time
from support.waiting import LIMIT_S

from megatron_lite.analysis.compare.compare import compare
from megatron_lite.analysis.compare.limits import judge, read_limit
from megatron_lite.analysis.predicted import compare_prediction
from megatron_lite.report.charts import build_charts
from megatron_lite.report.comparison import comparison_page
from megatron_lite.report.html import html_page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs chromium")]
PAGES = ("report", "comparison")
WIDTHS, SCHEMES = (390, 768, 1280), ("light", "dark")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--virtual-time-budget=20000", "--dump-dom",
)  # fmt: skip
REPORTS = {
    "gpu": cases.report(),
    "hostile": cases.report(name=cases.HOSTILE.replace("alert(1)", "document.title='owned'")),
}
LONG_NAME = "void at::native::" + "vectorized_elementwise_kernel" * 8  # no place to break it
MIN_LABEL_LETTERS = 10  # of a line of a label that is longer than that

# A window cannot be as narrow as a phone, a frame can; and a frame has the color scheme that its element names.
FRAMES = """<!DOCTYPE html><meta charset="utf-8"><pre id="seen"></pre><script>
const seen = {}, frames = [], texts = document.getElementById("seen");
addEventListener("message", event => {
  seen[frames[event.data.frame]] = event.data;
  texts.textContent = JSON.stringify(seen);
});
for (const page of PAGES) for (const width of WIDTHS) for (const scheme of SCHEMES) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 900px; border: 0; color-scheme: ${scheme}`;
  frame.src = page + ".html#" + (frames.push(page + " " + width + " " + scheme) - 1);
  document.body.append(frame);
}
</script>"""

PROBE = """<script>
function look() {
  const unprinted = document.querySelectorAll("details:not([open])").length;
  dispatchEvent(new Event("beforeprint"));
  const all = (selector, of = document) => [...of.querySelectorAll(selector)];
  const shown = element => element.getClientRects().length > 0;
  const called = element => `${element.tagName} ${element.textContent.trim().slice(0, 60)}`;
  const style = (element, name) => getComputedStyle(element)[name];
  const tall = element => element.getBoundingClientRect().height;
  const letter = document.createElement("span");
  letter.textContent = "n";
  document.body.append(letter);
  const em = letter.getBoundingClientRect().width;
  const room = element => {
    const { paddingLeft, paddingRight } = getComputedStyle(element);
    return element.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
  };
  const bars = (selector, label) => Object.fromEntries(all(selector).map(row =>
    [label(row).textContent.trim(), row.querySelector("[style*=background]")]).filter(([, bar]) => bar)
    .map(([name, bar]) => [name, style(bar, "backgroundColor")]));
  const drawn = key => [...new Set(all(`#chart-${key} rect`).map(bar => style(bar, "fill")))];
  const swatches = key => bars(`#${key} .legend li`, row => row);
  const rows = key => bars(`#${key} tbody tr`, row => row.cells[0]);
  const luminance = color => {
    const values = color.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255);
    const [red, green, blue] = values.map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = element => {
    while (element && /, 0\\)$|transparent/.test(style(element, "backgroundColor"))) element = element.parentElement;
    return luminance(style(element || document.documentElement, "backgroundColor"));
  };
  const faint = element => {
    const [ink, below] = [luminance(style(element, element.closest("svg") ? "fill" : "color")), ground(element)];
    return (Math.max(ink, below) + 0.05) / (Math.min(ink, below) + 0.05) < 4.5;
  };
  // the bars that a name of a row stands beside
  const middle_of_row = name => {
    const bars = all("rect", name.parentElement).filter(bar => bar.textContent.startsWith(name.textContent));
    const boxes = bars.map(bar => bar.getBoundingClientRect());
    return (Math.min(...boxes.map(box => box.top)) + Math.max(...boxes.map(box => box.bottom))) / 2;
  };
  const texts = all("body *").filter(one => shown(one) && !one.closest("script, style, .skip")
    && one.tagName !== "title" && [...one.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.textContent.trim()));
  const touched = document.querySelector(".chart rect");
  touched.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  const said = [touched.textContent, touched.closest("figure").querySelector(".said").textContent];
  const link = document.querySelector("nav a");
  link.focus();
  const nav = document.querySelector("nav");
  parent.postMessage({
    unfolded: [unprinted, all("details:not([open])").length],
    faint: texts.filter(faint).map(called),
    texts: texts.length,
    said,
    focus: style(link, "outlineStyle"),
    headings: all("h1, h2, h3").map(one => Number(one.tagName[1])),
    beside: nav.getBoundingClientRect().right <= document.querySelector(".sections").getBoundingClientRect().left,
    sticky: style(nav, "position"),
    contents: all("nav > ol > li > a").map(one => one.textContent),
    links: Object.fromEntries(all(".links a").map(one => [one.closest("article, section").id, one.getAttribute("href")])),
    unnamed: all("thead th, tbody th").filter(one => !one.scope || !one.textContent.trim()).map(called),
    numbers: all("figure details table").length,
    figures: all("figure").length,
    frame: Number(location.hash.slice(1)),
    width: innerWidth,
    wide: all("body *").filter(one => shown(one) && !one.closest("svg, script, style, .rows > table")
      && one.getBoundingClientRect().right > innerWidth + 1).map(called),
    narrow: all("td.l, h2").filter(one => shown(one) && room(one) < 0.6 * em
      * Math.min(Math.max(...one.textContent.split(/[^\\w]/).map(word => word.length)), MIN_LETTERS)).map(called),
    overflowing: all("th, td").filter(one => shown(one) && one.scrollWidth > one.clientWidth + 1).map(called),
    clipped: all(".rows").filter(one => shown(one) && (one.scrollHeight > one.clientHeight + 1
      || one.scrollWidth > one.clientWidth + 1 && style(one, "overflowX") !== "auto")).map(called),
    charts: all(".chart svg rect").length > 0,
    // of a table that is scrolled: its first column stays in view, and its numbers stand below each other
    scrolled: all(".rows").filter(one => shown(one) && one.scrollWidth > one.clientWidth + 1).map(one => {
      one.scrollLeft = one.scrollWidth;
      const [first, last] = [one.querySelector("tbody tr").cells[0], one.querySelector("tbody tr").lastElementChild];
      const seen = [first.getBoundingClientRect().left, last.getBoundingClientRect().right, first.getBoundingClientRect().right];
      const box = one.getBoundingClientRect();
      one.scrollLeft = 0;
      return [Math.abs(seen[0] - box.left) < 2, Math.abs(seen[1] - box.right) < 2, seen[2] - box.left < 0.62 * box.width];
    }),
    rightward: all("tbody .r").filter(shown).map(one => style(one, "textAlign") + style(one, "display")),
    above: all(".chart > span").filter(shown).filter(one => Math.abs(one.getBoundingClientRect().top
      + one.getBoundingClientRect().height / 2 - middle_of_row(one)) > 4).map(called),
    labels: all(".chart > span").length,
    inks: [style(document.body, "color"), style(document.documentElement, "backgroundColor")],
    axis: all(".chart .axis text").map(one => style(one, "fill"))[0],
    step: { drawn: drawn("step"), swatches: swatches("step"), rows: rows("step") },
    memory: { swatches: swatches("memory"), rows: rows("memory") },
    kernels: { swatches: swatches("roofline"), rows: rows("kernels") },
    dangling: all("a").map(link => link.getAttribute("href"))
      .filter(to => !to.startsWith("#") || !document.getElementById(to.slice(1))),
    lost: window.complaints,
  }, "*");
  dispatchEvent(new Event("afterprint"));
}
setTimeout(look, 3000);
</script>"""
COMPLAIN = "addEventListener('error', event => complaints.push(event.message))"
COMPLAINTS = f"<script>window.complaints = []; {COMPLAIN}</script>"


def compared_page(name: str) -> str:
    """B is quicker, holds less, and computes the same."""
    a, b = cases.report(name=name, run=trained(1.0)), cases.report(name=name, run=trained(0.9))
    judged = judge(found := compare(a.facts, b.facts, titles=(name, "B")), [read_limit("step_ms > +5%")])
    return comparison_page(found, judged, a.facts, b.facts)


def trained(times: float):
    run = cases.run_of(60)
    ms, losses = run.step_ms * times, np.linspace(5.0, 4.0, 60)
    return dataclasses.replace(run, step_ms=ms, training_ms=ms, losses=losses, grad_norms=np.ones(60))


def browsed(page: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A start of the browser, which prints the page's elements after its scripts ran."""
    command = [BROWSER, *FLAGS, *flags, f"--user-data-dir={folder / 'browser'}", page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, dict]:
    """What the report of two ranks, and a comparison of two such, look like in each width and color scheme, unfolded as for
    paper: one start of the browser for all."""
    folder = tmp_path_factory.mktemp("page")
    ranks = REPORTS["gpu"].facts.ranks_seen
    predicted = compare_prediction(facts(record(memory(), time()), snapshots=(measured(),), ranks_seen=ranks[:1]))
    found = cases.findings(LONG_NAME) + cases.findings("logits-peak")
    report = dataclasses.replace(cases.report(name=LONG_NAME, predicted=predicted), findings=found)
    probe = PROBE.replace("MIN_LETTERS", str(MIN_LABEL_LETTERS))
    for name, page in (("report", html_page(report)), ("comparison", compared_page(LONG_NAME))):
        text = page.replace("<body>", f"<body>{COMPLAINTS}").replace("</body>", f"{probe}</body>")
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    frames = FRAMES.replace("WIDTHS", json.dumps(WIDTHS)).replace("SCHEMES", json.dumps(SCHEMES))
    (folder / "frames.html").write_text(frames.replace("PAGES", json.dumps(PAGES)), encoding="utf-8")
    shown = browsed(folder / "frames.html", folder).stdout
    found = json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', shown, re.DOTALL)[1]))
    assert len(found) == len(PAGES) * len(WIDTHS) * len(SCHEMES)
    return found


def of(seen, page: str) -> list[dict]:
    return [seen[f"{page} {width} {scheme}"] for width in WIDTHS for scheme in SCHEMES]


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_wider_than_the_window_broken_into_letters_or_out_of_view(seen, page):
    for one in of(seen, page):
        found = [one[name] for name in ("wide", "narrow", "clipped", "overflowing")]
        assert found == [[], [], [], []], one["width"]
    assert [one["width"] for one in of(seen, page)[::2]] == list(WIDTHS)


@pytest.mark.parametrize("page", PAGES)
def test_every_text_has_contrast_every_header_a_scope_and_headings_are_in_order(seen, page):
    for one in of(seen, page):
        assert one["texts"] > 100 and (one["faint"], one["unnamed"]) == ([], [])
        assert one["headings"][0] == 1 and one["focus"] == "solid"
        assert all(below <= above + 1 for above, below in itertools.pairwise(one["headings"]))


@pytest.mark.parametrize("page", PAGES)
def test_the_contents_stand_beside_the_text_where_there_is_room(seen, page):
    for one in of(seen, page):
        assert one["beside"] == (one["width"] == 1280) and (one["sticky"] == "sticky") == one["beside"]
        assert len(one["contents"]) > 5 and one["dangling"] == []


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_folded_on_paper_and_every_chart_has_its_numbers(seen, page):
    for one in of(seen, page):
        before, after = one["unfolded"]
        assert before > 3 and after == 0 and one["numbers"] == one["figures"] > 2


@pytest.mark.parametrize("page", PAGES)
def test_only_a_phone_scrolls_tables_and_numbers_can_be_compared_there_too(seen, page):
    for one in of(seen, page):
        assert (one["scrolled"] == []) == (one["width"] > 390)
        assert all(map(all, one["scrolled"])), one["scrolled"]
        assert set(one["rightward"]) <= {"righttable-cell", "rightblock"} and one["rightward"]


@pytest.mark.parametrize("page", PAGES)
def test_the_names_of_rows_stand_beside_their_bars(seen, page):
    for one in of(seen, page):
        assert one["labels"] > 3 and one["above"] == []


@pytest.mark.parametrize("page", PAGES)
def test_what_is_touched_is_written_below_its_chart(seen, page):
    for one in of(seen, page):
        asked, answered = one["said"]
        assert asked == answered and re.search(r": [\d.]+ ms per step$", asked)


def test_bars_have_the_colors_of_the_chart_above_them(seen):
    for one in of(seen, "report"):
        assert one["charts"] and one["lost"] == []
        step, memory, kernels = one["step"], one["memory"], one["kernels"]
        assert len(step["swatches"]) > 5 and set(step["swatches"].values()) == set(step["drawn"])
        assert {name: color for name, color in step["rows"].items() if name in step["swatches"]} == step["swatches"]
        for part in (memory, kernels):
            same = set(part["rows"]) & set(part["swatches"])
            assert same and all(part["rows"][name] == part["swatches"][name] for name in same)


def test_a_finding_and_what_shows_it_lead_to_each_other(seen):
    links = seen["report 390 light"]["links"]
    assert links["finding-logits-peak"] == "#memory" and links["memory"] == "#finding-logits-peak"


def luminance(color: str) -> float:
    """Relative luminance of rgb(r, g, b) (WCAG 2.2)."""
    values = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("scheme", "lowest", "highest"), [("light", 0.8, 1.0), ("dark", 0.0, 0.05)])
def test_the_page_follows_the_readers_color_scheme(seen, scheme, lowest, highest):
    for width in WIDTHS:
        one = seen[f"report {width} {scheme}"]
        ink, ground = map(luminance, one["inks"])
        assert lowest <= ground <= highest
        for color in (ink, luminance(one["axis"])):
            assert (max(color, ground) + 0.05) / (min(color, ground) + 0.05) > 7


def opened(text: str, folder: Path) -> tuple[str, str, set[str]]:
    """In a real browser: (elements after the scripts ran, console, origins of pages that asked the network)."""
    (folder / "report.html").write_text(text, encoding="utf-8")
    log = folder / "net.json"
    wanted = ["--window-size=1280,3000", "--enable-logging=stderr", f"--log-net-log={log}"]
    shown = browsed(folder / "report.html", folder, *wanted)
    console = "\n".join(line for line in shown.stderr.splitlines() if "CONSOLE" in line)
    asked = set(re.findall(r'"initiator":"([^"]*)"', log.read_text(errors="replace")))
    return shown.stdout, console, asked - {"not an origin"}  # what the browser asks for itself


@pytest.mark.parametrize("kind", ["gpu", "hostile", "comparison"])
def test_a_browser_draws_it_without_complaint_or_request(kind, tmp_path):
    page = html_page(REPORTS[kind]) if kind in REPORTS else compared_page(REPORTS["hostile"].title)
    shown, console, asked = opened(page, tmp_path)
    assert (console, asked) == ("", set())
    assert re.search(r"<title>(.*?)</title>", shown, re.DOTALL)[1] != "owned"
    keys = build_charts(REPORTS[kind]) if kind in REPORTS else ("phases", "losses", "memory")
    for key in keys:
        assert re.search(rf'<div class="chart" id="chart-{key}".*?<svg', shown, re.DOTALL), key


def test_a_page_that_did_ask_would_be_seen(tmp_path):
    _, console, asked = opened("<script>oh no</script><img src='http://127.0.0.1:9/x.png'>", tmp_path)
    assert "CONSOLE" in console and asked
