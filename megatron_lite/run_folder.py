"""Names in folders of runs and checkpoints, and how files there are written. No torch here.

The formats are in formats/.
"""

import os
import time
from pathlib import Path

from megatron_lite.formats.file_names import RUN_FILE
from megatron_lite.formats.run_record import RunRecord, encode_run

PROCESS_FOLDER = "process-"  # and its id: of a watched process without a rank that trained beside the first one
TRACKER_FILE = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # Megatron's name for converted weights, in the tracker and as the folder
MANIFEST_FILE = "manifest.json"  # files of a checkpoint with sizes and checksums
METADATA_FILE = ".metadata"  # where torch.distributed.checkpoint says what is where
RECORD_FILE = "training_state.json"  # the plain values of a checkpoint
ANNOUNCEMENT_FILE = ".committing"  # the checkpoint that is being renamed


def default_run_dir(run_dir: str | None, tensorboard_dir: str | None, save: str | None) -> Path:
    """Choose the folder in which a run describes itself: the first that is given, else runs/TIME.

    Args:
        run_dir: The value of --run-dir.
        tensorboard_dir: The value of --tensorboard-dir.
        save: The value of --save.
    """
    return Path(run_dir or tensorboard_dir or save or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")


def checkpoint_name(iteration: int) -> str:
    """Name the folder of an iteration's checkpoint as Megatron does: iter_0000010."""
    return f"iter_{iteration:07d}"


def iteration_of(name: str) -> int | None:
    """The inverse; None for another name."""
    digits = name.removeprefix("iter_")
    return int(digits) if digits.isdecimal() and checkpoint_name(int(digits)) == name else None


def write_atomically(path: Path, text: str) -> None:
    """All of `text` or the old file: never a half-written one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")  # one name: what a killed process left is replaced
    temporary.unlink(missing_ok=True)  # not opened: in a folder of several people it may be a link, or a pipe
    with open(temporary, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync_folder(folder: Path) -> None:
    """Make names that were created or renamed in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_run(folder: Path, record: RunRecord) -> None:
    """Replace run.json in a run's folder."""
    write_atomically(folder / RUN_FILE, encode_run(record))


def keep_previous_run(folder: Path) -> Path | None:
    """Move an earlier start's run.json aside, to run-TIME.json, so that a resumed run does not erase its past.

    Returns where it is now; None if there was none.
    """
    old = folder / RUN_FILE
    if not old.exists():
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(old.stat().st_mtime))
    kept = folder / f"run-{stamp}.json"
    os.replace(old, kept)
    return kept
