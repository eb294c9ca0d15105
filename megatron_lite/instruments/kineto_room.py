"""Room for what a GPU reports: Kineto keeps 128 MiB of it, about 1.9 million events, and silently drops all that follow.

That is some twenty eager steps of 24 layers, or a single one with many micro-batches.
"""

import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import torch

PLACE = "KINETO_CONFIG"  # names the file that Kineto reads; without it SYSTEM_FILE
SYSTEM_FILE = Path("/etc/libkineto.conf")
KEY, MEGABYTES = "ACTIVITIES_MAX_GPU_BUFFER_SIZE_MB", 2048  # taken piece by piece, as events come


def make_room(environ: MutableMapping[str, str]):
    """To be called before a profiler gets ready. Returns the file, which has to be kept until the profiler is done; None if the user
    named one, or none can be written."""
    if PLACE in environ:
        return None
    try:
        given = SYSTEM_FILE.read_text(encoding="utf-8") if SYSTEM_FILE.exists() else ""
        file = tempfile.NamedTemporaryFile("w", prefix="kineto_", suffix=".conf", encoding="utf-8")
        file.write(given if KEY in given else f"{given}\n{KEY}={MEGABYTES}\n")
        file.flush()
    except (OSError, ValueError):
        return None
    environ[PLACE] = file.name
    return file


def record_is_full() -> bool:
    """Whether Kineto has stopped taking the GPU's events. torch 2.11 does not tell."""
    return getattr(torch.autograd, "_is_kineto_stopped", bool)()
