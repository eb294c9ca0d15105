"""What the kernel says of a process on this machine, and a limit that it sets. Linux; elsewhere nothing is known."""

import contextlib
import os
import socket
from pathlib import Path

PROC = Path("/proc")


def process_state(pid: int) -> str | None:
    """dead, stopped, running, or None where the kernel does not tell."""
    if not (PROC / "self" / "stat").exists():
        return None
    try:
        letter = _fields(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    except OSError:
        return None
    return {"Z": "dead", "X": "dead", "T": "stopped", "t": "stopped"}.get(letter, "running")


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat from the third on: those after the name, which may hold anything. OSError without one."""
    return (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def identity() -> dict:
    """This process for whoever asks later, by `is_there`: host, space of ids, id, and clock ticks from boot to its start."""
    return {"host": socket.gethostname(), "pids": pid_space(), "pid": os.getpid(), "started_ticks": _started(os.getpid())}


def is_there(process: dict) -> bool | None:
    """Does the process of that `identity` exist; None where this machine cannot know, being another one, say."""
    pid = process.get("pid")
    if not isinstance(pid, int) or process.get("pids") is None or process.get("started_ticks") is None:
        return None
    if (process.get("host"), process["pids"]) != (socket.gethostname(), pid_space()):
        return None
    state = process_state(pid)
    if state in (None, "dead"):
        return None if state is None else False
    return _started(pid) == process["started_ticks"]  # else its id was given to another one


def _started(pid: int) -> int | None:
    try:
        return int(_fields(pid)[19])
    except (OSError, ValueError, IndexError):
        return None


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


@contextlib.contextmanager
def limit_memory(file_bytes: int, per_byte: int = 4):
    """MemoryError, or torch's RuntimeError, where reading a file of that size takes more than `per_byte` times as much.

    A few bytes of a hostile file can ask for many gigabytes. The kernel limits the process as a whole: its room for
    anything else is 512 MiB, and what starting a thread on each core reserves. Nothing is limited outside of Linux.
    """
    try:
        import resource  # Unix only

        now = int((PROC / "self" / "statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    wanted = now + per_byte * file_bytes + 2**29 + 2**27 * (os.cpu_count() or 1)
    before = resource.getrlimit(resource.RLIMIT_AS)
    tighter = wanted if before[0] == resource.RLIM_INFINITY else min(wanted, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (tighter, before[1]))
    try:
        yield
    except MemoryError:
        raise MemoryError("it asks for far more memory than its size explains") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
