"""Every way of profiling in every kind of run, from a shell: what lies there afterwards, by opening it.

    python tests/profile_matrix.py [WAY ...]     prints a table; exits with 1 if a window is not what it should be

A way of profiling is a Way in WAYS; add one there. Its `found` opens the files of one rank and returns steps.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch import Ended, flags, pretrain
from traces import events, steps_in, trace_files


@dataclass(frozen=True)
class Way:
    """One way of profiling. `flags` may name {run}, the run's folder; `expected` turns the intended steps into those
    that its file must hold, for ways whose files hold more (or none, where it cannot work)."""

    flags: str
    found: Callable[[Path, int], list[int]]  # (run's folder, rank) -> steps in the file; [] if there is none
    expected: Callable[[list[int]], list[int]] = list


@dataclass(frozen=True)
class Case:
    """One kind of run, and the steps that its window must hold."""

    name: str
    steps: list[int]
    flags: str
    rank: int = 0
    ranks: int = 0  # 0: without torchrun
    code: int = 0
    before: str = ""  # a run before it
    says: str = ""  # a pattern in its output


WINDOW = "--profile-step-start 3 --profile-step-end 5"
CASES = [
    Case("1 rank", [3, 4], f"--train-iters 7 {WINDOW}"),
    Case("2 ranks, --profile-ranks 1", [3, 4], f"--train-iters 7 {WINDOW} --profile-ranks 1", rank=1, ranks=2),
    Case("resumed at 5", [3, 4], f"--train-iters 12 {WINDOW} --load {{run}}/save",
         before="--train-iters 12 --exit-interval 5 --save {run}/save", says="steps 3-4 of this run = iterations 8-9"),
    Case("ends inside (--exit-interval 4)", [3, 4],
         "--train-iters 9 --exit-interval 4 --profile-step-start 3 --profile-step-end 8"),
    # weights of 1e30 make the next loss NaN, which stops the run two steps later
    Case("exception inside", [1, 2, 3, 4], "--train-iters 9 --lr 1e30 --lr-decay-style constant "
         "--profile-step-start 1 --profile-step-end 9", code=16, says="is NaN or Inf"),
]


def steps_of_traces(run: Path, rank: int) -> list[int]:
    """From the only trace of the rank, unless other ranks left one too, where they should not."""
    if len(list(run.glob("*.pt.trace.json*"))) != 1:
        return []
    return [step for path in trace_files(run, rank) for step in steps_in(events(path))]


WAYS = {
    "torch profiler": Way("--profile --use-pytorch-profiler --run-dir {run}", steps_of_traces),
    "torch profiler, all details": Way(
        "--profile --use-pytorch-profiler --run-dir {run} --profile-modules --profile-gzip "
        "--pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack "
        "--pytorch-profiler-collect-memory --pytorch-profiler-collect-flops "
        "--pytorch-profiler-collect-chakra", steps_of_traces),
}


def one(way: Way, case: Case, run: Path) -> tuple[str, list[str]]:
    """(what was found, complaints) of one run."""
    if case.before:
        pretrain(flags(case.before.format(run=run), "--lr-decay-style constant"))
    words = f"{case.flags} {way.flags}".format(run=run)
    ended = pretrain(flags("--lr-decay-style constant", words), case.ranks)
    found = way.found(run, case.rank)
    return f"{found}", list(complaints(way, case, ended, found))


def complaints(way: Way, case: Case, ended: Ended, found: list[int]):
    wanted = way.expected(case.steps)
    if found[: len(wanted)] != wanted or len(found) > len(wanted) + (case.code != 0):  # one more may be broken off
        yield f"steps {wanted} were meant"
    if ended.code != case.code and not (case.ranks and ended.code):
        yield f"exit code {ended.code}: {ended.err[-300:]}"
    if case.says and not re.search(case.says, ended.out + ended.err):
        yield f"does not say {case.says!r}"
    if ended.err and not case.code and not case.ranks:  # torchrun has words of its own
        yield f"noise on stderr: {ended.err[:200]}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(WAYS))
    wrong = 0
    print(f"| {'way':30} | {'run':34} | steps in the file | files |\n| --- | --- | --- | --- |")
    for name in parser.parse_args(argv).ways or WAYS:
        for case in CASES:
            with tempfile.TemporaryDirectory() as folder:
                found, said = one(WAYS[name], case, Path(folder))
                names = [path.name for path in Path(folder).rglob("*_rank*") if path.is_file()]
            files = sorted({re.sub(r"\d{12,}", "TIME", name) for name in names})
            wrong += bool(said)
            print(f"| {name:30} | {case.name:34} | {found}{'' if not said else ' WRONG: ' + '; '.join(said)} | "
                  f"{', '.join(files)} |", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
