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
from megatron_lite.checkpoint.folder import CheckpointDir, Manifest
from megatron_lite.errors import CheckpointError
from megatron_lite.run_folder import MANIFEST_FILE

PAUSES_S = (0.2, 0.5, 1, 2, 4, 8, 15)  # between looks for files that others see or wrote
MAX_NAMED_SHARERS = 4  # ranks, or files of one, that a message names


@dataclass(frozen=True)
class StorageView:
    """The view that one rank has of files that all ranks should see."""

    rank: int
    place: str  # its host and folder
    lacking: tuple[str, ...]  # names of files that it does not see


@dataclass(frozen=True)
class WrittenTensors:
    """The files that one rank wrote of a checkpoint."""

    files: Manifest
    place: str  # host and folder


class UnseenFilesError(CheckpointError):
    """Files that ranks wrote are not in the folder that the first rank sees."""

    def __init__(self, text: str, ranks: tuple[int, ...]):
        self.ranks = ranks
        super().__init__(text)


def describe_place(path: Path) -> str:
    """Name a file by its host, as 'HOST:/absolute/path'.

    The same words on several ranks name one file only where the host is the same.
    """
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


def require_seen(slot: CheckpointDir, parts: list[WrittenTensors]) -> None:
    """Check that this rank, the first, sees what all ranks wrote: --save may be a disk that each node has of its own.

    Args:
        slot: The unfinished checkpoint.
        parts: What each rank wrote, by rank.

    Raises:
        UnseenFilesError: Some files are not there after several looks.
    """
    sizes = {name: entry["bytes"] for part in parts for name, entry in part.files.items()}
    unseen = set(list_unseen(slot.unfinished, sizes))
    lost: dict[int, list[str]] = {}  # by the rank that wrote them
    for rank, part in enumerate(parts):
        names = sorted(unseen & set(part.files))
        if names:
            lost[rank] = names
    if not lost:
        return
    shown = list(lost.items())[:MAX_NAMED_SHARERS]
    named = [f"{name_some(names)} of rank {rank} ({parts[rank].place})" for rank, names in shown]
    more = len(lost) - len(named)
    rest = f" and the files of {more} more ranks" if more > 0 else ""
    raise UnseenFilesError(
        f"--save {slot.save}: {slot.name} is not saved, as rank 0 ({parts[0].place}) does not see "
        f"{', '.join(named)}{rest}; --save must be a folder on storage that all nodes share. Earlier checkpoints are "
        "untouched.",
        tuple(lost),
    )


def refresh(path: Path, *, ours: bool = True) -> None:
    """Make a client of a network file system ask its server what the folder holds. ours: the folder may be changed."""
    # setting the time of a folder brings its new attributes, and with them the end of what was remembered of it
    with contextlib.suppress(OSError):
        if ours:
            os.utime(path)
        os.listdir(path)


def list_lacking(path: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Names of files below `path` that this process does not see, of those that are given."""
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


def compare_views(look: Callable[[], list[StorageView]]) -> list[StorageView]:
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


def describe_views(views: list[StorageView]) -> str:
    """Say what ranks lack, as 'rank 1 (HOST:/PATH) lacks a and b; rank 2 (...) lacks a, b, c, d and 3 more'."""
    named = [f"rank {view.rank} ({view.place}) lacks {name_some(view.lacking)}" for view in views[:MAX_NAMED_SHARERS]]
    more = len(views) - len(named)
    if more > 0:
        named.append(f"{more} more ranks lack files")
    return "; ".join(named)


def name_some(names: Iterable[str]) -> str:
    """List names: 'a, b' of few, 'a, b, c, d and 7 more' of many."""
    listed = list(names)
    named = ", ".join(listed[:MAX_NAMED_SHARERS])
    more = len(listed) - MAX_NAMED_SHARERS
    return f"{named} and {more} more" if more > 0 else named


def _size_of(path: Path) -> int | None:
    """The bytes of a file; None if this process does not see it."""
    try:
        return path.stat().st_size
    except OSError:
        return None
