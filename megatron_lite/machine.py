"""Resources that this machine, or its container, grants to a process: cores, memory, shared memory, open files."""

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

SHARED_MEMORY = "/dev/shm"
CONTROL_GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
PROCESSORS = Path("/proc/cpuinfo")
UNLIMITED = 2**60  # bytes: version 1 of control groups writes a number near 2**63 where there is no limit


@dataclass(frozen=True)
class Machine:
    """Limits of this machine; None: unknown."""

    cores: int  # that this process may keep busy at the same time
    visible_cores: int  # that it sees; a container may see all of its host and be granted the time of a few
    memory_bytes: int | None  # the machine's, or what the container is granted
    shm_bytes: int | None  # the whole of /dev/shm
    open_files: int | None  # most that one process may have
    has_nsys: bool  # Nsight Systems is on the PATH


def read_machine() -> Machine:
    """The machine that this process runs on."""
    visible = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        memory = None
    quota, limit = read_limits(CONTROL_GROUPS, MEMBERSHIP)
    return Machine(
        cores=max(1, min(visible, round(quota))) if quota else visible,
        visible_cores=visible,
        memory_bytes=min(filter(None, (memory, limit)), default=None),
        shm_bytes=shutil.disk_usage(SHARED_MEMORY).total if os.path.isdir(SHARED_MEMORY) else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else None,
        has_nsys=shutil.which("nsys") is not None,
    )


@cache
def read_processor() -> Mapping[str, str]:
    """Read what Linux tells of this machine's first processor, by field of /proc/cpuinfo; {} where nothing tells."""
    first, _, _ = _read(PROCESSORS).partition("\n\n")
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def count_gpu_files() -> int:
    """GPUs that have a file in /dev, found without torch; 1 where a driver shows all of them as one file."""
    files = list(Path("/dev").glob("nvidia[0-9]*"))
    if files:
        return len(files)
    return int(os.path.exists("/dev/kfd") or os.path.exists("/dev/dxg"))


def find_missing_compiler(on_gpu: bool, environ: Mapping[str, str]) -> str:
    """Find what torch.compile's inductor needs and this machine lacks, with the remedy; empty where nothing is lacking.

    A CPU takes a C++ compiler, a GPU Triton and a C compiler for what launches its kernels; either takes
    Python's headers.
    """
    if on_gpu and find_spec("triton") is None:
        return "Triton is not installed, which compiles kernels for GPUs; pip install triton"
    variable, language, names = ("CC", "C", ("gcc", "clang")) if on_gpu else ("CXX", "C++", ("g++",))
    chosen = environ.get(variable)
    if not any(map(shutil.which, (chosen,) if chosen else names)):
        return (
            f"there is no {language} compiler ({chosen or ' or '.join(names)}) on the PATH; install one, "
            f"or name one in the variable {variable}"
        )
    own = sysconfig.get_path("include", scheme="posix_prefix")  # where inductor and Triton look
    folders = (own, *filter(None, environ.get("CPATH", "").split(":")))
    # Linux distributions ship Python without the headers that compiled kernels are built with; others do not
    if sys.platform != "linux" or any((Path(folder) / "Python.h").exists() for folder in folders):
        return ""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"Python's headers are missing ({own}/Python.h); install them (on Debian and Ubuntu the package "
        f"python{version}-dev), or name their folder in the variable CPATH"
    )


def read_limits(root: Path, membership: Path) -> tuple[float | None, int | None]:
    """Read the cores and bytes that control groups grant: the least of this process's group and all around it.

    Args:
        root: Where control groups are mounted.
        membership: The file that says in which group the process is.

    Returns:
        Cores and bytes; None for no limit.
    """
    of_version_2 = re.search(r"^0::(.*)$", _read(membership), re.MULTILINE)
    path = of_version_2[1] if of_version_2 else ""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    groups = [root / "/".join(parts[:number]) for number in range(len(parts) + 1)]
    quotas = [_read(group / "cpu.max") for group in groups]  # '200000 100000', 'max 100000'
    quotas.append(f"{_read(root / 'cpu/cpu.cfs_quota_us')} {_read(root / 'cpu/cpu.cfs_period_us')}")
    pairs = [[int(word) for word in quota.split() if word.isdigit()] for quota in quotas]
    cores = [pair[0] / pair[1] for pair in pairs if len(pair) == 2 and all(pair)]
    limits = [_read(group / "memory.max") for group in groups]
    limits.append(_read(root / "memory/memory.limit_in_bytes"))
    granted = [int(limit) for limit in limits if limit.strip().isdigit()]
    limited = [limit for limit in granted if 0 < limit < UNLIMITED]
    return min(cores, default=None), min(limited, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
