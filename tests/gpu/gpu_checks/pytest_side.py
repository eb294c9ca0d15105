"""What a part's pytest process uses: the device of its tests, files worth keeping, a line per test for the command.

As `pytest -p gpu_checks.pytest_side` it writes a JSON line as soon as a test is over: a part that is ended keeps what it found.
"""

import gzip
import json
import os
import shutil
from pathlib import Path

DEVICE_VARIABLE, KEEP_VARIABLE = "GPU_CHECKS_DEVICE", "GPU_CHECKS_KEEP"  # where to run; the folder of --out
OUTCOMES_VARIABLE = "GPU_CHECKS_OUTCOMES"
MAX_BYTES, MAX_FILES = 16 * 2**20, 8  # of --out: a machine that is lent for minutes may hand back no more
MAX_MESSAGE = 200  # characters


def checked_device() -> str | None:
    """cuda, cpu where that was asked for, or None: there is nothing to run on."""
    import torch  # the command itself, which imports this module too, does without

    if torch.cuda.is_available():
        return "cuda"
    return "cpu" if os.environ.get(DEVICE_VARIABLE) == "cpu" else None


def keep(path: Path, name: str):
    """Leave a compressed copy in the folder of --out, if there is one and the file is not too large for it."""
    if not (folder := os.environ.get(KEEP_VARIABLE)):
        return
    target = Path(folder) / f"{name}.gz"
    with path.open("rb") as source, gzip.open(target, "wb") as copy:
        shutil.copyfileobj(source, copy)
    if target.stat().st_size > MAX_BYTES:
        target.unlink()


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _write(report, dict(report.user_properties), report.duration)


def pytest_collectreport(report):
    if report.outcome != "passed":
        _write(report, {}, 0.0)


def _write(report, figures: dict, seconds: float):
    message = ""  # one line; the part's output has the rest
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        message = str(report.longrepr[2]).removeprefix("Skipped: ")
    elif report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        lines = (crash.message if crash else str(report.longrepr)).strip().splitlines()
        message = (lines[:1] if crash else lines[-1:] or [""])[0][:MAX_MESSAGE]
    line = {
        "test": report.nodeid.rpartition("/")[2],
        "outcome": report.outcome,
        "seconds": round(seconds, 2),
        "message": message,
        "figures": figures,
    }
    with open(os.environ[OUTCOMES_VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line, default=str) + "\n")
