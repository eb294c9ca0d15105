"""Last words of ranks under `megatron-lite watch`: their files, and when a rank bears a closer look. No torch."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from megatron_lite.formats.failure_record import RankAtFailure, encode_last_words
from megatron_lite.formats.file_names import FLIGHT_RECORDINGS, LAST_WORDS, STACKS
from megatron_lite.shared_files import read_bounded

BEATS_APART_S = 1.0
# a step is late that takes so many times the usual
LATE_FACTOR = 10
# shorter ones are never late: what is taken of a late step would cost a part of it
MIN_LATE_STEP_S = 5.0
# a rank whose steps are not known is late that shows no sign for so long
LATE_WITHOUT_STEPS_S = 60.0
# a step that stays late is looked at again after this many times as long
LOOK_AGAIN_FACTOR = 2.0
MAX_LAST_WORDS_BYTES = 2**18
PYSPY_STACKS = ".json"
FAULT_STACKS = ".txt"


def name_rank(rank: int | None, pid: int) -> str:
    """Name a rank in names of files.

    Args:
        rank: Number among all ranks; None where it has none, or does not know it yet.
        pid: Number of its process.
    """
    return f"pid-{pid}" if rank is None else str(rank)


def words_path(folder: Path, name: str) -> Path:
    """The file of last words. folder, name: that of the recording, and what `name_rank` gives."""
    return folder / f"{LAST_WORDS}{name}.json"


def flight_path(folder: Path, name: str) -> Path:
    """The file of the flight recorder's dump, which torch names alike. Arguments as of `words_path`."""
    return folder / f"{FLIGHT_RECORDINGS}{name}"


def stacks_path(folder: Path, name: str, ending: str) -> Path:
    """The file of a rank's stacks.

    Args:
        folder: Folder of the recording.
        name: What `name_rank` gives.
        ending: PYSPY_STACKS or FAULT_STACKS, by who writes them.
    """
    return folder / f"{STACKS}{name}{ending}"


def write_words(path: Path, record: RankAtFailure) -> None:
    """Replace a rank's last words. Not synced to the disk: this happens every second."""
    replace_file(path, encode_last_words(record).encode(errors="backslashreplace"))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that readers see whole, before or after. path, content: the file, and all its bytes."""
    # ranks of several processes write beside each other
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def read_words(folder: Path) -> Iterator[tuple[str, RankAtFailure]]:
    """Each rank's last words in a folder, by what `name_rank` gave; what cannot be read is left out."""
    for path in sorted(folder.glob(f"{LAST_WORDS}*.json")):
        try:
            values = json.loads(read_bounded(path, MAX_LAST_WORDS_BYTES))
            record = msgspec.convert(values, RankAtFailure)
        except (OSError, ValueError, RecursionError):
            continue
        yield path.stem.removeprefix(LAST_WORDS), record


def is_late(status: RankAtFailure) -> bool:
    """Whether a rank's step takes so much longer than those before that evidence is worth taking."""
    if status.left is not None:
        return False
    if status.usual_step_s is None:
        return status.still_s >= LATE_WITHOUT_STEPS_S
    return status.step_s >= max(LATE_FACTOR * status.usual_step_s, MIN_LATE_STEP_S)


def stands_still(status: RankAtFailure, limit_s: float) -> bool:
    """Whether a rank has shown no sign for longer than any usual step takes.

    Args:
        status: Last words of the rank.
        limit_s: Seconds that are never too long.
    """
    usual_s = status.usual_step_s or 0.0
    return status.left is None and status.still_s >= max(limit_s, LATE_FACTOR * usual_s)


def remove_recordings(folder: Path, names: Iterable[str]) -> None:
    """Remove what was recorded of ranks: by a run before, or by one that ended well.

    Args:
        folder: Folder of the recording; other machines may write into it, too.
        names: Names of the ranks, as `name_rank` gives them.
    """
    for name in names:
        flight = flight_path(folder, name)
        stacks = stacks_path(folder, name, "")
        for path in (words_path(folder, name), flight, *flight.parent.glob(f"*-{flight.name}")):
            path.unlink(missing_ok=True)
        for ending in (PYSPY_STACKS, FAULT_STACKS):
            stacks.with_name(stacks.name + ending).unlink(missing_ok=True)
    for parent in {(folder / place).parent for place in (FLIGHT_RECORDINGS, STACKS)}:
        with contextlib.suppress(OSError):
            # OSError: not there, or not empty
            parent.rmdir()
