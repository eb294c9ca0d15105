"""Makes the changes whose gain a dependency graph predicts, and shows predicted beside measured.

    python -m benchmarks.graph_pairs [--rounds 3] [--pair PATTERN] [--keep FOLDER]

Each pair is graph_scripts/train.py before and after a change, both under `megatron-lite watch` and at the same time, so
that what else runs on the machine holds up both. The trace of the run before is replayed with the edit that stands for the change. Measured is a step outside of the profiled window and
behind the first ones: the median of means over four steps in a row, since two workers bring two batches at once. Shown are medians over rounds: the step after the change by the step before it,
predicted and measured, and the difference as a share of the step before.
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.graph import read_run
from megatron_lite.analysis.graph.build import build_graph
from megatron_lite.analysis.graph.edits.accumulation import sum_gradients_once
from megatron_lite.analysis.graph.edits.fusion import fuse_operators
from megatron_lite.analysis.graph.edits.host_work import move_to_thread
from megatron_lite.analysis.graph.edits.loader import speed_up_loader, use_workers
from megatron_lite.analysis.graph.edits.straggler import level_rank
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.graph.replay import check_replay, replay

SCRIPT = Path(__file__).parent / "graph_scripts" / "train.py"
FIRST_STEP = 5  # that is timed
WINDOW = range(10, 22)  # of steps; the one behind the profiled ones writes the trace, and workers are ahead afterwards
IN_A_ROW = 4


@dataclass(frozen=True)
class Pair:
    """A change that is made.

    Attributes:
        name: What changes.
        ranks: On how many it runs.
        common: Flags of both runs.
        before: Flags of the first.
        after: Flags of the second.
        edit: What stands for the change.
    """

    name: str
    ranks: int
    common: str
    before: str
    after: str
    edit: Callable[[Graph], Graph]


def fuse_and_use_workers(graph: Graph) -> Graph:
    """Two changes at once."""
    return use_workers(fuse_operators(graph, "optimizer_step"), 2)


MANY_TENSORS = "--layers 40 --columns 96 --rows 32"
LONG = "--layers 2"  # so that sleeping is most of the step, and a busy machine changes little
PAIRS = (
    Pair("loader: 0 to 2 workers", 1, f"{LONG} --read-ms 100", "", "--workers 2", lambda graph: use_workers(graph, 2)),
    Pair("loader twice as fast", 1, LONG, "--read-ms 100", "--read-ms 50", lambda graph: speed_up_loader(graph, 2.0)),
    Pair(
        "report written in a thread",
        1,
        LONG,
        "--report-ms 60",
        "--report-ms 60 --report-in-thread",
        lambda graph: move_to_thread(graph, "write report"),
    ),
    Pair(
        "optimizer: for-loop to foreach",
        1,
        MANY_TENSORS,
        "--optimizer for-loop",
        "--optimizer foreach",
        lambda graph: fuse_operators(graph, "optimizer_step"),
    ),
    Pair(
        "foreach and 2 workers at once",
        1,
        f"{MANY_TENSORS} --read-ms 10",
        "--optimizer for-loop",
        "--optimizer foreach --workers 2",
        fuse_and_use_workers,
    ),
    Pair("no_sync, 4 micro-batches", 2, "--accumulate 4", "", "--no-sync", lambda graph: sum_gradients_once(graph, 4)),
    Pair("a late rank, 100 ms", 2, LONG, "--late-ms 100", "", lambda graph: level_rank(graph, 1)),
    Pair(
        "late rank and 2 workers at once",
        2,
        f"{LONG} --read-ms 60",
        "--late-ms 80",
        "--workers 2",
        lambda graph: use_workers(level_rank(graph, 1), 2),
    ),
)


@dataclass(frozen=True)
class Round:
    """A pair's result of one round.

    Attributes:
        predicted: Step after by step before, by the graph.
        measured: Step after by step before.
        before_ms: The step before.
        why_not: Why the graph claims nothing; "": it does.
    """

    predicted: float
    measured: float
    before_ms: float
    why_not: str


def main() -> None:
    """Make the changes, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--pair", default="", metavar="PATTERN")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    print(
        f"{'change':32} {'before ms':>9} {'predicted':>9} {'measured':>9} {'off, of the step':>16}   measured, each round"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        for pair in PAIRS:
            if re.search(given.pair, pair.name):
                rounds = [make_round(pair, number, folder, given.steps) for number in range(given.rounds)]
                show(pair, rounds)


def show(pair: Pair, rounds: list[Round]) -> None:
    """Print the row of a pair."""
    predicted = statistics.median(one.predicted for one in rounds)
    measured = statistics.median(one.measured for one in rounds)
    before_ms = statistics.median(one.before_ms for one in rounds)
    each = ", ".join(f"{one.measured:.2f}" for one in rounds)
    print(
        f"{pair.name:32} {before_ms:9,.1f} {predicted:9.2f} {measured:9.2f} {predicted - measured:+16.1%}   {each}",
        flush=True,
    )
    for one in rounds:
        if one.why_not:
            print(f"    a round claims nothing: {one.why_not}")


def make_round(pair: Pair, number: int, folder: Path, steps: int) -> Round:
    """Run both, and replay the first one's trace.

    Args:
        pair: the change.
        number: of the round.
        folder: where runs are kept.
        steps: how many steps a run has.
    """
    name = re.sub(r"\W+", "-", pair.name)
    before = folder / f"{name}-{number}-before"
    after = folder / f"{name}-{number}-after"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, pair, f"{pair.common} {pair.before}", before, steps)
        second = pool.submit(run, pair, f"{pair.common} {pair.after}", after, steps)
    before_ms = first.result()
    after_ms = second.result()
    [(_, ranks)] = read_run(before)
    graph = build_graph(ranks)
    unchanged = replay(graph)
    changed = replay(pair.edit(graph))
    assert unchanged is not None and changed is not None
    return Round(
        predicted=changed.step_ns / unchanged.step_ns,
        measured=after_ms / before_ms,
        before_ms=before_ms,
        why_not=check_replay(graph).why_not,
    )


def run(pair: Pair, flags: str, folder: Path, steps: int) -> float:
    """Run the script under watch, and return its median step outside of the window, ms."""
    launcher = [sys.executable]
    if pair.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(pair.ranks), "--rdzv-backend", "c10d"]
        launcher += ["--rdzv-endpoint", "localhost:0"]
    seconds = folder.with_suffix(".seconds")
    script = [str(SCRIPT), "--steps", str(steps), "--step-file", str(seconds), *flags.split()]
    watch = [sys.executable, "-m", "megatron_lite", "watch", "--run-dir", str(folder), "--steps", "10:16", "--"]
    done = subprocess.run([*watch, *launcher, *script], check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    times = [float(line) for line in seconds.read_text().splitlines()]
    outside = [one for at, one in enumerate(times, 1) if at > FIRST_STEP and at not in WINDOW]
    rows = [outside[at : at + IN_A_ROW] for at in range(0, len(outside) - IN_A_ROW + 1, IN_A_ROW)]
    return statistics.median(statistics.fmean(row) for row in rows) * 1e3


if __name__ == "__main__":
    main()
