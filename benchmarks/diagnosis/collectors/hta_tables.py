"""Asks HolisticTraceAnalysis for its tables: `python hta_tables.py OUT RUN_FOLDER ...`, in an environment that has it and pandas below 3."""

import contextlib
import io
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path

from hta.trace_analysis import TraceAnalysis

QUESTIONS = {
    "temporal": lambda one: one.get_temporal_breakdown(visualize=False),
    "kernels": lambda one: one.get_gpu_kernel_breakdown(visualize=False)[0],
    "idle": lambda one: one.get_idle_time_breakdown(ranks=sorted(one.t.traces), visualize=False)[0],
    "launches": lambda one: count_launches(one.get_cuda_kernel_launch_stats(visualize=False)[0]),
}


def count_launches(table):
    """Of the first rank: how many kernels are shorter than their launches."""
    return [{"kernels": len(table), "short": int((table["gpu_duration"] < table["cpu_duration"]).sum())}]


def ask(folder: Path) -> dict:
    """Ask for a run's tables; a question that HTA fails on has its error instead."""
    with tempfile.TemporaryDirectory() as scratch:
        # HTA takes every .json and .gz of a folder for a trace
        for path in find_traces(folder):
            (Path(scratch) / path.name).symlink_to(path.resolve())
        analysis = TraceAnalysis(trace_dir=scratch)
        found = {name: answer(question, analysis) for name, question in QUESTIONS.items()}
        found["ranks"] = len(analysis.t.traces)
        if len(analysis.t.traces) > 1:
            found["stragglers"] = answer(
                lambda one: list(map(int, one.get_potential_stragglers(num_candidates=1))), analysis
            )
    return found


def find_traces(folder: Path) -> list[Path]:
    return sorted([*folder.rglob("*.pt.trace.json"), *folder.rglob("*.pt.trace.json.gz")])


def answer(question, analysis) -> object:
    try:
        table = question(analysis)
    except Exception as error:  # noqa: BLE001 - whatever the tool dies of is its answer
        return {"error": f"{type(error).__name__}: {error}"}
    return table if isinstance(table, list) else json.loads(table.to_json(orient="records"))


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for folder in map(Path, sys.argv[2:]):
        target = out / f"{folder.name}.json"
        if target.exists():
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                found = ask(folder)
        except Exception as error:  # noqa: BLE001 - whatever the tool dies of is its answer
            found = {"error": f"{type(error).__name__}: {error}"}
        target.write_text(json.dumps(found, default=str))
        print(folder.name, flush=True)


if __name__ == "__main__":
    main()
