"""One part's process, ended with all that it started when its time is up."""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from gpu_checks.parts import REPO

SECONDS_TO_END = 10  # after being asked to


@dataclass(frozen=True)
class Ended:
    """`code` is None where the time was up."""

    code: int | None
    seconds: float


def run(command: list[str], environment: dict[str, str], limit_s: float, log: Path) -> Ended:
    """Run `command` in the repository for at most `limit_s`, its output into the file `log`."""
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=REPO,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            _end(process)
    return Ended(code, time.monotonic() - started)


def _end(process: subprocess.Popen):
    """Those whom it started may have sessions of their own, and would keep the GPU's memory."""
    family = _descendants(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    for pid in {process.pid, *family, *_descendants(process.pid)}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    """Process ids; none where the system does not say."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text(encoding="ascii").split()):
                found += [child, *_descendants(child)]
    return found
