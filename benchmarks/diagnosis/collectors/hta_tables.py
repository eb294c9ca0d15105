"""Asks HolisticTraceAnalysis for its tables: `python hta_tables.py OUT RUN_FOLDER ...`, in an environment that has it and pandas below 3."""

import json
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from asked_runs import ask_of_runs, find_traces, keep_error
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
        found = {name: keep_error(list_rows, question, analysis) for name, question in QUESTIONS.items()}
        found["ranks"] = len(analysis.t.traces)
        if len(analysis.t.traces) > 1:
            found["stragglers"] = keep_error(list_stragglers, analysis)
    return found


def list_stragglers(analysis: TraceAnalysis) -> list[int]:
    """Ask which rank the others wait for."""
    return [int(rank) for rank in analysis.get_potential_stragglers(num_candidates=1)]


def list_rows(question: Callable[[TraceAnalysis], object], analysis: TraceAnalysis) -> object:
    """Ask one question, and have its table as rows."""
    table = question(analysis)
    return table if isinstance(table, list) else json.loads(table.to_json(orient="records"))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    ask_of_runs(ask)
