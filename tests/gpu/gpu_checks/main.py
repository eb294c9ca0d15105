"""Part after part, then the table."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.training.machine import machine
from benchmarks.training.process import environment_of
from gpu_checks import budget, out_folder, speed, table
from gpu_checks.agreed import DEVICE_VARIABLE, KEEP_VARIABLE
from gpu_checks.command_line import read
from gpu_checks.outcome import LEFT_OUT, NOT_STARTED, Outcome, of_tests, read_tests
from gpu_checks.outcomes_plugin import FILE_VARIABLE
from gpu_checks.parts import GPU_TESTS, PARTS, SPEED, SPEED_FILE, Part, command_of, lacks
from gpu_checks.process import run

BAD, NO_DEVICE, INTERRUPTED = 1, 3, 130
SECONDS_TO_LOOK = 120  # the first import of torch from a cold disk


def main(argv: list[str], description: str) -> int:
    """Exit code: 0 all good, 1 something is not or was not started, 2 a mistake in the flags, 3 nothing can run here."""
    args = read(argv, description)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends the part that is going on
    found = _torch_facts()
    if objection := _objection(found, args.device):
        print(f"error: {objection}", file=sys.stderr)
        return NO_DEVICE
    facts = {"command": sys.argv, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "torch": found, "machine": machine()}
    print(_headline(found, args), flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        outcomes, interrupted = _check(
            [part for part in PARTS if part.name in args.parts], args, started + 60 * args.minutes, Path(folder)
        )
        lines = table.lines_of(outcomes, time.monotonic() - started)
        if args.out:
            lines += out_folder.write(args.out, Path(folder), facts, outcomes)
    print("\n".join(lines))
    if interrupted:
        return INTERRUPTED
    return 0 if all(outcome.is_good for outcome in outcomes) else BAD


def _check(parts: Sequence[Part], args, deadline: float, scratch: Path) -> tuple[list[Outcome], bool]:
    """(an outcome per part, was it interrupted)."""
    outcomes = []
    for at, part in enumerate(parts):
        try:
            outcome = _outcome(part, parts[at + 1 :], args, deadline, scratch)
        except KeyboardInterrupt:
            words = "interrupted"
            return [*outcomes, *(Outcome(one.name, NOT_STARTED, words) for one in parts[at:])], True
        outcomes.append(outcome)
        print(table.line_of(outcome), flush=True)
    return outcomes, False


def _outcome(part: Part, later: Sequence[Part], args, deadline: float, scratch: Path) -> Outcome:
    if reason := lacks(part, args.device):
        return Outcome(part.name, LEFT_OUT, reason)
    left_s = deadline - time.monotonic()
    limit_s = budget.limit_s(part, [one for one in later if not lacks(one, args.device)], left_s)
    if not budget.is_enough(limit_s):
        return Outcome(part.name, NOT_STARTED, f"{max(left_s, 0):.0f} s of --minutes were left")
    folder = scratch / part.name
    folder.mkdir()
    tests = folder / "tests.jsonl"
    ended = run(
        command_of(part, args.device, limit_s, folder), _environment(args, tests), limit_s, scratch / f"{part.name}.log"
    )
    if part.name == SPEED:
        return speed.outcome_of(folder / SPEED_FILE, part.name, args.device, ended.code, ended.seconds, limit_s)
    return of_tests(part.name, read_tests(tests), ended.code, ended.seconds, limit_s)


def _environment(args, tests: Path) -> dict[str, str]:
    inherited = environment_of(args.device, threads=1)  # tiny models; the benchmark gives its contestants all cores
    return inherited | {
        "PYTHONPATH": os.pathsep.join([inherited["PYTHONPATH"], str(GPU_TESTS)]),
        FILE_VARIABLE: str(tests),
        DEVICE_VARIABLE: args.device,
        KEEP_VARIABLE: str(args.out.resolve()) if args.out else "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # whatever else is installed there
    }


def _torch_facts() -> dict:
    words = [sys.executable, str(Path(__file__).with_name("torch_facts.py"))]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=SECONDS_TO_LOOK)
    try:
        return json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"torch": None, "why": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def _objection(found: dict, device: str) -> str | None:
    """Why nothing can be checked here, in one line."""
    if found["torch"] is None:
        why = f" ({found['why']})" if "why" in found else ""
        return f"{sys.executable}: cannot import torch{why}; start this with the Python that has it"
    if device == "cuda" and found["device"] is None:
        return (
            f"torch {found['torch']} finds no CUDA device here; run this on a machine with a GPU, or rehearse it with "
            "--device cpu"
        )
    return None


def _headline(found: dict, args) -> str:
    where = found["device"] if args.device == "cuda" else "CPU, a rehearsal"
    return f"{where}, torch {found['torch']}; at most {args.minutes:g} minutes"
