"""Starts the ranks of a training script on this machine, each of which records what it computes."""

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megatron_lite.cli.rank_processes import EndedRank, RunLimits, run_ranks
from megatron_lite.cli.ranked_commands import RankedCommand
from megatron_lite.errors import UserError
from megatron_lite.formats.prove_record import RANK_FILE, Feed, ProveRecord, ProveRequest
from megatron_lite.variables import BOOTSTRAP, PROVE_REQUEST, THREADS, prepend_python_path

TRAINER = ("-m", "megatron_lite")  # the words that start the trainer of this package
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
    ended = run_ranks(command.script, command.ranks, environment, limits, show)
    _check_records(command, folder, ended, limits)


def _check_records(command: RankedCommand, folder: Path, ended: Sequence[EndedRank], limits: RunLimits) -> None:
    """Refuse a run of which a rank left no whole record.

    Args:
        command: The script.
        folder: Folder of the records.
        ended: How each rank ended.
        limits: How far it was to go.

    Raises:
        UserError: A rank failed, or had not done.
    """
    codes = [end.code for end in ended]
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
    why = failures[first] or ended[first].last_line
    raise UserError(f"{command}: rank {first} ended with exit code {codes[first]}: {why}")


def _read_failure(folder: Path, rank: int) -> str | None:
    """Read why a rank has no whole record; "": it has one, None: it wrote nothing."""
    path = folder / RANK_FILE.format(rank)
    if not path.exists():
        return None
    return msgspec.json.decode(path.read_bytes(), type=ProveRecord).failure
