"""State of a process as the kernel tells it, and settings of its memory. Linux; elsewhere nothing is known."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import TypedDict

PROC = Path("/proc")
RANK_VARIABLES = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "LOCAL_RANK")  # torchrun gives them to each rank
# letters of processes that have ended: one that nobody has waited for, and one that is going away
ENDED = ("Z", "X")
# glibc's malloc.h
M_MXFAST = 1
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4
KEEP_BYTES = 2**31 - 1
GROW_BY_BYTES = 64 * 2**20


def process_state(pid: int) -> str | None:
    """Find whether a process is dead, stopped or running; None where the kernel does not tell."""
    if not (PROC / "self" / "stat").exists():
        return None
    try:
        letter = _fields(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return "dead"
    except OSError:
        return None
    if letter in ENDED:
        return "dead"
    return {"T": "stopped", "t": "stopped"}.get(letter, "running")


def _fields(pid: int) -> list[str]:
    """Read the fields of /proc/PID/stat behind the name, which may hold anything. OSError without such a process."""
    return (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def read_exit_code(pid: int) -> int | None:
    """Read the exit code of a process that has ended and that nobody has waited for yet; None where it is not told.

    Negative for a signal. The kernel says 0, too, to who may not know.
    """
    try:
        letter, *others = _fields(pid)
        if letter not in ENDED:
            return None
        return os.waitstatus_to_exitcode(int(others[48]))
    except (OSError, ValueError, IndexError):
        return None


class ProcessIdentity(TypedDict):
    """All that tells a process from others, also from later ones with its id."""

    host: str
    pids: str | None  # the space of process ids; None where the kernel does not tell
    pid: int
    started_ticks: int | None  # clock ticks from boot to its start


def identity(pid: int | None = None) -> ProcessIdentity:
    """Identify this process, or another one here, for whoever asks later, by `is_there`."""
    pid = os.getpid() if pid is None else pid
    try:
        started = int(_fields(pid)[19])
    except (OSError, ValueError, IndexError):
        started = None
    return {"host": socket.gethostname(), "pids": pid_space(), "pid": pid, "started_ticks": started}


def find_launcher(environ: Mapping[str, str]) -> ProcessIdentity | None:
    """The `identity` of torchrun's agent above this rank; None if torchrun did not start it, or is gone already.

    The agent is the nearest ancestor without this rank's variables: wrappers between them, shells or profilers, have
    them. An ancestor that is no Python is whoever adopted an orphan.
    """
    mine = {name: environ.get(name) for name in RANK_VARIABLES}
    if mine["TORCHELASTIC_RUN_ID"] is None:
        return None
    pid = os.getpid()
    try:
        while (pid := int(_fields(pid)[1])) > 1:
            words = (PROC / str(pid) / "environ").read_text(encoding="utf-8", errors="replace").split("\0")
            theirs = dict(word.partition("=")[::2] for word in words)
            if {name: theirs.get(name) for name in mine} != mine:
                return identity(pid) if "python" in os.path.basename(os.readlink(PROC / str(pid) / "exe")) else None
    except (OSError, ValueError, IndexError):
        return None
    return None


def is_there(process: Mapping[str, object]) -> bool | None:
    """Tell whether a process exists; None where this machine cannot know, being another one, say.

    Args:
        process: What `identity` gave for the process, as it may have been read from a file.
    """
    pid = process.get("pid")
    if not isinstance(pid, int) or process.get("pids") is None or process.get("started_ticks") is None:
        return None
    now = identity(pid)
    state = process_state(pid)
    is_here = process.get("host") == now["host"] and process.get("pids") == now["pids"]
    if state is None or not is_here:
        return None
    return state != "dead" and now == process  # else its id was given to another one


def pid_space() -> str | None:
    """Names the set of processes that this one's ids belong to: the kernel's PID namespace."""
    try:
        return os.readlink(PROC / "self" / "ns" / "pid")
    except OSError:
        return None


def read_peak_bytes() -> int | None:
    """The most memory that this process has held; None where the system counts in units of its own."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * peak if sys.platform == "linux" else None


class CoreTime:
    """Share of the machine's cores that the calling thread and its process got, cheap enough to read in every step.

    Values count from the process' start; None where the system does not tell.
    """

    def __init__(self) -> None:
        self._schedstat: int | None
        try:
            self._schedstat = os.open(PROC / "thread-self" / "schedstat", os.O_RDONLY)
        except OSError:
            self._schedstat = None

    def read(self) -> tuple[float, int, float | None]:
        """Read how the process and this thread were served.

        Returns:
            CPU seconds of all threads, their involuntary context switches, and seconds for which the thread that made
            this object was ready to run and had no core.
        """
        used = resource.getrusage(resource.RUSAGE_SELF)
        waited = None if self._schedstat is None else int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9
        return used.ru_utime + used.ru_stime, used.ru_nivcsw, waited

    def close(self) -> None:
        if self._schedstat is not None:
            os.close(self._schedstat)
            self._schedstat = None


def memory_kills() -> int | None:
    """How many processes the kernel has killed since boot for want of memory on this machine."""
    try:
        lines = (PROC / "vmstat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


@contextlib.contextmanager
def limit_memory(file_bytes: int, per_byte: int = 4) -> Iterator[None]:
    """MemoryError, or torch's RuntimeError, where reading a file of that size takes more than `per_byte` times as much.

    A few bytes of a hostile file can ask for many gigabytes. The kernel limits the process as a whole: its room for
    anything else is 512 MiB, and what starting a thread on each core reserves. Nothing is limited outside of Linux.
    """
    try:
        now = int((PROC / "self" / "statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    except OSError:
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


def keep_freed_memory() -> bool:
    """Have glibc reuse freed memory inside the process; costs resident memory. False where the C library is another.

    By default it gives every large block back to the kernel and faults it in again, page by page, at the next
    allocation: training on a CPU then spends a large part of each step in page faults.
    """
    try:
        if not (sys.platform.startswith("linux") and os.confstr("CS_GNU_LIBC_VERSION")):
            return False
    except (OSError, ValueError):  # musl does not know the name
        return False
    libc = ctypes.CDLL(None)
    # M_MXFAST: small blocks that wait to be used again would not be merged with large neighbors
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, KEEP_BYTES), (M_TOP_PAD, GROW_BY_BYTES), (M_MXFAST, 0))
    return all(libc.mallopt(name, value) for name, value in settings)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C inside is a KeyboardInterrupt outside: torch makes a failed rank or a full disk of it, or drops it."""
    before = signal.getsignal(signal.SIGINT)
    interrupts = []
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            raise KeyboardInterrupt
