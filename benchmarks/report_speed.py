"""How fast traces become a breakdown here and in HolisticTraceAnalysis (HTA).

    python benchmarks/report_speed.py --hta VENV/bin/python [--runs 3] [--megabytes 100 1000] [--ours PYTHON] TRACE_OR_FOLDER...

Each given trace, and the largest of them repeated in time up to each of --megabytes of plain JSON, is taken by both in
turn, each in a fresh process: read, and split every rank's time into computing, communicating, idle and overlapping.
Prints medians of seconds (of the work; of the whole process) and of the largest memory, and their ratios; and the whole
`megatron-lite report` with its page and report.json, beside HTA's whole process. --hta is a Python that has
HolisticTraceAnalysis; without it ours is timed alone. --ours is a Python in which this project is installed as users
have it [this one]. PYTHONDONTWRITEBYTECODE is ignored: all keep what Python compiles.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OURS = """
from pathlib import Path
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.trace.read import read_traces
started = time.perf_counter()
for path in sorted(Path(sys.argv[1]).iterdir()):
    for trace in read_traces(path):
        rank_time(trace, attribute_events(trace))
"""
HTA = """
from hta.trace_analysis import TraceAnalysis
started = time.perf_counter()
analysis = TraceAnalysis(trace_dir=sys.argv[1])
analysis.get_temporal_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
"""
BEFORE = "import sys, time, resource, json\n"
AFTER = """
work_s = time.perf_counter() - started
peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) * 1024
print(json.dumps([work_s, peak]))
"""
SHIFTED = re.compile(rb'("(?:ts|correlation|id)"\s*:\s*|ProfilerStep#)(\d+)')
IDS_OF_A_COPY = 10_000_000


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("traces", nargs="+", type=Path, metavar="TRACE_OR_FOLDER")
    parser.add_argument("--hta", metavar="PYTHON", help="a Python with HolisticTraceAnalysis")
    parser.add_argument(
        "--ours", metavar="PYTHON", default=sys.executable, help="a Python with megatron_lite installed"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[100, 1000], help="sizes of repeated traces")
    parser.add_argument("--scratch", type=Path, help="where repeated traces are written for the time being")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        print(
            f"{'trace':32} {'MB':>6}  {'ours s':>7} {'(all)':>7} {'MB':>6}   {'HTA s':>7} {'(all)':>7} {'MB':>6}   "
            "HTA/ours: time  memory   report s  HTA (all)/report"
        )
        for title, folder in _cases(args, Path(scratch)):
            _compare(title, folder, args)


def _cases(args: argparse.Namespace, scratch: Path):
    """(title, folder with the traces of one job)"""
    folders = []
    for number, given in enumerate(args.traces):
        folder = scratch / str(number)
        files = sorted(given.glob("*.json*")) if given.is_dir() else [given]
        folder.mkdir()
        for path in files:
            shutil.copy(path, folder)
        folders.append(folder)
        yield (given if given.is_dir() else given.parent).name, folder
    largest = max((path for folder in folders for path in folder.iterdir()), key=lambda path: path.stat().st_size)
    for megabytes in args.megabytes:
        folder = scratch / f"repeated_{megabytes}"
        folder.mkdir()
        repeat(largest, folder / "rank0.pt.trace.json", megabytes * 10**6)
        yield f"repeated to {megabytes} MB", folder
        shutil.rmtree(folder)


def _compare(title: str, folder: Path, args: argparse.Namespace):
    tools = {"ours": (args.ours, OURS)} | ({"hta": (args.hta, HTA)} if args.hta else {})
    seen, reports_s = {name: [] for name in tools}, []
    for _ in range(args.runs):
        for name, (python, code) in tools.items():
            seen[name].append(_timed(python, code, folder))
        reports_s.append(_time_report(args.ours, folder))
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    medians = {
        name: [statistics.median(column) for column in zip(*rows)] if None not in rows else None
        for name, rows in seen.items()
    }
    ours, hta = medians["ours"], medians.get("hta")
    columns = ["{:7.2f} {:7.2f} {:6.0f}".format(*figures) if figures else f"{'failed':>22}" for figures in (ours, hta)]
    ratios = f"{hta[0] / ours[0]:14.1f} {hta[2] / ours[2]:7.1f}" if ours and hta else ""
    whole = f"{statistics.median(reports_s):12.2f}"
    if None not in seen.get("hta", [None]):
        pairs = [theirs[1] / ours_s for theirs, ours_s in zip(seen["hta"], reports_s)]
        whole += f"  {statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
    print(f"{title:32} {size:6.0f}  {columns[0]}   {columns[1]}   {ratios} {whole}", flush=True)


def _time_report(python: str, folder: Path) -> float:
    """Seconds of `megatron-lite report` as a user has it."""
    with tempfile.TemporaryDirectory() as current:
        started = time.perf_counter()
        command = [python, "-m", "megatron_lite.cli.main", "report", str(folder)]
        subprocess.run(command, check=True, capture_output=True, env=_choose_environment(), cwd=current)
        return time.perf_counter() - started


def _choose_environment() -> dict[str, str]:
    # without the switch HTA rounds nanoseconds inwards, and refuses traces for what comes of that
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"HTA_DISABLE_NS_ROUNDING": "1"}


def _timed(python: str, code: str, folder: Path) -> tuple[float, float, float] | None:
    """(seconds of the work, of the whole process, most memory in MB); None if it failed."""
    started = time.perf_counter()
    command = [python, "-c", BEFORE + code + AFTER, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=_choose_environment())
    whole_s = time.perf_counter() - started
    if done.returncode:
        print(done.stderr.strip().splitlines()[-1:], file=sys.stderr)
        return None
    work_s, peak = json.loads(done.stdout.strip().splitlines()[-1])
    return work_s, whole_s, peak / 1e6


def repeat(source: Path, target: Path, num_bytes: int):
    """Write the events of `source` again and again, each time later and with ids and steps of their own."""
    text = gzip.decompress(source.read_bytes()) if source.suffix == ".gz" else source.read_bytes()
    begin = re.search(rb'"traceEvents"\s*:\s*\[', text).end()
    ends = (found.start() + 1 for found in re.finditer(rb"\}\s*\]", text[begin:]))
    end = begin + next(end for end in ends if _is_json(b"[" + text[begin : begin + end] + b"]"))
    events = text[begin:end]
    times = [int(ts) for ts in re.findall(rb'"ts"\s*:\s*(\d+)', events)]
    steps = [int(step) for step in re.findall(rb"ProfilerStep#(\d+)", events)] or [0]
    shift_of = {b'"t': max(times) - min(times) + 20_000, b"Pr": max(steps) - min(steps) + 1}
    with open(target, "wb") as file:
        file.write(text[:begin])
        for copy in range(max(1, round(num_bytes / len(events)))):
            shifts = {key: copy * shift for key, shift in shift_of.items()}
            shifted = SHIFTED.sub(
                lambda found, copy=copy, shifts=shifts: (
                    found[1] + b"%d" % (int(found[2]) + shifts.get(found[1][:2], copy * IDS_OF_A_COPY))
                ),
                events,
            )
            file.write(b"," * bool(copy) + shifted)
        file.write(text[end:])


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text, strict=False)
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    main()
