"""Where compiled kernels are kept from one run to the next.

torch's own place is a folder in /tmp, which a new container or a restarted machine has lost.
"""

import hashlib
import os
import platform
from collections.abc import MutableMapping
from pathlib import Path

import torch

PLACE = "TORCHINDUCTOR_CACHE_DIR"  # inductor's, and Triton's below it, unless TRITON_CACHE_DIR names another
PROCESSORS = Path("/proc/cpuinfo")


def keep_compiled(environ: MutableMapping[str, str]) -> Path | None:
    """Have inductor keep what it compiles in the user's cache folder, which all ranks of a machine share: it writes whole files.

    Before torch's compiler is imported, which settles on a folder then. None, and all as torch has it, if the user named a folder or none can be written.
    """
    if PLACE in environ:
        return None
    folder = _cache_home(environ) / "megatron_lite" / "compiled" / f"torch-{torch.__version__}-{_processor()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    environ[PLACE] = str(folder)
    return folder


def _cache_home(environ: MutableMapping[str, str]) -> Path:
    """XDG_CACHE_HOME, which counts only if absolute (XDG Base Directory Specification 0.8), else ~/.cache."""
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path(environ.get("HOME", "/nonexistent")) / ".cache"


def _processor() -> str:
    """Eight digits for this kind of processor: C++ is compiled for the very one, under a key that does not name it, and
    machines of a cluster may share a home."""
    try:
        lines = PROCESSORS.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        lines = []
    telling = ("vendor_id", "model name", "flags", "Features", "CPU part")
    kind = sorted({line for line in lines if line.split("\t")[0].strip() in telling}) or [
        platform.machine(),
        platform.processor(),
    ]
    return hashlib.sha256("\n".join(kind).encode()).hexdigest()[:8]
