"""Where the time goes, by this project and by HolisticTraceAnalysis 0.5.0, side by side for every trace of a folder.

    HTA_DISABLE_NS_ROUNDING=1 PYTHONPATH=. python benchmarks/beside_hta.py FOLDER...   # pip install HolisticTraceAnalysis "pandas<3" msgspec

Percentages are of a window, and the two take different ones, so each figure stands three times: HTA's; ours on HTA's
window (device work launched before the last ProfilerStep, from its first start to its last end), where both must agree to
the nanosecond; and ours as reports have it (steady steps, with the idle time before a step's first kernel). Idle time is
split by HTA for each stream (a stream that is seldom used is idle all day); its rule is applied to our columns too, and
"gpu" is our attribution of what the whole GPU waited for.

Where they differ: work whose launch call lies outside of the trace is compared by HTA with the time of the file's first
event instead (what it moves from kernel wait to host wait is the whole difference), and without HTA_DISABLE_NS_ROUNDING
it cuts each event to whole us. What is below 0.1 us is HTA's arithmetic in floating-point us.
"""

import contextlib
import io
import logging
import os
import sys
import tempfile
from pathlib import Path

import numpy as np

from megatron_lite.analysis.time.host_steps import PROFILER_STEP
from megatron_lite.analysis.time.idle_gaps import device_covers
from megatron_lite.analysis.time.rank_time import rank_time
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.analysis.trace.read import read_traces

KERNEL_WAIT_NS = 30_000  # HTA's threshold: documented as 30 ns, compared with us
WAITS = ("host_wait_us", "kernel_wait_us", "other_wait_us")
ROWS = ("window_us", "compute_us", "other_busy_us", "idle_us", "overlap_%", *WAITS)


def main(folders: list[str]) -> None:
    for folder in map(Path, folders):
        traces = {}
        for path in sorted(folder.glob("*.json*")):
            for trace in read_traces(path):
                traces[trace.rank or 0] = trace
        if not traces:
            print(f"{folder}: no trace in it")
            continue
        beside = by_hta(folder)
        for rank, trace in sorted(traces.items()):
            show(f"{folder.name}, rank {rank}", beside.get(rank, {}), on_its_window(trace), trace)


def show(title: str, theirs: dict, ours: dict, trace: Trace) -> None:
    print(f"\n{title}\n{'':16}{'HTA':>16}{'ours, its window':>20}{'difference':>14}")
    for row in ROWS:
        one, other = theirs.get(row), ours.get(row)
        apart = f"{other - one:14,.3f}" if one is not None and other is not None else ""
        print(f"{row:16}{shown(one):>16}{shown(other):>20}{apart}")
    time = rank_time(trace, attribute_events(trace))
    rows = ", ".join(f"{row} {ms * 1e3:,.1f}" for row, ms in time.rows.items() if ms)
    print(
        f"gpu, us per step: {len(time.steady_steps)} of {len(time.steps)} steps steady, {time.step_ms * 1e3:,.1f} each: {rows}"
    )


def shown(value: float | None) -> str:
    return "-" if value is None or np.isnan(value) else f"{value:,.3f}"


def by_hta(folder: Path) -> dict[int, dict]:
    """Rank -> rows; a row that HTA cannot say is left out, and why is printed."""
    from hta.trace_analysis import TraceAnalysis

    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stderr(io.StringIO()):
        copy = Path(scratch) / "traces"  # it takes every .json and .gz of a folder for a trace, and writes beside them
        copy.mkdir()
        for path in folder.glob("*.json*"):
            (copy / path.name).symlink_to(path.resolve())
        analysis = TraceAnalysis(trace_dir=str(copy))
        found: dict[int, dict] = {}
        for ask in (temporal, overlap, idle):
            try:
                for rank, rows in ask(analysis):
                    found.setdefault(rank, {}).update(rows)
            except Exception as error:  # noqa: BLE001 - whatever it dies of is a row of the table
                print(f"HTA, {ask.__name__}: {type(error).__name__}: {error}")
    return found


def temporal(analysis):
    names = {"window_us": "kernel", "compute_us": "compute", "other_busy_us": "non_compute", "idle_us": "idle"}
    for row in analysis.get_temporal_breakdown(visualize=False).to_dict("records"):
        yield row["rank"], {ours: row[f"{theirs}_time(us)"] for ours, theirs in names.items()}


def overlap(analysis):
    for row in analysis.get_comm_comp_overlap(visualize=False).to_dict("records"):
        yield row["rank"], {"overlap_%": row["comp_comm_overlap_pctg"]}


def idle(analysis):
    for rank in analysis.t.traces:
        table, _ = analysis.get_idle_time_breakdown(ranks=[rank], visualize=False)
        by_reason = table.groupby("idle_category")["idle_time"].sum()
        yield rank, {f"{'other_wait' if reason == 'other' else reason}_us": us for reason, us in by_reason.items()}


def on_its_window(trace: Trace) -> dict:
    """Our figures of the device work that HTA looks at."""
    events, rows = trace.events, trace.device_rows
    marks = np.flatnonzero(trace.matching(PROFILER_STEP.match) & (events.kind == Kind.ANNOTATION))
    launch = trace.launch_of[rows]
    if len(np.unique(events.name[marks])) > 1:
        last = events.start_ns[marks].max()
        rows = rows[(launch >= 0) & (events.start_ns[np.maximum(launch, 0)] < last)]
    if not len(rows):
        return {}
    covers = device_covers(trace, rows)
    window, talking = int(events.end_ns[rows].max() - events.start_ns[rows].min()), covers.communication.length
    found = {
        "window_us": window,
        "compute_us": covers.compute.length,
        "idle_us": window - covers.busy.length,
        "other_busy_us": covers.busy.length - covers.compute.length,
    } | waits(trace, rows)
    hidden = {"overlap_%": round(100 - 100 * covers.exposed_communication.length / talking, 2)} if talking else {}
    return {row: ns / 1e3 for row, ns in found.items()} | hidden


def waits(trace: Trace, rows: np.ndarray) -> dict:
    """HTA's rule, stream by stream: host wait if the launch call began after the work before it had ended."""
    events, launch = trace.events, trace.launch_of
    totals = dict.fromkeys(WAITS, 0)
    for stream in np.unique(events.stream[rows]):
        mine = rows[events.stream[rows] == stream]
        gap = events.start_ns[mine][1:] - events.end_ns[mine][:-1]
        called = launch[mine][1:]
        host = (called >= 0) & (events.start_ns[np.maximum(called, 0)] > events.end_ns[mine][:-1])
        quick = ~host & (gap < KERNEL_WAIT_NS)
        for row, hit in zip(WAITS, (host, quick, ~host & ~quick)):
            totals[row] += int(gap[hit].sum())
    return totals


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    if "HTA_DISABLE_NS_ROUNDING" not in os.environ:
        print("HTA_DISABLE_NS_ROUNDING is not set: HTA cuts each event to whole microseconds")
    main(sys.argv[1:])
