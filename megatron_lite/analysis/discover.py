"""What lies under the paths that a user gave: traces, memory snapshots, run folders; recognized by content."""

import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from megatron_lite.analysis.memory.snapshot_forms import (
    PICKLE,
    CannotUnpackError,
    find_packing,
    is_snapshot_beginning,
    read_beginning,
)
from megatron_lite.analysis.run.read_record import read_record
from megatron_lite.analysis.trace.foreign import describe_foreign, is_of_torch
from megatron_lite.analysis.trace.kineto import rank_in_name
from megatron_lite.analysis.trace.read import NSYS_REPORTS, SQLITE_MAGIC, any_block, export_first, first_bytes
from megatron_lite.errors import UserError
from megatron_lite.formats.file_names import RANKS_FILE, RUN_FILE, STEPS_FILE
from megatron_lite.run_folder import PROCESS_FOLDER, iteration_of
from megatron_lite.shared_files import open_foreign
from megatron_lite.units import counted

Ignored = list[tuple[Path, str]]  # with the reason

# --- what a single file is, by its first bytes

TRACE_HEAD_BYTES = 1 << 20  # a trace's events begin after its header, which may hold a list of all packages
OWN_FILES = re.compile(
    r"(report|manifest|ranks|run-[\d-]+)\.json"
)  # of a run folder; what run.json names is read elsewhere
CANDIDATES = (".json", ".gz", ".sqlite", ".sqlite3", ".db", ".pickle", ".pkl", *NSYS_REPORTS)
# in a folder such files are mostly something else, such as checkpoints: named only if they hold a snapshot
PERHAPS = (".bz2", ".xz", ".zst", ".pt", ".pth", ".zip", ".snapshot", ".dump", ".p", ".html")
_HEADER = (b'"schemaVersion"', b'"distributedInfo"')  # torch writes them first
_TAIL_BYTES = 64  # room for line ends after the last bracket
# an event's arguments come before its phase where keys are sorted
_BARE_LIST = re.compile(rb'\s*\[\s*\{.{0,4096}?"ph"\s*:\s*"[A-Za-z]"', re.DOTALL)
_RANK = re.compile(rb'"rank"\s*:\s*"?(\d{1,6})\b')
_WORLD_SIZE = re.compile(rb'"world_size"\s*:\s*"?(\d{1,6})\b')
_TIME_IN_NAME = re.compile(r"(?<!\d)(\d{13,19})(?!\d)")  # since 1970, in ms (2021) to ns


@dataclass(frozen=True)
class SourceFile:
    """One file: what it is, and what its beginning and name say of its rank and time."""

    path: Path
    what: str  # "trace", "nsys", "snapshot", "run", or "" for nothing that is read here
    why_not: str = ""  # of ""
    rank: int | None = None
    world_size: int | None = None
    time_ns: int = 0  # by the name, else by the file system
    named: bool = False  # by the user, not found in a folder
    whole: bool = True  # False: a trace whose header and end are both missing


def look_at(path: Path, named: bool = False) -> SourceFile:
    """What `path` is. Never raises for what stands in the file."""
    if path.suffix in NSYS_REPORTS:
        return SourceFile(path, "", export_first(path))
    try:
        head = first_bytes(path, TRACE_HEAD_BYTES)
        packing = find_packing(head)
        if packing:
            head = read_beginning(path, packing, TRACE_HEAD_BYTES)
        time_ns = time_in_name(path.name) or path.stat().st_mtime_ns
    except CannotUnpackError as error:
        return SourceFile(path, "", str(error))
    except zlib.error:
        return SourceFile(path, "", "its gzip data cannot be unpacked")
    except OSError as error:
        return SourceFile(path, "", f"cannot be opened ({error.strerror or error})")
    what, why_not = _classify(path, head)
    if packing and what not in ("", "snapshot"):
        what, why_not = "", f"packed with {packing}; unpack it first, or pack it with gzip"
    if what == "trace" and (foreign := _find_foreign_writer(path, head)):
        what, why_not = "", foreign
    rank, size, whole = rank_in_name(path.name), None, True
    if what == "trace":
        if (at := head.find(_HEADER[1])) >= 0:
            info = head[at : at + 4096]  # its groups may list many ranks after these two
            found, found_size = _RANK.search(info), _WORLD_SIZE.search(info)
            rank, size = int(found[1]) if found else rank, int(found_size[1]) if found_size else None
        whole = any(key in head for key in _HEADER) or _has_end(path, head)
    return SourceFile(path, what, why_not, rank, size, time_ns, named, whole)


def _classify(path: Path, head: bytes) -> tuple[str, str]:
    """(what, why not)"""
    start = head.lstrip()[:1]
    if not start:
        return "", "empty"
    if head.startswith(SQLITE_MAGIC):
        # here: other sources are not to wait for sqlite
        from megatron_lite.analysis.trace.nsys_gaps import name_database

        other = name_database(path)
        return ("", other) if other else ("nsys", "")
    if PICKLE.match(head):
        known = is_snapshot_beginning(head)
        return ("snapshot", "") if known else ("", "a pickle, but no memory snapshot of PyTorch")
    if path.name == RUN_FILE and b'"schema"' in head:
        return "run", ""
    if start in (b"{", b"[", b"<") and b'"traceEvents"' not in head and is_snapshot_beginning(head):
        return "snapshot", ""
    if start == b"{" and (b'"traceEvents"' in head or ".trace.json" in path.name) or _BARE_LIST.match(head):
        return "trace", ""
    return "", "JSON, but no trace" if start in (b"{", b"[") else "neither a trace nor a memory snapshot"


def _find_foreign_writer(path: Path, head: bytes) -> str:
    """Why the trace is none of PyTorch's; '' where it is, or where only the whole file can tell."""
    if is_of_torch(head):
        return ""
    why_not = describe_foreign(head, is_whole=len(head) < TRACE_HEAD_BYTES)
    # other tools, such as VizTracer, put PyTorch's events behind their own
    return "" if why_not and len(head) == TRACE_HEAD_BYTES and any_block(path, is_of_torch) else why_not


def _has_end(path: Path, head: bytes) -> bool:
    """Is the JSON closed, as far as its last bytes tell? Of long zipped files and bare lists it is believed."""
    if head.lstrip().startswith(b"[") or (len(head) == TRACE_HEAD_BYTES and path.suffix == ".gz"):
        return True
    if len(head) == TRACE_HEAD_BYTES:
        with open_foreign(path) as file:
            file.seek(-_TAIL_BYTES, os.SEEK_END)
            head = file.read()
    return head.rstrip().endswith(b"}")


def time_in_name(name: str) -> int | None:
    """Nanoseconds since 1970 when the profiler's window began, as torch and this trainer put it into names."""
    found = _TIME_IN_NAME.findall(name)
    return int(found[-1].ljust(19, "0")) if found else None


# --- of all traces under a folder those that belong together: one of each rank, of the newest window

ALONE = "name it alone to read it"
UNKNOWN_SIZE = "an unknown number of ranks"
MERGE = f"a merge of several traces beside the traces of single ranks; {ALONE}"
DAMAGED = "its header and its end are missing; name it alone to read what is left"
_MERGED = re.compile(r"(?<![a-z])merged?(?![a-z])", re.IGNORECASE)
_OF_ONE_RANK = re.compile(r"((?:rank|node|worker|host)[_-]?)\d+", re.IGNORECASE)


def choose_newest(files: Sequence[SourceFile]) -> tuple[list[SourceFile], Ignored]:
    """Choose the files of the newest window of the newest run.

    Returns:
        The chosen files by rank, and the others with the reason why they are left out.
    """
    if not files:
        return [], []
    merged = [file for file in files if _MERGED.search(file.path.name) and not file.named]
    if 0 < len(merged) < len(files):
        kept, ignored = choose_newest([file for file in files if file not in merged])
        return kept, [*ignored, *((file.path, MERGE) for file in merged)]
    # a damaged file does not tell of which run it is
    whole = [file for file in files if file.whole or file.named] or list(files)
    newest = max(whole, key=_age)
    ignored = [(file.path, DAMAGED) for file in files if file not in whole]
    of_same_run = []
    for file in whole:
        why = _explain_other_run(file, newest)
        if why:
            ignored.append((file.path, why))
        else:
            of_same_run.append(file)
    kept, older = _choose_newest_window(of_same_run, newest)
    return sorted(kept, key=lambda file: (file.rank is None, file.rank or 0)), [*ignored, *older]


def _explain_other_run(file: SourceFile, newest: SourceFile) -> str:
    """The reason why `file` is of another run than the newest one; '' where both are of the same."""
    if file.world_size != newest.world_size:
        own_size = _describe_world_size(file)
        newest_size = _describe_world_size(newest)
        return f"of another run ({own_size}; the newest trace, {newest.path.name}, is of {newest_size}); {ALONE}"
    if _place(file) != _place(newest):
        return f"of another run, older than {newest.path}; {ALONE}"
    return ""


def _describe_world_size(file: SourceFile) -> str:
    return counted(file.world_size, "rank") if file.world_size else UNKNOWN_SIZE


def _choose_newest_window(files: Sequence[SourceFile], newest: SourceFile) -> tuple[list[SourceFile], Ignored]:
    """Choose the file of each rank that was written in the same window as `newest`, which is one of `files` of one run.

    Returns:
        The chosen files, and the others with the reason why they are left out.
    """
    by_rank: dict[int | None, list[SourceFile]] = {}
    for file in files:
        by_rank.setdefault(file.rank, []).append(file)
    kept: list[SourceFile] = []
    ignored: Ignored = []
    for rank, own in by_rank.items():
        best = max(own, key=_age)
        who = "the same process" if rank is None else f"rank {rank}"
        # ranks write their windows at about the same time
        if _find_nearest_in_time(by_rank[newest.rank], best) is newest:
            kept.append(best)
            ignored += [(file.path, _explain_older_window(file, best, who)) for file in own if file is not best]
        else:
            ignored += [(file.path, f"an older window; {who} has none of the newest one") for file in own]
    return kept, ignored


def _find_nearest_in_time(files: Sequence[SourceFile], other: SourceFile) -> SourceFile:
    """The one of `files` that was written closest to `other`; of two as close the later one,
    then one of the same name."""

    def distance(file: SourceFile) -> tuple[int, int, bool]:
        return abs(file.time_ns - other.time_ns), -file.time_ns, file.path.name != other.path.name

    return min(files, key=distance)


def _explain_older_window(file: SourceFile, best: SourceFile, who: str) -> str:
    """The reason why `best` is read instead of `file`, both of which `who` wrote."""
    if file.time_ns == best.time_ns:
        return f"the same window of {who} as {best.path.name}"
    return f"an older window of {who}; {best.path.name} is the newest"


def choose_newest_reports(files: Sequence[SourceFile]) -> tuple[list[SourceFile], Ignored]:
    """The same for reports of Nsight Systems: one per node, whose names differ in the node's number."""
    newest = max(files, key=_age, default=None)
    kept = [file for file in files if newest and _drop_rank(file.path) == _drop_rank(newest.path)]
    ignored = [(file.path, f"older than {newest.path.name}; {ALONE}") for file in files if newest and file not in kept]
    return sorted(kept, key=lambda file: file.path), ignored


def _age(file: SourceFile) -> tuple[int, bool, str]:
    """Of two files of one window the plain one counts as newer: it is faster to read."""
    return file.time_ns, file.path.suffix != ".gz", file.path.name


def _place(file: SourceFile) -> str:
    """Folders of one run may be one per rank or node; files that were named may lie anywhere."""
    return "" if file.named else _drop_rank(file.path.parent)


def _drop_rank(path: Path) -> str:
    return _OF_ONE_RANK.sub(r"\1", str(path))


# --- traces and memory snapshots that a run wrote outside its folder, by the flags in its run.json


def find_artefacts(run_folder: Path) -> list[Path]:
    """Files in the run's --tensorboard-dir and beside its --memory-snapshot-path that were written while it ran."""
    record, _ = read_record(run_folder)  # reading the run itself says what is wrong with it
    if record is None or record.plan is None or record.started is None:
        return []
    try:
        started, ended = _to_seconds(record.started), _to_seconds(record.ended)
    except ValueError:
        return []
    settings = record.plan.settings
    patterns = [(settings.tensorboard_dir, "*.pt.trace.json*")]
    if settings.record_memory_history and settings.memory_snapshot_path is not None:
        name = Path(settings.memory_snapshot_path)
        patterns.append((str(name.parent), f"{name.stem}*{name.suffix}"))
    found = set()
    for written, pattern in patterns:
        if written is not None and "\0" not in written:
            # the run was perhaps started elsewhere
            for folder in (Path(written), run_folder / written, run_folder.parent / written):
                found |= set(folder.glob(pattern)) if folder.is_dir() else set()
    # other runs may write to the same folder; a copy may make a file younger, but leaves the time in its name
    times = {path: time_in_name(path.name) or path.stat().st_mtime_ns for path in found}
    ends = {path: ended if time_in_name(path.name) else math.inf for path in found}
    return sorted(path for path in found if started - 1 <= times[path] / 1e9 <= ends[path] + 1)


def _to_seconds(text: str | None) -> float:
    """Since 1970; endless for a run that has not ended."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp() if text else math.inf


# --- of several runs under a folder the one that is read, and which files are not its own


def choose_run(
    folders: Sequence[Path], files: Sequence[SourceFile], newest: Sequence[SourceFile]
) -> tuple[list[Path], dict[Path, str]]:
    """(run folders, first the one to read, which wrote one of the `newest` files or is the newest run itself; those of
    `files` that other runs wrote, with the reason why they are left out)."""
    folders_seen, owners = set(folders), defaultdict[Path, set[Path]](set)
    for folder in folders_seen:
        for path in find_artefacts(folder):
            owners[path].add(folder)
    for file in files:
        # the innermost of the run folders in which it lies
        owners[file.path].update(islice((folder for folder in file.path.parents if folder in folders_seen), 1))

    def order(folder: Path) -> tuple[bool, float, Path]:
        records = (folder / name for name in (RUN_FILE, STEPS_FILE))
        written = max((path.stat().st_mtime for path in records if path.exists()), default=0.0)
        return not any(folder in owners[file.path] for file in newest), -written, folder

    runs = sorted(folders_seen, key=order)
    of_others = {
        file.path: f"of another run than {runs[0]}; name {min(owners[file.path])} alone to read it"
        for file in files
        if not file.named and owners[file.path] and runs[0] not in owners[file.path]
    }
    return runs, of_others


# --- what lies under the paths that a user gave: traces, memory snapshots, run folders; recognized by content

MAX_PROCESSES_NAMED = 3
MAX_UNREAD_REASONS = 3  # that one line gives where nothing can be read
MAX_LISTED_FILES = 20_000  # of a folder; somebody may have named /
TO_NAME = "name a run's folder (with run.json), a trace, or a snapshot of torch.cuda.memory"
BESIDE_TRACES = (
    "a report of Nsight Systems beside traces of torch.profiler, which contain more; name it alone to read it"
)


@dataclass(frozen=True)
class Sources:
    """What is to be read, and what was seen and is not."""

    traces: tuple[Path, ...] = ()  # by rank
    snapshots: tuple[Path, ...] = ()
    run_folders: tuple[Path, ...] = ()  # at most one: the run that wrote the traces or snapshots, else the newest
    ignored: tuple[tuple[Path, str], ...] = ()  # with the reason


def discover_sources(paths: Sequence[Path]) -> Sources:
    """Find what to read under `paths`. Raises UserError, one line, where nothing is readable."""
    looked_at, folders, left_out = _look_under(paths)
    folders += [file.path.parent for file in looked_at if file.what == "run"]
    files = [file for file in looked_at if file.what not in ("", "run")]
    left_out += [(file.path, file.why_not) for file in looked_at if not file.what]
    runs, of_others = choose_run(folders, files, _choose_files(files)[0])
    chosen, older = _choose_files([file for file in files if file.path not in of_others])
    ignored = [
        *_leave_out_exported(left_out, files),
        *of_others.items(),
        *older,
        *((folder, f"another run's folder than {runs[0]}; {ALONE}") for folder in runs[1:]),
    ]
    if not (chosen or runs):
        raise UserError(_explain_nothing_found(paths, ignored))
    return Sources(
        traces=tuple(file.path for file in chosen if file.what != "snapshot"),
        snapshots=tuple(file.path for file in chosen if file.what == "snapshot"),
        run_folders=tuple(runs[:1]),
        ignored=tuple(ignored),
    )


def _look_under(paths: Sequence[Path]) -> tuple[list[SourceFile], list[Path], Ignored]:
    """Look at the files that were named, and at those in the folders that were named.

    Returns:
        The files; the folders that hold the record of a run; and what was not looked at, with the reason.
    """
    looked_at: list[SourceFile] = []
    folders: list[Path] = []
    left_out: Ignored = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: there is no such file or folder; check the path.")
        if not path.is_dir() and path.name not in (RUN_FILE, STEPS_FILE, RANKS_FILE):
            looked_at.append(look_at(path, named=True))
            continue
        listed = list(_list_files(path if path.is_dir() else path.parent, left_out))
        under = _leave_out_processes(listed, left_out)
        folders += [file.parent for file in under if file.name in (RUN_FILE, STEPS_FILE)]
        known = {file.path.resolve() for file in looked_at if file.what}
        looked_at += _look_at_candidates(under, known)
    return looked_at, folders, left_out


def _look_at_candidates(under: Sequence[Path], known: set[Path]) -> list[SourceFile]:
    """Look at those of the files `under` a folder that may be traces or snapshots, and at what runs in it wrote
    elsewhere.

    Args:
        under: the folder's files.
        known: resolved paths of the files that were looked at before.
    """
    found = [file for file in under if file.name != RUN_FILE and not OWN_FILES.fullmatch(file.name)]
    found += [path for file in under if file.name == RUN_FILE for path in find_artefacts(file.parent)]
    # of several paths to one file the first one counts
    candidates = {file.resolve(): file for file in reversed(found) if file.suffix in CANDIDATES + PERHAPS}
    seen = [look_at(file) for place, file in reversed(candidates.items()) if place not in known]
    return [file for file in seen if file.what or file.path.suffix in CANDIDATES]


def _leave_out_exported(left_out: Ignored, files: Sequence[SourceFile]) -> Ignored:
    """`left_out` without the reports of Nsight Systems whose exported databases are among `files`."""
    exported = {file.path.with_suffix("") for file in files if file.what == "nsys"}
    return [
        (path, why) for path, why in left_out if path.suffix not in NSYS_REPORTS or path.with_suffix("") not in exported
    ]


def _explain_nothing_found(paths: Sequence[Path], ignored: Ignored) -> str:
    """One line that says why nothing under `paths` can be read."""
    if len(ignored) == 1:
        [(path, why)] = ignored
        return f"{path}: {why}; nothing to report on."
    line = f"{', '.join(map(str, paths))}: no trace, memory snapshot or run found"
    if not ignored:
        return f"{line}; {TO_NAME}."
    reasons = "; ".join(f"{path.name}: {why}" for path, why in ignored[:MAX_UNREAD_REASONS])
    more = f"; and {len(ignored) - MAX_UNREAD_REASONS} more" if len(ignored) > MAX_UNREAD_REASONS else ""
    return f"{line} ({reasons}{more}); {TO_NAME}."


def _choose_files(files: Sequence[SourceFile]) -> tuple[list[SourceFile], Ignored]:
    """(the newest window's traces and snapshots by rank, or else its reports of Nsight Systems;
    the others with the reason)"""
    traces, older = choose_newest([file for file in files if file.what == "trace"])
    snapshots, older_snapshots = choose_newest([file for file in files if file.what == "snapshot"])
    reports, older_reports = choose_newest_reports([file for file in files if file.what == "nsys"])
    if traces and reports:
        older_reports += [(file.path, BESIDE_TRACES) for file in reports]
        reports = []
    return [*traces, *reports, *snapshots], [*older, *older_reports, *older_snapshots]


def _leave_out_processes(files: Sequence[Path], left_out: Ignored) -> list[Path]:
    """Files without those of processes that trained beside a run's first one,
    which have folders of their own in its folder."""
    runs = {file.parent for file in files if file.name in (RUN_FILE, STEPS_FILE)}
    beside = sorted(folder for folder in runs if folder.name.startswith(PROCESS_FOLDER) and folder.parent in runs)
    for run in sorted({folder.parent for folder in beside}):
        others = [folder.name for folder in beside if folder.parent == run]
        named = ", ".join(others[:MAX_PROCESSES_NAMED]) + (", ..." if others[MAX_PROCESSES_NAMED:] else "")
        said = (
            f"{len(others) + 1} processes without ranks trained at the same time; "
            "this report is of the first, the others are in"
        )
        left_out.append((run, f"{said} {named}"))
    return [file for file in files if not any(folder in file.parents for folder in beside)]


def _list_files(folder: Path, left_out: Ignored) -> Iterator[Path]:
    """Files below `folder`, without hidden ones and checkpoints."""
    count = 0

    def complain(error: OSError) -> None:
        left_out.append((Path(error.filename), f"cannot be opened ({error.strerror})"))

    for place, folders, names in os.walk(folder, onerror=complain):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and iteration_of(name) is None)
        for name in sorted(names):
            if count >= MAX_LISTED_FILES:
                left_out.append((folder, f"more than {MAX_LISTED_FILES:,} files; the rest was not looked at"))
                return
            if not name.startswith("."):
                count += 1
                yield Path(place, name)
