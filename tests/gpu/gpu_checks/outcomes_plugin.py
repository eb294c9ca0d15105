"""For pytest -p: a JSON line per test as soon as it is over, so that a part that is ended keeps what it found."""

import json
import os

FILE_VARIABLE = "GPU_CHECKS_OUTCOMES"
LONGEST = 200  # characters of a message


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report, dict(report.user_properties), report.duration)


def pytest_collectreport(report):
    if report.outcome != "passed":
        _write(report.nodeid, report, {}, 0.0)


def _write(name: str, report, figures: dict, seconds: float):
    line = {
        "test": name.rpartition("/")[2],
        "outcome": report.outcome,
        "seconds": round(seconds, 2),
        "message": _message(report),
        "figures": figures,
    }
    with open(os.environ[FILE_VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line, default=str) + "\n")


def _message(report) -> str:
    """One line; the part's output has the rest."""
    if report.outcome == "passed":
        return ""
    if report.outcome == "skipped":
        return str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines()
    return (lines[:1] if crash else lines[-1:] or [""])[0][:LONGEST]
