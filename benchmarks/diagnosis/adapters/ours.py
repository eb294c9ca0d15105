"""This project: findings of `megatron-lite report` as claims, in their order.

A finding's code stands for a class (ours_classes.tsv); one without a class is no planted cause. A finding that is certain is a claim of
high confidence, a likely one of low. The verdict's sentence is no claim. Two tools: "megatron-lite report" reads the run's files;
"megatron-lite watch" runs the programs itself, and reads what it recorded.
"""

import csv
import subprocess
import sys
from pathlib import Path

from benchmarks.diagnosis.claims import HIGH, LOW, Claim, NotReadError
from benchmarks.diagnosis.make import build_program_command, start
from benchmarks.diagnosis.manifest import Run
from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.report import Report
from megatron_lite.errors import UserError

HERE = Path(__file__).parent
STEPS = 26


def read_meanings() -> dict[str, tuple[str, ...]]:
    """Read the classes of codes."""
    with (HERE / "ours_classes.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {code: tuple(row["classes"].split()) for row in rows for code in row["codes"].split()}


def read_run(folder: Path) -> list[Claim]:
    """Read a run's files.

    Args:
        folder: Of the run.

    Raises:
        NotReadError: They are not read.
    """
    try:
        return read_claims(analyze([folder]))
    except UserError as error:
        raise NotReadError(str(error)) from error


def read_claims(report: Report) -> list[Claim]:
    """Read the findings of a report."""
    meanings = read_meanings()
    claims = []
    for finding in report.findings:
        culprit = f"rank {finding.rank}" if finding.rank is not None else ""
        confidence = HIGH if finding.certain else LOW
        # a class of its own for what is none of the key's
        classes = meanings.get(finding.code, ("other",))
        claims.append(
            Claim(classes, (), culprit, confidence, f"{finding.code} ({'certain' if finding.certain else 'likely'})")
        )
    return claims


def watch(run: Run, out: Path) -> None:
    """Run a program under `megatron-lite watch`.

    Args:
        run: Of the answer key.
        out: Folder for the run.

    Raises:
        NotReadError: It is no program, or it failed.
    """
    if run.kind != "program":
        raise NotReadError("no program to watch")
    command = [sys.executable, "-m", "megatron_lite", "watch", "--no-report", "--run-dir", str(out), "--"]
    try:
        start(run, [*command, *build_program_command(run, ["--steps", str(STEPS)])])
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        raise NotReadError(f"{type(error).__name__}: {error}"[-500:]) from error
