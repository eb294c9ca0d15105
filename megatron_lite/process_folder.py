"""Where a process without a rank writes: several that train at once do not write over each other."""

import fcntl
import json
import os
from pathlib import Path

from megatron_lite.process_state import identity, is_there
from megatron_lite.run_folder import PROCESS_FOLDER

CLAIM_FILE = ".process"  # who writes to the folder itself


def choose_process_folder(folder: Path) -> Path:
    """`folder` for the first process, and for one whose predecessor is gone;
    a folder in it for each that trains beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        # two processes may come at the same moment
        with open(folder / CLAIM_FILE, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            owner = _read_owner(file.read())
            if owner not in (None, identity()) and is_there(owner) is not False:
                return folder / f"{PROCESS_FOLDER}{os.getpid()}"
            file.truncate(0)
            file.write(json.dumps(identity()).encode())
    except OSError:  # a file system without locks
        return folder
    return folder


def release_process_folder(folder: Path) -> None:
    """Forget who writes to the folder."""
    (folder / CLAIM_FILE).unlink(missing_ok=True)


def _read_owner(text: bytes) -> dict[str, object] | None:
    try:
        owner = json.loads(text)
    except ValueError:
        return None
    return owner if isinstance(owner, dict) else None
