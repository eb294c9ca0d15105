"""What the kernel says of a process on this machine. Linux; elsewhere nothing is known."""

import os
from pathlib import Path

PROC = Path("/proc")


def process_state(pid: int) -> str | None:
    """dead, stopped, running, or None where the kernel does not tell."""
    if not (PROC / "self" / "stat").exists():
        return None
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    except OSError:
        return None
    letter = text.rpartition(")")[2].split()[0]  # after the name, which may hold anything
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(letter, "running")


def pid_space() -> str | None:
    """Names the set of processes that this one's ids belong to: the kernel's PID namespace."""
    try:
        return os.readlink(PROC / "self" / "ns" / "pid")
    except OSError:
        return None


def memory_kills() -> int | None:
    """How many processes the kernel has killed since boot for want of memory on this machine."""
    try:
        lines = (PROC / "vmstat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
