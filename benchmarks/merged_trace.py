"""How large one trace of all ranks is, and what writing it takes.

    python -m benchmarks.merged_trace TRACE [--ranks 8] [--repeats 4]

TRACE is a rank's trace of torch.profiler (.json or .json.gz). It is repeated in time, and given to so many ranks. Prints
events, bytes of the ranks' JSON and of the file, plain and gzipped; seconds of reading them as a report does and of
writing; and the largest memory before and after writing.
"""

import argparse
import gzip
import json
import re
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.timeline.build import build_timeline
from megatron_lite.report.perfetto_file import write_perfetto

STEP = re.compile(r"ProfilerStep#(\d+)$")
BETWEEN_US = 100.0  # copies
APART_US = 37.0  # the ranks' first events
MAX_IDS = 10_000_000  # of one copy


def repeat(trace: dict[str, Any], repeats: int, rank: int, ranks: int) -> dict[str, Any]:
    """A rank's trace that holds the given one several times."""
    lasting = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") != "Trace"]
    others = [event for event in trace["traceEvents"] if event.get("ph") == "M"]
    first = min(float(event["ts"]) for event in lasting)
    last = max(float(event["ts"]) + event["dur"] for event in lasting)
    steps = {int(found[1]) for event in lasting if (found := STEP.match(event["name"]))}
    events = others
    for copy in range(repeats):
        for event in lasting:
            moved = event | {"ts": float(event["ts"]) + copy * (last - first + BETWEEN_US) + rank * APART_US}
            if found := STEP.match(event["name"]):
                moved["name"] = f"ProfilerStep#{int(found[1]) + copy * (max(steps) - min(steps) + 1)}"
            if "correlation" in event.get("args", {}):
                moved["args"] = event["args"] | {"correlation": event["args"]["correlation"] + copy * MAX_IDS}
            events.append(moved)
    told = trace.get("distributedInfo", {}) | {"rank": rank, "world_size": ranks}
    return trace | {"distributedInfo": told, "traceEvents": events}


def measure_peak_mib() -> float:
    """The largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    text = options.trace.read_bytes()
    trace = json.loads(gzip.decompress(text) if options.trace.suffix == ".gz" else text)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "traces"
        folder.mkdir()
        for rank in range(options.ranks):
            content = repeat(trace, options.repeats, rank, options.ranks)
            (folder / f"host_rank{rank}.pt.trace.json").write_text(json.dumps(content, separators=(",", ":")))
        num_bytes = sum(path.stat().st_size for path in folder.iterdir())
        started = time.perf_counter()
        report = analyze([folder])
        events = sum(len(one.trace.events) for one in report.facts.ranks_seen)
        print(f"{events:,} events, JSON {num_bytes / 2**20:.1f} MiB, read in {time.perf_counter() - started:.1f} s")
        for ending in (".pftrace", ".pftrace.gz"):
            started = time.perf_counter()
            timeline = build_timeline(report)
            built = time.perf_counter()
            before = measure_peak_mib()
            size = write_perfetto("FILE", Path(name) / f"run{ending}", timeline)
            print(
                f"{ending}: {size / 2**20:.1f} MiB, graph {built - started:.1f} s, written in "
                f"{time.perf_counter() - built:.1f} s, peak {before:.0f} -> {measure_peak_mib():.0f} MiB"
            )


if __name__ == "__main__":
    main()
