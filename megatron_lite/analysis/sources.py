"""What lies under the paths that a user gave: traces, memory snapshots, run folders; recognised by content."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_lite.analysis.newest_set import newest_reports, newest_set
from megatron_lite.analysis.one_run import one_run
from megatron_lite.analysis.run_artefacts import artefacts_of
from megatron_lite.analysis.source_files import CANDIDATES, OWN_FILES, SourceFile, looked_at
from megatron_lite.analysis.trace.read import NSYS_REPORTS
from megatron_lite.errors import UserError
from megatron_lite.run_folder import RANKS_FILE, RUN_FILE, STEPS_FILE, iteration_of

MOST_FILES = 20_000  # of a folder; somebody may have named /
BESIDE_TRACES = "a report of Nsight Systems beside traces of torch.profiler, which say more; name it alone to read it"


@dataclass(frozen=True)
class Sources:
    """What is to be read, and what was seen and is not."""

    traces: tuple[Path, ...] = ()  # by rank
    snapshots: tuple[Path, ...] = ()
    run_folders: tuple[Path, ...] = ()  # at most one: the run that wrote the traces or snapshots, else the newest
    ignored: tuple[tuple[Path, str], ...] = ()  # with the reason


@dataclass
class _Seen:
    """Files that were looked at, in a path's order."""

    files: list[SourceFile] = field(default_factory=list)
    run_folders: list[Path] = field(default_factory=list)
    ignored: list[tuple[Path, str]] = field(default_factory=list)


def sources_of(paths: Sequence[Path]) -> Sources:
    """What to read under `paths`. Raises UserError, one line, where nothing is readable."""
    seen = _Seen()
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: there is no such file or folder.")
        (_look_into if path.is_dir() else _look_at)(path, seen)
    runs, of_others = one_run(seen.run_folders, seen.files, [file.path for file in _newest(seen.files)[0]])
    files, older = _newest([file for file in seen.files if file.path not in of_others])
    exported = {file.path.with_suffix("") for file in seen.files if file.what == "nsys"}
    ignored = [
        (path, why)
        for path, why in seen.ignored
        if path.suffix not in NSYS_REPORTS or path.with_suffix("") not in exported
    ]
    other_runs = [(folder, f"another run's folder than {runs[0]}; name it alone to read it") for folder in runs[1:]]
    found = Sources(
        traces=tuple(file.path for file in files if file.what != "snapshot"),
        snapshots=tuple(file.path for file in files if file.what == "snapshot"),
        run_folders=tuple(runs[:1]),
        ignored=(*ignored, *of_others.items(), *older, *other_runs),
    )
    if not (found.traces or found.snapshots or found.run_folders):
        raise UserError(_nothing(paths, found.ignored))
    return found


def _newest(files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[tuple[Path, str]]]:
    """(the newest window's traces and snapshots by rank, or else its reports of Nsight Systems; the others with the reason)"""
    traces, older = newest_set([file for file in files if file.what == "trace"])
    snapshots, older_snapshots = newest_set([file for file in files if file.what == "snapshot"])
    reports, older_reports = newest_reports([file for file in files if file.what == "nsys"])
    if traces and reports:
        older_reports += [(file.path, BESIDE_TRACES) for file in reports]
        reports = []
    return [*traces, *reports, *snapshots], [*older, *older_reports, *older_snapshots]


def _look_at(path: Path, seen: _Seen):
    """One file that the user named."""
    if path.name in (RUN_FILE, STEPS_FILE, RANKS_FILE):
        _look_into(path.parent, seen)
        return
    _keep(replace(looked_at(path), named=True), seen)


def _look_into(folder: Path, seen: _Seen):
    """A folder, and what a run in it says that it wrote elsewhere."""
    files = list(_files(folder, seen))
    for path in files:
        if path.name in (RUN_FILE, STEPS_FILE):
            seen.run_folders.append(path.parent)
        elif path.suffix in CANDIDATES and not OWN_FILES.fullmatch(path.name):
            _keep(looked_at(path), seen)
    known = {file.path.resolve() for file in seen.files}
    for run_folder in dict.fromkeys(path.parent for path in files if path.name == RUN_FILE):
        for path in artefacts_of(run_folder):
            if path.resolve() not in known and path.suffix in CANDIDATES:
                known.add(path.resolve())
                _keep(looked_at(path), seen)


def _keep(file: SourceFile, seen: _Seen):
    if file.what == "run":
        seen.run_folders.append(file.path.parent)
    elif file.what:
        seen.files.append(file)
    else:
        seen.ignored.append((file.path, file.why_not))


def _files(folder: Path, seen: _Seen) -> Iterator[Path]:
    """Files below `folder`, without hidden ones and checkpoints."""
    count = 0
    for place, folders, names in os.walk(
        folder,
        onerror=lambda error: seen.ignored.append((Path(error.filename), f"cannot be opened ({error.strerror})")),
    ):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and iteration_of(name) is None)
        for name in sorted(names):
            if count >= MOST_FILES:
                seen.ignored.append((folder, f"more than {MOST_FILES:,} files; the rest was not looked at"))
                return
            if not name.startswith("."):
                count += 1
                yield Path(place, name)


def _nothing(paths: Sequence[Path], ignored: Sequence[tuple[Path, str]]) -> str:
    named = ", ".join(map(str, paths))
    if len(ignored) == 1:
        return f"{ignored[0][0]}: {ignored[0][1]}; nothing to report on."
    reasons = "; ".join(f"{path.name}: {why}" for path, why in ignored[:3])
    more = f"; and {len(ignored) - 3} more" if len(ignored) > 3 else ""
    return f"{named}: no trace, memory snapshot or run found" + (f" ({reasons}{more})." if reasons else ".")
