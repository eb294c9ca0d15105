"""Starts the ranks of a command on this machine, and waits for them."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megatron_lite.local_ranks import describe_local_rank, find_free_port

WAIT_FOR_RANKS_S = 0.05
TIMEOUT_S = 600.0
GRACE_S = 10.0


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


@dataclass(frozen=True)
class EndedRank:
    """How a rank ended.

    Attributes:
        code: Its exit code; None: it was still running when the time was over.
        last_line: Of what it printed.
    """

    code: int | None
    last_line: str


def run_ranks(
    script: Sequence[str], ranks: int, environment: Mapping[str, str], limits: RunLimits, show: bool
) -> list[EndedRank]:
    """Run all ranks of a command to their end.

    Args:
        script: The words behind the interpreter.
        ranks: How many there are.
        environment: Variables of all of them.
        limits: How long they may take.
        show: Show what they print.
    """
    words = [sys.executable, *script]
    port = find_free_port()
    with tempfile.TemporaryDirectory() as name:
        said = [(Path(name) / f"rank{rank}.txt").open("w+", errors="replace") for rank in range(ranks)]
        started = []
        for rank, file in enumerate(said):
            own = describe_local_rank(rank, ranks, port)
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
        ended = [EndedRank(code, _read_last_line(file)) for code, file in zip(codes, said, strict=True)]
        for file in said:
            file.close()
    return ended


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


def _read_last_line(said: IO[str]) -> str:
    """Read a rank's last words."""
    said.seek(0)
    lines = [line for line in said.read().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
