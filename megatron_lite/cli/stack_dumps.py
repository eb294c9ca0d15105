"""Stacks of other processes, by py-spy: it needs nothing of them, not even that they still run Python."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_lite.last_words import PYSPY_STACKS, replace_file, stacks_path

MAX_DUMP_S = 30.0
# the second does not stop the process while it reads, for where stopping is not allowed
WAYS: tuple[tuple[str, ...], ...] = ((), ("--nonblocking",))


def find_py_spy() -> str | None:
    """Find py-spy beside this Python or on PATH; None where it is not installed."""
    beside = shutil.which("py-spy", path=os.path.dirname(sys.executable))
    return beside or shutil.which("py-spy")


def dump_stacks(folder: Path, processes: Mapping[str, int]) -> bool:
    """Write the stacks of processes, all at the same time, as far as py-spy may read them.

    Args:
        folder: Folder of the recording.
        processes: Numbers of processes, by the names of their ranks in names of files.

    Returns:
        Whether stacks of all of them were written.
    """
    program = find_py_spy()
    if program is None:
        return False
    missing = dict(processes)
    for way in WAYS:
        missing = _dump_once([program, "dump", "--json", *way], folder, missing)
    return not missing


def _dump_once(command: list[str], folder: Path, processes: Mapping[str, int]) -> dict[str, int]:
    """Write the stacks of processes, and return those whose were not written. Arguments as of `dump_stacks`."""
    failed = {}
    started = {}
    for name, pid in processes.items():
        with contextlib.suppress(OSError):
            words = [*command, "--pid", str(pid)]
            started[name] = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    for name, pid in processes.items():
        stacks = _read_output(started[name]) if name in started else b""
        if not stacks:
            failed[name] = pid
            continue
        path = stacks_path(folder, name, PYSPY_STACKS)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, stacks)
    return failed


def _read_output(process: "subprocess.Popen[bytes]") -> bytes:
    """Read what a process prints; nothing where it fails or takes too long."""
    try:
        printed, _ = process.communicate(timeout=MAX_DUMP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return b""
    return printed if process.returncode == 0 else b""
