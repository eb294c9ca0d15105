"""One contestant's processes, watched from outside: when its steps end, and how much memory its ranks take; and the machine.

No torch here: it would hold memory and threads beside the contestants.
"""

import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.training.contestants import REPO
from benchmarks.training.work import Work

STEP_LINE = re.compile(r"(?:^|\s)(?:iteration|step) +(\d+) */|^iter (\d+): ")  # the last is nanoGPT's, from 0
# ours and Python's; not torchrun's, which only says that a rank failed
ERROR_LINE = re.compile(r"(\[?rank ?\d+\]?: ?)?(error:|(?!torch\.distributed\.elastic)[\w.]*(Error|Exception)\b)")
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_BETWEEN_SAMPLES = 5
SECONDS_TO_END = 40  # torchrun gives its ranks 30
CEILING_SECONDS = 2
SECONDS_TO_START = 120
PACKAGES = ("torch", "numpy", "transformers", "accelerate", "megatron_lite")
MATRIX_UNITS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2")  # as Linux names them, those that torch has products for
GPU_FIELDS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


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


def watch(
    command: list[str],
    environment: dict[str, str],
    ranks: int,
    limit_s: float,
    sample: Callable[[], dict] | None = None,
    cwd: Path = REPO,
) -> Watched:
    """Run it to its end, or for `limit_s` seconds; `sample()` describes the machine every few seconds meanwhile."""
    started = time.monotonic()
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    run, peaks = Watched(None, 0.0, []), {}

    def read():
        for line in process.stdout:
            now = time.monotonic() - started
            run.output.append(line.rstrip("\n"))
            if found := STEP_LINE.search(line):
                run.seen.setdefault(int(found[1]) if found[1] else int(found[2]) + 1, now)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while process.poll() is None and time.monotonic() - started < limit_s:
            for rank in [process.pid] if ranks == 1 else children_of(process.pid):
                peaks[rank] = peak_bytes_of(rank) or peaks.get(rank, 0)
            if sample and time.monotonic() - started > SECONDS_BETWEEN_SAMPLES * (len(run.samples) + 1):
                run.samples.append(sample())
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_BETWEEN_LOOKS)
        run.exit_code = process.returncode
    finally:
        # torchrun ends its ranks, which have sessions of their own, when it is asked to; not when it is killed
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_TO_END)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
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


def children_of(pid: int) -> list[int]:
    """Process ids; none where the system does not say."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def peak_bytes_of(pid: int) -> int:
    """Most resident memory that a process had; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        return next((1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)
    return 0


# --- the machine


def gpus() -> list[dict[str, str]]:
    """A row per GPU, as nvidia-smi gives it; empty without one."""
    query = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(query, check=True, capture_output=True, text=True, timeout=20)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
        return [dict(zip(GPU_FIELDS.split(","), row)) for row in rows]
    return []


def machine() -> dict:
    """Hardware and versions, of what can be read."""
    versions = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "cpu": _cpu_field("model name") or platform.processor() or platform.machine(),
        "matrix_units": [unit for unit in MATRIX_UNITS if unit in (_cpu_field("flags") or "").split()],
        "cores": cores(),
        **clocks(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
    }


def clocks() -> dict:
    """How fast cores and GPUs run at this moment, and the load; None or empty where it cannot be read."""
    return {"cpu_mhz": _cpu_field("cpu MHz"), "gpus": gpus(), "load": load()}


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float:
    """Processes that ran or wanted to, averaged over the last minute."""
    return round(os.getloadavg()[0], 2)


def _cpu_field(name: str) -> str | None:
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
    return None


def ceiling_tflops(work: Work, threads: int, seconds: float = CEILING_SECONDS) -> float | None:
    """TFLOP/s of the model's linear maps on the whole CPU, or on one GPU; None where that could not be measured."""
    shape = work.shape
    maps = [
        (shape.hidden_size, shape.qkv_width, shape.num_layers),
        (shape.attention_width, shape.hidden_size, shape.num_layers),
        (shape.hidden_size, shape.fc1_width, shape.num_layers),
        (shape.ffn_hidden_size, shape.hidden_size, shape.num_layers),
        (shape.hidden_size, shape.padded_vocab_size, 1),
    ]
    values = {"device": work.device, "precision": work.precision, "seconds": seconds}
    values["rows"] = work.micro_batch * work.sequence
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    flags += ["--shapes", *("x".join(map(str, one)) for one in maps)]
    command = [sys.executable, "-m", "benchmarks.yardsticks.matrix_products", *flags]
    try:
        done = subprocess.run(
            command, check=True, cwd=REPO, env=environment_of(work.device, threads), capture_output=True, text=True,
            timeout=SECONDS_TO_START,
        )  # fmt: skip
        return float(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
