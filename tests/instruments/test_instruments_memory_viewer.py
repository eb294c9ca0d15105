"""The viewer of pytorch.org/memory_viz draws what CPU runs write, in a real browser.

MEMORY_VIZ names a folder with torch/utils/viz/MemoryViz.js of PyTorch's sources and d3.min.js of npm's d3@5.
MEMORY_PICTURES names a folder for pictures of what was drawn.
"""

import base64
import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from support.launch import DROPOUT, alone, flags, plan_of, quietly
from support.snapshots import live_blocks, read_snapshot, trace
from support.waiting import LIMIT_S

VIZ = Path(os.environ.get("MEMORY_VIZ", "nowhere"))
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (VIZ / "MemoryViz.js").exists(), reason="needs MEMORY_VIZ, a folder with MemoryViz.js and d3.min.js"
    ),
    pytest.mark.skipif(BROWSER is None, reason="needs chromium"),
]
MODEL = (
    "--train-iters 4 --num-layers 8 --hidden-size 128 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 4 "
    "--vocab-size 5000 --record-memory-history --profile-step-start 3 --profile-step-end 5"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
D3 = ["select", "format", "axisLeft", "scaleLinear", "zoom", "zoomIdentity", "brushX"]
PAGE = """<!DOCTYPE html><html><head><title>nothing yet</title><script src="/d3.min.js"></script>
<script type="importmap">{imports}</script></head><body style="height:100vh;margin:0"><script type="module">
import {{add_local_files}} from "/MemoryViz.js";
try {{ add_local_files([{{name: "snapshot", base64: "{data}"}}], "{view}"); document.title = "drawn"; }}
catch (error) {{ document.title = "failed: " + error; }}
</script></body></html>"""


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *words):
        """In silence."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """(a folder, its address in the browser)."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("MemoryViz.js", "d3.min.js"):
        shutil.copy(VIZ / name, folder)
    names = "".join(f"export const {name} = globalThis.d3.{name};" for name in D3)
    (folder / "d3.js").write_text(f"{names}export const event = null;")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}/page.html"
    server.shutdown()


@pytest.fixture(scope="module", params=["plain", "recompute"])
def written(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    words = RECOMPUTE if request.param == "recompute" else ""
    with alone():
        quietly(flags(MODEL, *DROPOUT, words, "--memory-snapshot-path", folder / "s.pickle"), folder / "run")
    return request.param, folder / "s.pickle"


def drawn(site, snapshot: Path, view: str, name: str) -> str:
    """The page's elements after the viewer has drawn."""
    folder, address = site
    urls = re.findall(r'^import .* from "(https:[^"]+)"', (folder / "MemoryViz.js").read_text(), re.MULTILINE)
    imports = json.dumps({"imports": dict.fromkeys(urls, "/d3.js")})
    data = base64.b64encode(snapshot.read_bytes()).decode()
    (folder / "page.html").write_text(PAGE.format(imports=imports, data=data, view=view))
    options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1100,500"
    options += " --virtual-time-budget=30000"
    browser, limits = [BROWSER, *options.split(), f"--user-data-dir={folder / 'browser'}"], {"timeout": LIMIT_S}
    if pictures := os.environ.get("MEMORY_PICTURES"):
        picture = f"--screenshot={Path(pictures) / f'memory_{name}.png'}"
        subprocess.run([*browser, picture, address], check=True, capture_output=True, **limits)
    dump = [*browser, "--dump-dom", address]
    page = subprocess.run(dump, check=True, capture_output=True, text=True, **limits).stdout
    assert re.search("<title>(.*?)</title>", page)[1] == "drawn"
    return page


def heights(page: str) -> list[float]:
    """The curve of the small map below the timeline, from its start to its end."""
    [polygon] = re.findall(r'<polygon points="([\d.]+, [^"]+)"', page)  # those of the timeline have no spaces
    points = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+), ([\d.]+)", polygon)]
    return [70 - y for _, y in points[2:]]


def summits(curve: list[float], by: float) -> int:
    """Local maxima that stand out by `by` on both sides."""
    number, low, high, rising = 0, curve[0], curve[0], True
    for height in curve:
        if rising:
            high = max(high, height)
            if height < high - by:
                number, low, rising = number + 1, height, False
        else:
            low = min(low, height)
            if height > low + by:
                high, rising = height, True
    return number


def test_the_timeline_shows_every_allocation_and_the_story(site, written):
    name, path = written
    page = drawn(site, path, "Active Memory Timeline", name)
    snapshot = read_snapshot(path)
    allocated = [event for event in trace(snapshot) if event["action"] == "alloc"]
    before = len(live_blocks(snapshot).keys() - {event["addr"] for event in allocated})
    assert len(allocated) + before <= page.count("<polygon") <= len(allocated) + before + 30
    curve = heights(page)
    if name == "plain":  # one mountain per step, its summit at the loss
        assert summits(curve, 0.35 * max(curve)) == 2
    else:  # and teeth of each layer
        assert summits(curve, 0.03 * max(curve)) >= 2 * 8


@pytest.mark.parametrize("view", ["Allocator State History", "Active Cached Segment Timeline", "Allocator Settings"])
def test_the_other_views_draw_too(site, written, view):
    page = drawn(site, written[1], view, f"{written[0]} {view}")
    assert ("simulated" in page) if view == "Allocator Settings" else page.count("<rect") + page.count("<polygon") > 5


def test_a_run_that_never_ran_is_drawn_too(site, tmp_path):
    """The 857m example on one GPU, two steps of it, two of the four micro-batches each."""
    from support.rehearsal_cases import EXAMPLE, GPU

    from megatron_lite.instruments.snapshot_format import write_snapshot
    from megatron_lite.rehearsal import rehearse

    path = tmp_path / "predicted.pickle"
    write_snapshot(path, rehearse(plan_of(flags(EXAMPLE), GPU)).snapshot)
    curve = heights(drawn(site, path, "Active Memory Timeline", "predicted"))
    assert summits(curve, by=0.4 * max(curve)) == 4
