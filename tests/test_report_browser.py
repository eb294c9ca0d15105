"""The page in Chromium: laid out for a phone, a tablet and a screen, light and dark; it asks for nothing."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import report_cases as cases
from prediction_cases import facts, measured, memory, record, time
from waiting import LIMIT_S

from megatron_lite.analysis.predicted import compare_prediction
from megatron_lite.report.charts import build_charts
from megatron_lite.report.html import html_page

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs chromium")]
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
for (const width of WIDTHS) for (const scheme of SCHEMES) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 900px; border: 0; color-scheme: ${scheme}`;
  frame.src = "page.html#" + (frames.push(width + " " + scheme) - 1);
  document.body.append(frame);
}
</script>"""

PROBE = """<script>
function look() {
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
  const drawn = key => [...new Set(all(`#chart-${key} .bars .point path`).map(path => style(path, "fill")))];
  const swatches = key => bars(`#${key} .legend li`, row => row);
  const rows = key => bars(`#${key} tbody tr`, row => row.cells[0]);
  parent.postMessage({
    frame: Number(location.hash.slice(1)),
    width: innerWidth,
    wide: all("body *").filter(one => shown(one) && !one.closest("svg, script, style")
      && one.getBoundingClientRect().right > innerWidth + 1).map(called),
    narrow: all("td.l, h2").filter(one => shown(one) && room(one) < 0.6 * em
      * Math.min(Math.max(...one.textContent.split(/[^\\w]/).map(word => word.length)), MIN_LETTERS)).map(called),
    clipped: all(".rows").filter(one => shown(one) && (one.scrollHeight > one.clientHeight + 1 || one.scrollWidth > one.clientWidth + 1)).map(called),
    charts: all(".chart .main-svg").length > 0,
    inks: [style(document.body, "color"), style(document.documentElement, "backgroundColor")],
    axis: all(".chart .xtick text").map(one => style(one, "fill"))[0],
    step: { drawn: drawn("step"), swatches: swatches("step"), rows: rows("step") },
    memory: { swatches: swatches("memory"), rows: rows("memory") },
    kernels: { swatches: swatches("roofline"), rows: rows("kernels") },
    codes: all("article h3 code").map(code => code.closest("a")?.getAttribute("href")),
    dangling: all("a").map(link => link.getAttribute("href"))
      .filter(to => !to.startsWith("#") || !document.getElementById(to.slice(1))),
    lost: window.complaints,
  }, "*");
}
setTimeout(look, 3000);
</script>"""
COMPLAIN = "addEventListener('error', event => complaints.push(event.message))"
COMPLAINTS = f"<script>window.complaints = []; {COMPLAIN}</script>"


def browsed(page: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A start of the browser, which prints the page's elements after its scripts ran."""
    command = [BROWSER, *FLAGS, *flags, f"--user-data-dir={folder / 'browser'}", page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, dict]:
    """What a report of two ranks looks like in each width and color scheme: one start of the browser for all."""
    folder = tmp_path_factory.mktemp("page")
    ranks = REPORTS["gpu"].facts.ranks_seen
    predicted = compare_prediction(facts(record(memory(), time()), snapshots=(measured(),), ranks_seen=ranks[:1]))
    page = html_page(cases.report(name=LONG_NAME, predicted=predicted)).replace("<body>", f"<body>{COMPLAINTS}")
    probe = PROBE.replace("MIN_LETTERS", str(MIN_LABEL_LETTERS))
    (folder / "page.html").write_text(page.replace("</body>", f"{probe}</body>"), encoding="utf-8")
    frames = FRAMES.replace("WIDTHS", json.dumps(WIDTHS)).replace("SCHEMES", json.dumps(SCHEMES))
    (folder / "frames.html").write_text(frames, encoding="utf-8")
    shown = browsed(folder / "frames.html", folder).stdout
    found = json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', shown, re.DOTALL)[1]))
    assert len(found) == len(WIDTHS) * len(SCHEMES)
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(seen, width):
    assert [seen[f"{width} {scheme}"]["wide"] for scheme in SCHEMES] == [[], []]


@pytest.mark.parametrize("width", WIDTHS)
def test_no_label_is_broken_into_letters_and_no_row_is_out_of_view(seen, width):
    one = seen[f"{width} light"]
    assert (one["width"], one["narrow"], one["clipped"]) == (width, [], [])


def test_bars_have_the_colors_of_the_chart_above_them(seen):
    for one in seen.values():
        assert one["charts"] and one["lost"] == []
        step, memory, kernels = one["step"], one["memory"], one["kernels"]
        assert len(step["swatches"]) > 5 and set(step["swatches"].values()) == set(step["drawn"])
        assert {name: color for name, color in step["rows"].items() if name in step["swatches"]} == step["swatches"]
        for part in (memory, kernels):
            same = set(part["rows"]) & set(part["swatches"])
            assert same and all(part["rows"][name] == part["swatches"][name] for name in same)


def test_a_finding_s_code_leads_to_its_explanation(seen):
    one = seen["390 light"]
    assert "#about-logits-peak" in one["codes"] and one["dangling"] == []


def luminance(color: str) -> float:
    """Relative luminance of rgb(r, g, b) (WCAG 2.2)."""
    values = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("scheme", "lowest", "highest"), [("light", 0.8, 1.0), ("dark", 0.0, 0.05)])
def test_the_page_follows_the_readers_color_scheme(seen, scheme, lowest, highest):
    for width in WIDTHS:
        one = seen[f"{width} {scheme}"]
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


@pytest.mark.parametrize("kind", ["gpu", "hostile"])
def test_a_browser_draws_it_without_complaint_or_request(kind, tmp_path):
    shown, console, asked = opened(html_page(REPORTS[kind]), tmp_path)
    assert (console, asked) == ("", set())
    assert re.search(r"<title>(.*?)</title>", shown, re.DOTALL)[1] != "owned"
    for key in build_charts(REPORTS[kind]):
        assert re.search(rf'<div class="chart[^"]*" id="chart-{key}".*?<svg class="main-svg"', shown, re.DOTALL), key


def test_a_page_that_did_ask_would_be_seen(tmp_path):
    _, console, asked = opened("<script>oh no</script><img src='http://127.0.0.1:9/x.png'>", tmp_path)
    assert "CONSOLE" in console and asked
