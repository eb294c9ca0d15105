"""Makes the pictures of pages that the documentation shows, with Chromium: python docs/pictures/make.py TRACES

TRACES: a folder with the public traces of HolisticTraceAnalysis' ResNet, one folder each: v100_resnet50_loader_workers0
and v100_resnet50_loader_workers4. The other pictures are of memory_viz, Perfetto, and drawn by hand.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from megatron_lite.cli.main import main

HERE = Path(__file__).parent
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# Llama 3 70B on eight nodes, as docs/planning.md plans it
LAYOUT = (
    "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --bf16 --tokenizer-type NullTokenizer "
    "--vocab-size 128256 --mock-data --train-iters 10 --lr 1e-4 --micro-batch-size 1 --seq-length 4096 "
    "--max-position-embeddings 4096 --global-batch-size 512 --tensor-model-parallel-size 8 --sequence-parallel "
    "--pipeline-model-parallel-size 4 --use-distributed-optimizer"
)

SCROLL = """<script>for (const frame of document.querySelectorAll("iframe"))
  frame.onload = () => frame.contentDocument.getElementById("ID").scrollIntoView()</script>"""


def photograph(pages: list[tuple[Path, int, str]], height: int, picture: Path, scroll_to: str = ""):
    """Put pages side by side into one picture of `height` pixels.

    Args:
        pages: of each page its file, width in pixels, and color scheme.
        scroll_to: the id of the element that a page begins with; '' for its head.
    """
    frames = "".join(
        f'<iframe src="{page.as_uri()}" '
        f'style="width:{width}px;height:{height}px;border:0;color-scheme:{scheme}"></iframe>'
        for page, width, scheme in pages
    )
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder, "frames.html")
        body = f'<meta charset="utf-8"><body style="margin:0;display:flex">{frames}'
        if scroll_to:
            body += SCROLL.replace("ID", scroll_to)
        frame.write_text(body, encoding="utf-8")
        size = f"--window-size={sum(width for _, width, _ in pages)},{height}"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"]
        options += ["--allow-file-access-from-files", size, f"--screenshot={folder}/seen.png", frame.as_uri()]
        subprocess.run([BROWSER, *options], check=True, capture_output=True)
        # few colors, so that pictures stay small in the repository; those of bars must not be mixed
        seen = Image.open(f"{folder}/seen.png").convert("RGB")
        seen.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(picture, optimize=True)


def make_pictures(traces: Path):
    """Write report.png, comparison.png and plan_stages.png beside this file."""
    before, after = (traces / f"v100_resnet50_loader_workers{number}" for number in (0, 4))
    with tempfile.TemporaryDirectory() as folder:
        report, comparison, plan = (Path(folder, f"{name}.html") for name in ("report", "comparison", "plan"))
        main(["report", str(before), "--html", str(report), "--json", f"{folder}/report.json"])
        main(["compare", str(before), str(after), "--html", str(comparison)])
        main(["plan", "--gpu", "H100", "--gpus", "64", "--page", str(plan), "--", *LAYOUT.split()])
        photograph([(report, 1280, "light"), (report, 390, "dark")], 980, HERE / "report.png")
        photograph([(comparison, 1280, "light")], 1180, HERE / "comparison.png")
        photograph([(plan, 1280, "light")], 770, HERE / "plan_stages.png", scroll_to="stages")


if __name__ == "__main__":
    make_pictures(Path(sys.argv[1]))
