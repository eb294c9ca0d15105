"""Traces and memory snapshots that a run wrote outside its folder, by the flags in its run.json."""

import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from megatron_lite.analysis.source_files import time_in_name
from megatron_lite.run_folder import RUN_FILE


def artefacts_of(run_folder: Path) -> list[Path]:
    """Files in the run's --tensorboard-dir and beside its --memory-snapshot-path that were written while it ran."""
    try:
        record = json.loads((run_folder / RUN_FILE).read_bytes())
        started, ended = _seconds(record["started"]), _seconds(record.get("ended"))
        args = record["plan"]["args"]
        tensorboard, snapshot = args["watch"]["tensorboard_dir"], args["profile"]["memory_snapshot_path"]
        recorded = args["profile"]["record_memory_history"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # reading the run itself says what is wrong with it
    found = [path for folder in _places(tensorboard, run_folder) for path in folder.glob("*.pt.trace.json*")]
    if recorded and isinstance(snapshot, str):
        name = Path(snapshot)
        found += [
            path
            for folder in _places(str(name.parent), run_folder)
            for path in folder.glob(f"{name.stem}*{name.suffix}")
        ]
    return sorted({path for path in found if _is_of(path, started, ended)})


def _seconds(text: str | None) -> float:
    """Since 1970; endless for a run that has not ended."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp() if text else math.inf


def _is_of(path: Path, started: float, ended: float) -> bool:
    """Other runs may write to the same folder. A copy may make a file younger, but leaves the time in its name."""
    if time_ns := time_in_name(path.name):
        return started - 1 <= time_ns / 1e9 <= ended + 1
    return path.stat().st_mtime >= started - 1


def _places(written: str | None, run_folder: Path) -> Iterator[Path]:
    """Folders that the text of a flag may mean: the run was perhaps started elsewhere."""
    if isinstance(written, str) and "\0" not in written:
        for place in dict.fromkeys((Path(written), run_folder / written, run_folder.parent / written)):
            if place.is_dir():
                yield place
