"""The failure of a run, where its folder holds evidence of one; small files are looked at only."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.formats.file_names import EVIDENCE_FILE, FLIGHT_RECORDINGS, LAST_WORDS, RANKS_FILE, STACKS
from megatron_lite.postmortem.postmortem_results import FailureKind, Postmortem

if TYPE_CHECKING:
    from megatron_lite.postmortem.evidence import JobEvidence

# what a job leaves when it fails: a file or folder of a run, of torchrun, or of PyTorch's flight recorder
SIGNS = (
    RANKS_FILE,
    EVIDENCE_FILE,
    LAST_WORDS,
    FLIGHT_RECORDINGS.partition("/")[0],
    STACKS.partition("/")[0],
    "error.json",
    "nccl_trace",
    "attempt_",
)
# traces and snapshots
LARGE = (".gz", ".pickle", ".pkl", ".html", ".sqlite", ".nsys-rep", ".pt", ".bin", ".idx", ".safetensors")
MAX_EVIDENCE_BYTES = 2**25  # of a file
MAX_SMALL_FILES = 2000
MAX_FOLDERS_DEEP = 4
NO_FAILURE = (FailureKind.NONE, FailureKind.UNKNOWN)


def find_failure(paths: Sequence[Path]) -> Postmortem | None:
    """Find out why a job failed, where one of its folders shows that it did.

    Args:
        paths: What a report is asked for.

    Returns:
        The conclusion; None where nothing speaks of a failure, or nothing says of which.
    """
    evidence = find_evidence(paths)
    if evidence is None:
        return None
    from megatron_lite.postmortem.conclude import conclude

    found = conclude(evidence)
    return None if found.kind in NO_FAILURE else found


def find_evidence(paths: Sequence[Path]) -> "JobEvidence | None":
    """Find what a job left that failed.

    Args:
        paths: What a report is asked for.

    Returns:
        All that was read; None where nothing speaks of a failure.
    """
    folders = [path for path in paths if path.is_dir()]
    if not any(_has_sign(folder) for folder in folders):
        return None
    # a report on a sound run is not to wait for it
    from megatron_lite.postmortem.bundled_evidence import find_bundled
    from megatron_lite.postmortem.collect import collect_evidence

    files: list[Path] = []
    for folder in folders:
        bundled = find_bundled(folder)
        files += [bundled] if bundled else _list_small_files(folder, 0)
    return collect_evidence(files[:MAX_SMALL_FILES])


def _has_sign(folder: Path) -> bool:
    """Whether a folder holds something that a job leaves when it fails."""
    return any(entry.name.startswith(SIGNS) for entry in _list_entries(folder))


def _list_entries(folder: Path) -> list[os.DirEntry[str]]:
    """List what a folder holds, by name; [] for one that cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _list_small_files(folder: Path, depth: int) -> Iterator[Path]:
    """List the files below a folder that may be evidence of a failure."""
    for entry in _list_entries(folder):
        if entry.is_dir(follow_symlinks=False):
            if depth < MAX_FOLDERS_DEEP:
                yield from _list_small_files(Path(entry.path), depth + 1)
        elif _is_small(entry):
            yield Path(entry.path)


def _is_small(entry: os.DirEntry[str]) -> bool:
    if entry.name.endswith(LARGE) or not entry.is_file(follow_symlinks=False):
        return False
    return entry.stat(follow_symlinks=False).st_size <= MAX_EVIDENCE_BYTES
