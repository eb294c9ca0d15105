"""Of several runs under a folder the one that is read, and which files are not its own."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from megatron_lite.analysis.run_artefacts import artefacts_of
from megatron_lite.analysis.source_files import SourceFile
from megatron_lite.run_folder import RUN_FILE, STEPS_FILE


def one_run(
    folders: Sequence[Path], files: Sequence[SourceFile], newest: Sequence[Path]
) -> tuple[list[Path], dict[Path, str]]:
    """(run folders, first the one to read, which wrote one of the `newest` files or is the newest run itself; those of
    `files` that other runs wrote, with the reason why they are left out)."""
    folders_seen, writers = set(folders), defaultdict(set)
    for folder in folders_seen:
        for path in artefacts_of(folder):
            writers[path].add(folder)
    owners = {file.path: writers[file.path] | _around(file.path, folders_seen) for file in files}
    runs = sorted(
        folders_seen, key=lambda folder: (not any(folder in owners[path] for path in newest), -_time(folder), folder)
    )
    of_others = {
        file.path: f"of another run than {runs[0]}; name {min(owners[file.path])} alone to read it"
        for file in files
        if not file.named and owners[file.path] and runs[0] not in owners[file.path]
    }
    return runs, of_others


def _around(path: Path, folders: set[Path]) -> set[Path]:
    """The innermost of the run folders in which it lies."""
    return set(islice((folder for folder in path.parents if folder in folders), 1))


def _time(folder: Path) -> float:
    """When its records were last written."""
    return max(
        (path.stat().st_mtime for name in (RUN_FILE, STEPS_FILE) if (path := folder / name).exists()), default=0.0
    )
