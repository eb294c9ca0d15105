"""Whether the ranks of a run see the same files under --save and --load, which lie on a network's storage or on one
node's disk.

Clients of a network file system may show new files late, since they keep what they knew of a folder for a while (NFS:
up to 60 s): a file counts as missing only after several looks.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.checkpoint import folder
from megatron_lite.checkpoint.folder import CheckpointDir
from megatron_lite.errors import CheckpointError
from megatron_lite.run_folder import MANIFEST_FILE

PAUSES_S = (0.2, 0.5, 1, 2, 4, 8, 15)  # between looks for files that others see or wrote
MAX_NAMED = 4  # ranks, or files of one, that a message names


@dataclass(frozen=True)
class View:
    """What one rank sees of files that all ranks should see."""

    rank: int
    place: str  # its host and folder
    lacking: tuple[str, ...]  # names of files that it does not see


@dataclass(frozen=True)
class Written:
    """What one rank wrote of a checkpoint."""

    files: dict[str, dict]  # the manifest's entries
    place: str  # host and folder


class UnseenFilesError(CheckpointError):
    """Files that ranks wrote are not in the folder that the first rank sees."""

    def __init__(self, text: str, ranks: tuple[int, ...]):
        self.ranks = ranks
        super().__init__(text)


def describe_place(path: Path) -> str:
    """'HOST:/absolute/path'. The same words on several ranks name one file only where the host is the same."""
    return f"{socket.gethostname()}:{os.path.abspath(path)}"


def list_unseen(path: Path, sizes: dict[str, int]) -> list[str]:
    """Names of the files below `path` that are not there, or are shorter than what was written, after several looks."""
    for pause in (*PAUSES_S, None):
        unseen = [name for name, size in sizes.items() if _size_of(path / name) != size]
        if not unseen or pause is None:
            break
        time.sleep(pause)
        refresh(path)
    return unseen


def require_seen(slot: CheckpointDir, parts: list[Written]):
    """Raise UnseenFilesError unless this rank, the first, sees what all ranks wrote: --save may be a disk that each
    node has of its own.

    parts: what each rank wrote, by rank.
    """
    sizes = {name: entry["bytes"] for part in parts for name, entry in part.files.items()}
    unseen = set(list_unseen(slot.unfinished, sizes))
    lost = {rank: sorted(unseen & set(part.files)) for rank, part in enumerate(parts) if unseen & set(part.files)}
    if not lost:
        return
    shown = list(lost.items())[:MAX_NAMED]
    named = [f"{name_some(names)} of rank {rank} ({parts[rank].place})" for rank, names in shown]
    more = len(lost) - len(named)
    rest = f" and the files of {more} more ranks" if more > 0 else ""
    raise UnseenFilesError(
        f"--save {slot.save}: {slot.name} is not saved, as rank 0 ({parts[0].place}) does not see "
        f"{', '.join(named)}{rest}; --save must be a folder on storage that all nodes share. Earlier checkpoints are "
        "untouched.",
        tuple(lost),
    )


def refresh(path: Path, *, ours: bool = True):
    """Make a client of a network file system ask its server what the folder holds. ours: the folder may be changed."""
    # setting the time of a folder brings its new attributes, and with them the end of what was remembered of it
    with contextlib.suppress(OSError):
        if ours:
            os.utime(path)
        os.listdir(path)


def list_lacking(path: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` below `path` that this process does not see."""
    return tuple(name for name in names if _size_of(path / name) is None)


def list_files(path: Path) -> list[str]:
    """Names of the files that a checkpoint consists of: its manifest's; all there are in a folder without one."""
    try:
        names = list(folder.read_manifest(path))
    except ValueError:
        names = []
    if names:
        return [MANIFEST_FILE, *names]
    return [str(file.relative_to(path)) for file in sorted(path.rglob("*")) if file.is_file()]


def compare_views(look: Callable[[], list[View]]) -> list[View]:
    """The views of ranks that lack what another one sees, after several looks; empty if all see the same.

    look(): all ranks' views, the same on every rank.
    """
    for pause in (*PAUSES_S, None):
        views = look()
        if len({view.lacking for view in views}) == 1:
            return []
        if pause is not None:
            time.sleep(pause)
    return [view for view in views if view.lacking]


def describe_views(views: list[View]) -> str:
    """'rank 1 (HOST:/PATH) lacks a and b; rank 2 (...) lacks a, b, c, d and 3 more'."""
    named = [f"rank {view.rank} ({view.place}) lacks {name_some(view.lacking)}" for view in views[:MAX_NAMED]]
    more = len(views) - len(named)
    return "; ".join(named) + (f"; {more} more ranks lack files" if more > 0 else "")


def name_some(names: Iterable[str]) -> str:
    """'a, b' of few names, 'a, b, c, d and 7 more' of many."""
    listed = list(names)
    more = f" and {len(listed) - MAX_NAMED} more" if len(listed) > MAX_NAMED else ""
    return ", ".join(listed[:MAX_NAMED]) + more


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
