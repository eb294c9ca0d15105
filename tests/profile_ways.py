"""Ways of profiling and kinds of runs, for profile_matrix.py; add one here.

A Way's readers open the files of one rank and return the steps that they hold.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nsys_report import Report, import_report
from snapshots import steps_in_snapshot
from traces import steps_of, trace_files

REPORT = "report"  # of nsys, in the run's folder
SNAPSHOT = "memory.pickle"


@dataclass(frozen=True)
class Way:
    """One way of profiling. `flags` may name {run}, the run's folder."""

    flags: str
    found: dict[str, Callable[[Path, int], list[int]]]  # kind of file: (run's folder, rank) -> steps; [] without a file
    nsys: bool = False


@dataclass(frozen=True)
class Case:
    """One kind of run, and the steps that its window must hold."""

    name: str
    steps: list[int]
    flags: str
    rank: int = 0
    ranks: int = 0  # 0: without torchrun
    code: int = 0
    before: str = ""  # flags of a run before it
    says: str = ""  # a pattern in its output
    signalled: bool = False  # SIGTERM once the window has opened; the window must hold all steps from then on


WINDOW = "--profile-step-start 3 --profile-step-end 5"
OPEN_END = "--profile-step-start 3 --profile-step-end 100000"
CASES = [
    Case("1 rank", [3, 4], f"--train-iters 7 {WINDOW}"),
    Case("2 ranks, --profile-ranks 1", [3, 4], f"--train-iters 7 {WINDOW} --profile-ranks 1", rank=1, ranks=2),
    Case(
        "resumed at 5",
        [3, 4],
        f"--train-iters 12 {WINDOW} --load {{run}}/save",
        before="--train-iters 12 --exit-interval 5 --save {run}/save",
        says="steps 3-4 of this run = iterations 8-9",
    ),
    Case(
        "ends inside (--exit-interval 4)",
        [3, 4],
        "--train-iters 9 --exit-interval 4 --profile-step-start 3 --profile-step-end 8",
    ),
    Case(
        "SIGTERM inside",
        [3, 4],
        f"--train-iters 100000 --log-interval 1 --exit-signal-handler {OPEN_END}",
        says="exiting program after receiving SIGTERM",
        signalled=True,
    ),
    # weights of 1e30 make the next loss NaN, which stops the run two steps later
    Case(
        "exception inside",
        [1, 2, 3, 4],
        "--train-iters 9 --lr 1e30 --lr-decay-style constant --profile-step-start 1 --profile-step-end 9",
        code=16,
        says="is NaN or Inf",
    ),
]


def steps_of_trace(run: Path, rank: int) -> list[int]:
    """From the only trace of the run, which must be this rank's."""
    [path] = [*run.glob("*.pt.trace.json*")] or [None]
    return steps_of(run, rank) if path in trace_files(run, rank) else []


def steps_of_report(run: Path, rank: int) -> list[int]:
    """From the ranges of the only process that left some, which must be this rank's."""
    path = import_report(run / REPORT)
    report = Report(path) if path else None
    if report is None or len(report.steps) != 1 or not report.marks[0].startswith(f"rank {rank} of "):
        return []
    return [int(text.removeprefix("step ")) for text in report.steps[0]]


def steps_of_snapshot(run: Path, rank: int) -> list[int]:
    """Of the only snapshot: one rank's has no rank in its name."""
    return steps_in_snapshot(run / SNAPSHOT) if [*run.glob("*.pickle")] == [run / SNAPSHOT] else []


TORCH = "--use-pytorch-profiler"
MEMORY = f"--record-memory-history --memory-snapshot-path {{run}}/{SNAPSHOT}"
TRACE, RANGES, HISTORY = {"trace": steps_of_trace}, {"report": steps_of_report}, {"snapshot": steps_of_snapshot}
WAYS = {
    "torch profiler": Way(f"--profile {TORCH}", TRACE),
    "nsys": Way("--profile", RANGES, nsys=True),
    "memory history": Way(MEMORY, HISTORY),
    "torch profiler + memory history": Way(f"--profile {TORCH} {MEMORY}", TRACE | HISTORY),
    "nsys + memory history": Way(f"--profile {MEMORY}", RANGES | HISTORY, nsys=True),
    "torch profiler, all details": Way(
        f"--profile {TORCH} --profile-modules --profile-gzip --pytorch-profiler-collect-shapes "
        "--pytorch-profiler-collect-callstack --pytorch-profiler-collect-memory --pytorch-profiler-collect-flops "
        "--pytorch-profiler-collect-chakra",
        TRACE,
    ),
}
