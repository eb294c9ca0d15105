"""Names and formats of all that a run writes: written by the trainer, read by the analysis. No torch here."""

import json
import os
import time
from pathlib import Path

RUN_FILE = "run.json"
STEPS_FILE = "steps.jsonl"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
RUN_SCHEMA = 1


def default_run_dir(run_dir: str | None, tensorboard_dir: str | None, save: str | None) -> Path:
    """Where a run describes itself: --run-dir, else --tensorboard-dir, else --save, else runs/TIME."""
    return Path(run_dir or tensorboard_dir or save or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")


def checkpoint_dir(save: Path, iteration: int) -> Path:
    """SAVE/iter_0000010, as Megatron names it."""
    return save / f"iter_{iteration:07d}"


def checkpoint_file(folder: Path) -> Path:
    """The one file of a checkpoint folder, under Megatron's name for rank 0 of tensor and pipeline."""
    return folder / "mp_rank_00" / "model_optim_rng.pt"


def read_tracker(save: Path) -> int | None:
    """The iteration of the newest complete checkpoint, or None. Raises ValueError for a file that holds no number."""
    try:
        text = (save / TRACKER_FILE).read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return int(text)


def write_atomically(path: Path, text: str):
    """All of `text` or the old file: never a half-written one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_folder(folder: Path):
    """Make names that were created or renamed in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_run(folder: Path, record: dict):
    """Replace RUN/run.json."""
    write_atomically(folder / RUN_FILE, json.dumps({"schema": RUN_SCHEMA, **record}, indent=1, default=str) + "\n")


def keep_previous_run(folder: Path):
    """Move an earlier start's run.json aside, to run-TIME.json, so that a resumed run does not erase its past."""
    old = folder / RUN_FILE
    if old.exists():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(old.stat().st_mtime))
        os.replace(old, folder / f"run-{stamp}.json")
