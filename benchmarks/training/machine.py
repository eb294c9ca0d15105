"""What a measurement was made on. No torch here: it would hold memory and threads beside the contestants."""

import contextlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "numpy", "transformers", "accelerate", "megatron_lite")
GPU_FIELDS = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


def gpus() -> list[dict[str, str]]:
    """A row per GPU, as nvidia-smi gives it; empty without one."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"],
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        )
        return [
            dict(zip(GPU_FIELDS.split(","), (cell.strip() for cell in line.split(","))))
            for line in done.stdout.splitlines()
            if line.strip()
        ]
    return []


def machine() -> dict:
    """Hardware and versions, of what can be read."""
    return {
        "cpu": _cpu_field("model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        **clocks(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
