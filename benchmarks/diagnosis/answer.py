"""Has tools read the runs, and writes what they say as claims."""

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.diagnosis.adapters import hta, ours, tracelens, traceml
from benchmarks.diagnosis.claims import Answer, Claim, NotReadError, write_answer
from benchmarks.diagnosis.manifest import Run

# a folder of their own: adapters/hta.py would hide the package of that name
COLLECTORS = Path(__file__).parent / "collectors"
TOOLS = ("report", "watch", "hta", "tracelens", "traceml")
# names of the tables' columns
TITLES = {
    "report": "megatron-lite report",
    "watch": "megatron-lite watch",
    "hta": "HTA",
    "tracelens": "TraceLens",
    "traceml": "TraceML",
}
LIMIT_S = 3600


def answer_runs(tool: str, runs: Sequence[Run], folder: Path, python: str) -> int:
    """Have a tool read the runs that are there. Returns how many it could not read.

    Args:
        tool: One of TOOLS.
        runs: Of the answer key.
        folder: Of the benchmark.
        python: The interpreter of the environment that has the tool.
    """
    raw = folder / "raw" / tool
    raw.mkdir(parents=True, exist_ok=True)
    made = [run for run in runs if (folder / "runs" / run.name).is_dir()]
    if tool in ("hta", "tracelens"):
        collect_tables(tool, made, folder, raw, python)
    asks: dict[str, Callable[[Run], list[Claim]]] = {
        "report": lambda run: ours.read_run(folder / "runs" / run.name),
        "watch": lambda run: watch(run, raw / run.name),
        "hta": lambda run: hta.read_claims(json.loads((raw / f"{run.name}.json").read_text())),
        "tracelens": lambda run: tracelens.read_claims(json.loads((raw / f"{run.name}.json").read_text())),
        "traceml": lambda run: observe(run, raw / f"{run.name}.json", python),
    }
    not_read = 0
    for run in made:
        try:
            answer = Answer(run.name, tuple(asks[tool](run)))
        except NotReadError as error:
            not_read += 1
            answer = Answer(run.name, not_read=str(error))
        write_answer(answer, folder / "answers" / TITLES[tool] / f"{run.name}.json")
        said = ", ".join(claim.text for claim in answer.claims) or answer.not_read or "nothing"
        print(f"{run.name}: {said[:200]}", flush=True)
    return not_read


def collect_tables(tool: str, runs: Sequence[Run], folder: Path, raw: Path, python: str) -> None:
    """Let a tool write its tables of all runs, in its own environment.

    Args:
        tool: "hta" or "tracelens".
        runs: That are there.
        folder: Of the benchmark.
        raw: Where the tables go; those that are there are not asked for again.
        python: The interpreter.
    """
    folders = [str(folder / "runs" / run.name) for run in runs if not (raw / f"{run.name}.json").exists()]
    if folders:
        # HTA cuts times to whole microseconds if not asked otherwise
        environment = {**os.environ, "HTA_DISABLE_NS_ROUNDING": "1"}
        command = [python, str(COLLECTORS / f"{tool}_tables.py"), str(raw), *folders]
        subprocess.run(command, env=environment, timeout=LIMIT_S, check=True)


def watch(run: Run, out: Path) -> list[Claim]:
    """Watch a program, if that has not been done, and read what was recorded."""
    if not out.exists():
        ours.watch(run, out)
    return ours.read_run(out)


def observe(run: Run, out: Path, python: str) -> list[Claim]:
    """Run a program under TraceML, if that has not been done, and read its summary."""
    if not out.exists():
        traceml.collect(run, out, python)
    return traceml.read_claims(traceml.read_summary(out))
