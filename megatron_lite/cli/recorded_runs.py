"""Starts the ranks of a training script on this machine, each of which records what it computes."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from megatron_lite.cli.ranked_commands import RankedCommand
from megatron_lite.errors import UserError
from megatron_lite.formats.prove_record import RANK_FILE, Feed, ProveRecord, ProveRequest
from megatron_lite.local_ranks import describe_local_rank, find_free_port
from megatron_lite.variables import BOOTSTRAP, PROVE_REQUEST, THREADS, prepend_python_path

TRAINER = ("-m", "megatron_lite")  # the words that start the trainer of this package
WAIT_FOR_RANKS_S = 0.05
TIMEOUT_S = 600.0
GRACE_S = 10.0
IMPORT = re.compile(r"^\s*(from|import) megatron_lite\b", re.MULTILINE)


def runs_trainer(script: Sequence[str]) -> bool:
    """Whether a script is this package's trainer, or imports it.

    Args:
        script: The words behind the interpreter.
    """
    if tuple(script[:2]) == TRAINER:
        return True
    path = Path(script[0])
    return path.is_file() and bool(IMPORT.search(path.read_text(errors="replace")))


@dataclass(frozen=True)
class RunLimits:
    """How far a run goes.

    Attributes:
        steps: That it trains.
        timeout_s: After which its ranks are stopped.
        grace_s: That the other ranks get when one has failed.
    """

    steps: int
    timeout_s: float = TIMEOUT_S
    grace_s: float = GRACE_S


def record_run(
    command: RankedCommand, folder: Path, limits: RunLimits, feed: Feed, perturbation: float, show: bool
) -> None:
    """Run a script until it has trained some steps, and have each rank record them.

    Args:
        command: The script.
        folder: Folder for the records, which is made.
        limits: How far it goes.
        feed: What it takes from another run.
        perturbation: How much its weights are changed, in units of their last place.
        show: Show what it prints.

    Raises:
        UserError: A rank ended without a record, with its last lines, or the run took too long.
    """
    folder.mkdir(parents=True)
    request = ProveRequest(
        is_own_trainer=runs_trainer(command.script),
        folder=str(folder),
        steps=limits.steps,
        feed=feed,
        perturbation=perturbation,
    )
    environment = prepend_python_path({**os.environ, **command.environment}, BOOTSTRAP)
    environment[PROVE_REQUEST] = msgspec.json.encode(request).decode()
    # as torchrun does: ranks do not wait for each other's cores, and sums are made in the same order on any number
    environment.setdefault(THREADS, "1")
    _run_ranks(command, environment, folder, limits, show)


def _run_ranks(
    command: RankedCommand, environment: Mapping[str, str], folder: Path, limits: RunLimits, show: bool
) -> None:
    words = [sys.executable, *command.script]
    port = find_free_port()
    with tempfile.TemporaryDirectory() as name:
        said = [(Path(name) / f"rank{rank}.txt").open("w+", errors="replace") for rank in range(command.ranks)]
        started = []
        for rank, file in enumerate(said):
            own = describe_local_rank(rank, command.ranks, port)
            output = None if show else file
            started.append(
                subprocess.Popen(words, env={**environment, **own}, stdout=output, stderr=output or file, text=True)
            )
        try:
            codes = _wait(started, limits)
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        _check_records(command, folder, codes, limits, said)
        for file in said:
            file.close()


def _check_records(
    command: RankedCommand, folder: Path, codes: Sequence[int | None], limits: RunLimits, said: Sequence[IO[str]]
) -> None:
    """Refuse a run of which a rank left no whole record.

    Args:
        command: The script.
        folder: Folder of the records.
        codes: The ranks' exit codes; None of one that was still running when the time was over.
        limits: How far it was to go.
        said: What each rank printed.

    Raises:
        UserError: A rank failed, or had not done.
    """
    failures = {rank: _read_failure(folder, rank) for rank in range(command.ranks)}
    # libraries may crash when a process ends: a rank whose record is whole has done its work
    lacking = [rank for rank, failure in failures.items() if failure is None or (failure and codes[rank])]
    if not lacking:
        return
    if None in codes:
        ranks = f"rank {lacking[0]}" if len(lacking) == 1 else f"ranks {', '.join(map(str, lacking))}"
        raise UserError(
            f"{command}: {ranks} had not stepped {limits.steps} times after {limits.timeout_s:g} s; "
            "give a longer --timeout, or look for ranks that wait for each other."
        )
    # those that were ended for its sake say nothing of the cause
    first = min(lacking, key=lambda rank: (not failures[rank], codes[rank] in (0, -signal.SIGTERM)))
    why = failures[first] or _read_last_line(said[first])
    raise UserError(f"{command}: rank {first} ended with exit code {codes[first]}: {why}")


def _wait(started: list["subprocess.Popen[str]"], limits: RunLimits) -> Sequence[int | None]:
    """Wait for all ranks; one that fails takes the others with it. Returns their exit codes; None of one that was still
    running when the time was over."""
    deadline = time.monotonic() + limits.timeout_s
    failed_at = None
    while any(process.poll() is None for process in started):
        now = time.monotonic()
        if now > deadline:
            return [process.poll() for process in started]
        if failed_at is None and any(process.poll() for process in started):
            failed_at = now
        if failed_at is not None and now - failed_at > limits.grace_s:
            for process in started:
                process.terminate()
            break
        time.sleep(WAIT_FOR_RANKS_S)
    return [process.wait() for process in started]


def _read_failure(folder: Path, rank: int) -> str | None:
    """Read why a rank has no whole record; "": it has one, None: it wrote nothing."""
    path = folder / RANK_FILE.format(rank)
    if not path.exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=ProveRecord).failure


def _read_last_line(said: IO[str]) -> str:
    """Read a rank's last words."""
    said.seek(0)
    lines = [line for line in said.read().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
