"""One contestant's processes, watched from outside: when its steps end, and how much memory its ranks take."""

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.training.contestants import REPO

STEP_LINE = re.compile(r"(?:^|\s)(?:iteration|step) +(\d+) */")  # of ours and of the yardsticks
# ours and Python's; not torchrun's, which only says that a rank failed
ERROR_LINE = re.compile(r"(\[?rank ?\d+\]?: ?)?(error:|(?!torch\.distributed\.elastic)[\w.]*(Error|Exception)\b)")
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_BETWEEN_SAMPLES = 5
SECONDS_TO_END = 40  # torchrun gives its ranks 30


@dataclass
class Watched:
    """What was seen of a run."""

    exit_code: int | None  # None: ended because its time was up
    seconds: float
    output: list[str]
    seen: dict[int, float] = field(default_factory=dict)  # step: seconds from launch until its line
    peak_bytes: int | None = None  # most resident memory of each rank, summed over ranks; None where it cannot be read
    samples: list[dict] = field(default_factory=list)  # of the machine, while it ran

    @property
    def last_words(self) -> str:
        """The line that most likely says why it failed."""
        lines = [line.strip() for line in self.output if line.strip()]
        return ([line for line in lines if ERROR_LINE.match(line)] or lines or ["it said nothing"])[-1]


def watch(command: list[str], environment: dict[str, str], ranks: int, limit_s: float, sample=None) -> Watched:
    """Run it to its end, or for `limit_s` seconds; `sample()` describes the machine every few seconds meanwhile."""
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=REPO,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    run = Watched(None, 0.0, [])
    reader = threading.Thread(target=_read, args=(process.stdout, run, started), daemon=True)
    reader.start()
    peaks: dict[int, int] = {}
    try:
        while process.poll() is None and time.monotonic() - started < limit_s:
            _look(peaks, process.pid, ranks)
            if sample and time.monotonic() - started > SECONDS_BETWEEN_SAMPLES * (len(run.samples) + 1):
                run.samples.append(sample())
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_BETWEEN_LOOKS)
        run.exit_code = process.returncode
    finally:
        _end(process)
    run.seconds = time.monotonic() - started
    reader.join(timeout=5)
    run.peak_bytes = sum(peaks.values()) or None
    return run


def environment_of(device: str, threads: int) -> dict[str, str]:
    """This one's, without what a launcher may have set; the same threads for every rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        kept.pop(name, None)
    paths = [str(REPO), *filter(None, [kept.get("PYTHONPATH")])]
    kept |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return kept if device == "cuda" else kept | {"CUDA_VISIBLE_DEVICES": ""}


def _end(process: subprocess.Popen):
    """torchrun ends its ranks, which have sessions of their own, when it is asked to; not when it is killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(lines, run: Watched, started: float):
    for line in lines:
        now = time.monotonic() - started
        run.output.append(line.rstrip("\n"))
        if found := STEP_LINE.search(line):
            run.seen.setdefault(int(found[1]), now)


def _look(peaks: dict[int, int], pid: int, ranks: int):
    for rank in [pid] if ranks == 1 else _children(pid):
        with contextlib.suppress(OSError, StopIteration):
            status = Path(f"/proc/{rank}/status").read_text(encoding="ascii", errors="replace")
            line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
            peaks[rank] = 1024 * int(line.split()[1])


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []
