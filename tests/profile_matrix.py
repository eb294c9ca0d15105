"""Every way of profiling in every kind of run, from a shell: what lies there afterwards, by opening it.

    python tests/profile_matrix.py [--way WAY] [--case CASE]

tells what it does, then prints a table; exits with 1 if a window is not what it should be. Add a Way or a Case here.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.launch import Ended, flags, pretrain, send, start, steps
from support.nsys_report import Report, import_report, under_nsys, why_not
from support.snapshots import steps_in_snapshot
from support.traces import steps_of, trace_files
from support.waiting import LIMIT_S

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


@dataclass
class Cell:
    """What one run left."""

    way: str
    case: Case
    command: str = ""
    found: dict[str, list[int]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    skipped: str | None = None


def write_flags(way: Way, case: Case, run: Path) -> str:
    """The flags of a cell."""
    return f"--lr-decay-style constant {case.flags} {way.flags} --run-dir {{run}}".format(run=run)


def fill_cell(name: str, case: Case, run: Path) -> Cell:
    """Do one run and open what it left."""
    way, cell = WAYS[name], Cell(name, case)
    if way.nsys and why_not():
        cell.skipped = why_not()
        return cell
    under, words = under_nsys(run / REPORT) if way.nsys else [], write_flags(way, case, run)
    launcher = f"torchrun --nproc_per_node {case.ranks}" if case.ranks else "python"
    parts = [shlex.join([*under, *launcher.split(), "pretrain_gpt.py"]), "...", words]
    cell.command = " ".join(parts).replace(str(run), "RUN")  # as one would type it, without what all runs share
    try:
        if case.before:
            pretrain(flags(case.before.format(run=run), "--lr-decay-style constant"))
        if case.signalled:
            ended = _run_and_signal(flags(words), run, under, beyond=case.steps[-1])
        else:
            ended = pretrain(flags(words), case.ranks, under=under)
            if under and ended.code and not ended.out:  # nsys 2022 may fail at once when another one has just ended
                time.sleep(1)
                ended = pretrain(flags(words), case.ranks, under=under)
    except subprocess.TimeoutExpired as error:
        cell.complaints = [f"did not end within {error.timeout:.0f} s"]
        return cell
    last = steps(run)[-1]["step"] if case.signalled else 0
    cell.found = {kind: read(run, case.rank) for kind, read in way.found.items()}
    kept = [path.name for path in run.rglob("*") if re.search(r"_rank\d|\.pickle$|\.nsys-rep$", path.name)]
    cell.files = sorted(re.sub(r"\d{12,}", "TIME", file) for file in kept)
    cell.complaints = [*find_faults(case, ended, cell.found, last, under_tool=way.nsys)]
    return cell


def find_faults(case: Case, ended: Ended, found: dict[str, list[int]], last: int, under_tool: bool) -> Iterator[str]:
    """What is not as it should be. last: the step with which a signalled run ended."""
    wanted = [*range(case.steps[0], last + 1)] if case.signalled else case.steps
    for kind, held in found.items():
        # where a run broke, the step it broke in may be there too
        if held[: len(wanted)] != wanted or len(held) > len(wanted) + (case.code != 0):
            yield f"{kind}: {_list_numbers(wanted)} were meant"
    if ended.code != case.code and not (case.ranks and ended.code):
        yield f"exit code {ended.code}: {ended.err[-300:]}"
    if case.says and not re.search(case.says, ended.out + ended.err):
        yield f"does not say {case.says!r}"
    if ended.err and not (ended.code or case.ranks or under_tool):  # torchrun and nsys have words of their own
        yield f"noise on stderr: {ended.err[:200]}"


def _run_and_signal(argv: list[str], run: Path, under: list[str], beyond: int) -> Ended:
    process, began, told = start(argv, under=under), time.monotonic(), run / "steps.jsonl"
    while process.poll() is None and time.monotonic() < began + LIMIT_S:
        if told.exists() and told.read_text().count("batch_size") > beyond:  # the last line may be half written
            break
        time.sleep(0.05)
    send(_find_trainers(run) if under else [process.pid])
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Ended(process.returncode, out, err, time.monotonic() - began)


def _find_trainers(run: Path) -> list[int]:
    """Process ids of the run's ranks, which a tool started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended
        if words[0] == sys.executable and str(run) in words:
            found.append(int(path.parent.name))
    return found


def _list_numbers(numbers: list[int]) -> str:
    """3-5 for 3, 4, 5."""
    if len(numbers) > 1 and numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", choices=WAYS, help="may be given several times; all when left out")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="likewise")
    chosen = parser.parse_args(argv)
    tasks = [(way, case) for way in chosen.way or WAYS for case in CASES if case.name in (chosen.case or [case.name])]
    rows, code = [], 0
    for number, (way, case) in enumerate(tasks, 1):
        print(f"[{number}/{len(tasks)}] {way}, {case.name}: ", end="", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            cell = fill_cell(way, case, Path(folder))
        said = cell.skipped or "; ".join(cell.complaints) or "as it should be"
        print(f"{said} ({time.monotonic() - began:.1f} s)", flush=True)
        held = "; ".join(f"{kind} {_list_numbers(found)}" for kind, found in cell.found.items())
        wrong = "".join(f" WRONG: {text}" for text in cell.complaints)
        found = cell.skipped or held + wrong
        rows.append(f"| {way} | {case.name} | {found} | {', '.join(cell.files)} | `{cell.command}` |")
        code = code or int(bool(cell.complaints))
    print("\n| way | run | iterations in the files | files | command |\n| --- | --- | --- | --- | --- |")
    print(*rows, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
