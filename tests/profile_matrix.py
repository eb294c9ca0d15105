"""Every way of profiling in every kind of run, from a shell: what lies there afterwards, by opening it.

    python tests/profile_matrix.py [--way WAY] [--case CASE]

tells what it does, then prints a table; exits with 1 if a window is not what it should be.
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from launch import Ended, flags, pretrain, send, start, steps
from nsys_report import under_nsys, why_not
from profile_ways import CASES, REPORT, WAYS, Case, Way
from waiting import LIMIT_S


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


def words(way: Way, case: Case, run: Path) -> str:
    """The flags of a cell."""
    return f"--lr-decay-style constant {case.flags} {way.flags} --run-dir {{run}}".format(run=run)


def one(name: str, case: Case, run: Path) -> Cell:
    """Do one run and open what it left."""
    way, cell = WAYS[name], Cell(name, case)
    if way.nsys and why_not():
        cell.skipped = why_not()
        return cell
    under = under_nsys(run / REPORT) if way.nsys else []
    cell.command = _command(words(way, case, run), case.ranks, under, run)
    try:
        if case.before:
            pretrain(flags(case.before.format(run=run), "--lr-decay-style constant"))
        ended = _run(case, flags(words(way, case, run)), run, under)
    except subprocess.TimeoutExpired as error:
        cell.complaints = [f"did not end within {error.timeout:.0f} s"]
        return cell
    last = steps(run)[-1]["step"] if case.signalled else 0
    cell.found = {kind: read(run, case.rank) for kind, read in way.found.items()}
    cell.files = _files(run)
    cell.complaints = [*complaints(case, ended, cell.found, last, under_tool=way.nsys)]
    return cell


def complaints(case: Case, ended: Ended, found: dict[str, list[int]], last: int, under_tool: bool) -> Iterator[str]:
    """What is not as it should be. last: the step with which a signalled run ended."""
    wanted = [*range(case.steps[0], last + 1)] if case.signalled else case.steps
    for kind, held in found.items():
        # where a run broke, the step it broke in may be there too
        if held[: len(wanted)] != wanted or len(held) > len(wanted) + (case.code != 0):
            yield f"{kind}: {_listed(wanted)} were meant"
    if ended.code != case.code and not (case.ranks and ended.code):
        yield f"exit code {ended.code}: {ended.err[-300:]}"
    if case.says and not re.search(case.says, ended.out + ended.err):
        yield f"does not say {case.says!r}"
    if ended.err and not (ended.code or case.ranks or under_tool):  # torchrun and nsys have words of their own
        yield f"noise on stderr: {ended.err[:200]}"


def _run(case: Case, argv: list[str], run: Path, under: list[str]) -> Ended:
    if case.signalled:
        return _run_and_signal(argv, run, under, beyond=case.steps[-1])
    ended = pretrain(argv, case.ranks, under=under)
    if under and ended.code and not ended.out:  # nsys 2022 may fail at once when another one has just ended
        time.sleep(1)
        ended = pretrain(argv, case.ranks, under=under)
    return ended


def _run_and_signal(argv: list[str], run: Path, under: list[str], beyond: int) -> Ended:
    process, began, told = start(argv, under=under), time.monotonic(), run / "steps.jsonl"
    while process.poll() is None and time.monotonic() < began + LIMIT_S:
        if told.exists() and told.read_text().count("batch_size") > beyond:  # the last line may be half written
            break
        time.sleep(0.05)
    send(_trainers(run) if under else [process.pid])
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Ended(process.returncode, out, err, time.monotonic() - began)


def _trainers(run: Path) -> list[int]:
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


def _files(run: Path) -> list[str]:
    """Names of what profiling left, times taken out."""
    kept = [
        path for path in run.rglob("*") if path.is_file() and re.search(r"_rank\d|\.pickle$|\.nsys-rep$", path.name)
    ]
    return sorted(re.sub(r"\d{12,}", "TIME", path.name) for path in kept)


def _command(words: str, ranks: int, under: list[str], run: Path) -> str:
    """As one would type it, the flags that all runs share left out."""
    launcher = f"torchrun --nproc_per_node {ranks}" if ranks else "python"
    parts = [shlex.join([*under, *launcher.split(), "pretrain_gpt.py"]), "...", words]
    return " ".join(parts).replace(str(run), "RUN")


def _listed(numbers: list[int]) -> str:
    """3-5 for 3, 4, 5."""
    if len(numbers) > 1 and numbers == [*range(numbers[0], numbers[-1] + 1)]:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"


def table(cells: list[Cell]) -> Iterator[str]:
    """Markdown: a line per cell."""
    yield "| way | run | iterations in the files | files | command |"
    yield "| --- | --- | --- | --- | --- |"
    for cell in cells:
        held = "; ".join(f"{kind} {_listed(found)}" for kind, found in cell.found.items())
        wrong = "".join(f" WRONG: {text}" for text in cell.complaints)
        yield (
            f"| {cell.way} | {cell.case.name} | {cell.skipped or held + wrong} | {', '.join(cell.files)} | "
            f"`{cell.command}` |"
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", action="append", choices=WAYS, help="may be given several times; all when left out")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="likewise")
    chosen = parser.parse_args(argv)
    tasks = [(way, case) for way in chosen.way or WAYS for case in CASES if case.name in (chosen.case or [case.name])]
    cells = []
    for number, (way, case) in enumerate(tasks, 1):
        print(f"[{number}/{len(tasks)}] {way}, {case.name}: ", end="", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            cells.append(one(way, case, Path(folder)))
        said = cells[-1].skipped or "; ".join(cells[-1].complaints) or "as it should be"
        print(f"{said} ({time.monotonic() - began:.1f} s)", flush=True)
    print("", *table(cells), sep="\n")
    return 1 if any(cell.complaints for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
