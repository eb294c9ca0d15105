"""Of several runs under a folder the one that is read, and which files are not its own."""

from collections.abc import Sequence
from pathlib import Path

from megatron_lite.analysis.run_artefacts import artefacts_of
from megatron_lite.analysis.source_files import SourceFile
from megatron_lite.run_folder import RUN_FILE, STEPS_FILE


def one_run(folders: Sequence[Path], files: Sequence[SourceFile], newest: Sequence[Path]) -> tuple[list[Path], dict[Path, str]]:
    """(run folders, first the one to read, which wrote one of the `newest` files or is the newest run itself; those of
    `files` that other runs wrote, with the reason why they are left out)."""
    written = {folder: set(artefacts_of(folder)) for folder in dict.fromkeys(folders)}
    owners = {file.path: _owners(file.path, written) for file in files}
    runs = sorted(written, key=lambda folder: (not any(folder in owners[path] for path in newest), -_time(folder)))
    of_others = {
        file.path: f"of another run than {runs[0]}; name {min(owners[file.path])} alone to read it"
        for file in files
        if not file.named and owners[file.path] and runs[0] not in owners[file.path]
    }
    return runs, of_others


def _owners(path: Path, written: dict[Path, set[Path]]) -> set[Path]:
    """The run folder in which it lies, the innermost one, and the runs whose flags name its place."""
    around = max((folder for folder in written if path.is_relative_to(folder)), key=lambda folder: len(folder.parts), default=None)
    return {folder for folder, paths in written.items() if folder == around or path in paths}


def _time(folder: Path) -> float:
    """When its records were last written."""
    return max((path.stat().st_mtime for name in (RUN_FILE, STEPS_FILE) if (path := folder / name).exists()), default=0.0)
