"""What tests that can also be rehearsed on a CPU ask: where to run, and where to leave what is worth keeping."""

import gzip
import os
import shutil
from pathlib import Path

import torch

from gpu_checks.agreed import DEVICE_VARIABLE, KEEP_VARIABLE, MAX_BYTES


def checked_device() -> str | None:
    """cuda, cpu where that was asked for, or None: there is nothing to run on."""
    if torch.cuda.is_available():
        return "cuda"
    return "cpu" if os.environ.get(DEVICE_VARIABLE) == "cpu" else None


def keep(path: Path, name: str):
    """Leave a compressed copy in the folder of --out, if there is one and the file is not too large for it."""
    folder = os.environ.get(KEEP_VARIABLE)
    if not folder:
        return
    target = Path(folder) / f"{name}.gz"
    with path.open("rb") as source, gzip.open(target, "wb") as copy:
        shutil.copyfileobj(source, copy)
    if target.stat().st_size > MAX_BYTES:
        target.unlink()
