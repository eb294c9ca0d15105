"""Shows how well dependency graphs of measured steps replay them.

    python -m benchmarks.graph TRACE_OR_FOLDER ... [--path] [--repeat MEGABYTES ...]

Each folder is a run: its traces become one graph where they name their ranks, else each one a graph of its own. A row
is printed for each graph: its size, what a step took and what an unchanged replay of it takes, which share of the edges
measured times contradict, waits on the critical path without a known reason, and CPU seconds and memory. --path lists what
the critical path of a step is made of. --repeat also takes the largest trace, repeated in time up to so many megabytes
of plain JSON.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report_speed import repeat
from megatron_lite.analysis.graph.build import build_graph
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.graph.replay import check_replay, find_critical_path, list_path_parts, replay
from megatron_lite.analysis.time.step_windows import attribute_events
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.analysis.trace.read import read_traces

Ranks = list[tuple[Trace, Placing]]
MAX_PARTS = 10
ENDINGS = ("*.pt.trace.json", "*.pt.trace.json.gz", "*.sqlite")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="TRACE_OR_FOLDER")
    parser.add_argument("--path", action="store_true")
    parser.add_argument("--repeat", nargs="*", type=int, default=[], metavar="MEGABYTES")
    given = parser.parse_args()
    print(
        f"{'run':34} {'ranks':>5} {'events':>9} {'activities':>10} {'edges':>9} {'measured ms':>11} {'replayed ms':>11} "
        f"{'off':>7} {'contra':>6} {'unexplained':>11} {'build s':>7} {'replay s':>8} {'MB':>6}"
    )
    for run in given.runs:
        for title, ranks in read_run(run):
            graph = show(title, ranks)
            if given.path:
                show_path(graph)
    files = [path for run in given.runs for path in list_files(run) if path.suffix != ".sqlite"]
    for megabytes in given.repeat:
        with tempfile.TemporaryDirectory() as folder:
            repeated = Path(folder) / "rank0.pt.trace.json"
            repeat(max(files, key=lambda path: path.stat().st_size), repeated, megabytes * 10**6)
            for _, ranks in read_run(repeated):
                show(f"repeated to {megabytes} MB", ranks)


def list_files(run: Path) -> list[Path]:
    """List the traces of a run."""
    if run.is_file():
        return [run]
    return sorted(path for ending in ENDINGS for path in run.glob(ending))


def read_run(run: Path) -> Iterator[tuple[str, Ranks]]:
    """Read the traces that become one graph each, with a title."""
    ranks = []
    for path in list_files(run):
        for trace in read_traces(path):
            ranks.append((trace, attribute_events(trace)))
    name = run.parent.name if run.is_file() else run.name
    if all(trace.rank is not None for trace, _ in ranks):
        yield name, ranks
        return
    for number, rank in enumerate(ranks, 1):
        yield f"{name} {number}", [rank]


def show(title: str, ranks: Ranks) -> Graph:
    """Print the row of a graph."""
    events = sum(len(trace.events) for trace, _ in ranks)
    started = time.process_time()
    graph = build_graph(ranks)
    built = time.process_time()
    trust = check_replay(graph)
    replayed = time.process_time()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(
        f"{title:34} {len(ranks):5} {events:9,} {len(graph.activities):10,} {len(graph.edges):9,} "
        f"{trust.measured_ms:11,.2f} {trust.replayed_ms:11,.2f} {trust.off:+7.2%} {trust.contradicted:6.1%} "
        f"{trust.unexplained_ms:8,.2f} ms {built - started:7.2f} {replayed - built:8.2f} {peak_mb:6,.0f}",
        flush=True,
    )
    if trust.why_not:
        print(f"    claims nothing: {trust.why_not}")
    return graph


def show_path(graph: Graph) -> None:
    """Print the longest parts of a graph's critical path."""
    found = replay(graph)
    if found is None:
        return
    for part in list_path_parts(find_critical_path(found))[:MAX_PARTS]:
        print(f"    {part.ms:9,.2f} ms  rank {part.rank}  {part.kind:9} {part.phase:16} {part.name}")


if __name__ == "__main__":
    main()
