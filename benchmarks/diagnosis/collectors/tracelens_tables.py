"""Asks TraceLens for its tables: `python tracelens_tables.py OUT RUN_FOLDER ...`, in an environment that has it.

Of several ranks, the first one's performance report, and the report of collectives over all of them.
"""

import json
import re
import tempfile
import warnings
from pathlib import Path

from asked_runs import ask_of_runs, find_traces, keep_error
from TraceLens.Reporting.generate_multi_rank_collective_report_pytorch import generate_collective_report
from TraceLens.Reporting.generate_perf_report_pytorch import generate_perf_report_pytorch

TABLES = ("gpu_timeline", "ops_summary_by_category", "ops_summary")


def ask(folder: Path) -> dict:
    """Ask for a run's tables."""
    traces = find_traces(folder)
    with tempfile.TemporaryDirectory() as scratch:
        frames = generate_perf_report_pytorch(
            str(traces[0]), output_csvs_dir=scratch, short_kernel_study=True, detect_recompute=True
        )
        found = {name: json.loads(frames[name].to_json(orient="records")) for name in TABLES if name in frames}
        if "GEMM" in frames:
            found["GEMM"] = json.loads(frames["GEMM"].reset_index().astype(str).to_json(orient="records"))
        if len(traces) > 1:
            found["stragglers"] = keep_error(ask_stragglers, traces, Path(scratch))
    return found


def ask_stragglers(traces: list[Path], scratch: Path) -> object:
    """Ask who waits for whom."""
    for path in traces:
        rank = re.search(r"rank_?(\d+)", path.name)
        (scratch / f"rank{rank[1]}.{path.name.partition('.')[2]}").symlink_to(path.resolve())
    frames = generate_collective_report(
        trace_glob=str(scratch / "rank*.pt.trace.json*"),
        world_size=len(traces),
        output_csvs_dir=str(scratch / "out"),
    )
    table = frames.get("straggler_summary")
    return [] if table is None else json.loads(table.to_json(orient="records"))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ask_of_runs(ask)
