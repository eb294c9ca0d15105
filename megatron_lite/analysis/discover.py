"""What lies under the paths that a user gave: traces, memory snapshots, run folders; recognised by content."""

import json
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from pathlib import Path

from megatron_lite.analysis.trace.kineto import rank_in_name
from megatron_lite.analysis.trace.read import NSYS_REPORTS, SQLITE_MAGIC, export_first, first_bytes
from megatron_lite.errors import UserError
from megatron_lite.run_folder import RANKS_FILE, RUN_FILE, STEPS_FILE, iteration_of

# --- what a single file is, by its first bytes


HEAD_BYTES = 1 << 20  # a trace's events begin after its header, which may hold a list of all packages
OWN_FILES = re.compile(
    r"(report|manifest|ranks|run-[\d-]+)\.json"
)  # of a run folder; what run.json names is read elsewhere
CANDIDATES = (".json", ".gz", ".sqlite", ".sqlite3", ".db", ".pickle", ".pkl", *NSYS_REPORTS)
_HEADER = (b'"schemaVersion"', b'"distributedInfo"')  # torch writes them first
_TAIL_BYTES = 64  # room for line ends after the last bracket
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_BARE_LIST = re.compile(rb'\s*\[\s*\{[^{}\[\]]{0,400}"ph"\s*:')
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


def looked_at(path: Path) -> SourceFile:
    """What `path` is. Never raises for what stands in the file."""
    if path.suffix in NSYS_REPORTS:
        return SourceFile(path, "", export_first(path))
    try:
        head = first_bytes(path, HEAD_BYTES)
        time_ns = path.stat().st_mtime_ns
    except zlib.error:
        return SourceFile(path, "", "damaged gzip data")
    except OSError as error:
        return SourceFile(path, "", f"cannot be opened ({error.strerror or error})")
    what, why_not = _what(path, head)
    rank, world_size = _ranks(head) if what == "trace" else (None, None)
    rank = rank_in_name(path.name) if rank is None else rank
    whole = what != "trace" or any(key in head for key in _HEADER) or _has_end(path, head)
    return SourceFile(path, what, why_not, rank, world_size, time_in_name(path.name) or time_ns, whole=whole)


def _what(path: Path, head: bytes) -> tuple[str, str]:
    """(what, why not)"""
    start = head.lstrip()[:1]
    if not start:
        return "", "empty"
    if head.startswith(SQLITE_MAGIC):
        return "nsys", ""
    if _PICKLE.match(head):
        known = b"segments" in head or b"device_traces" in head
        return ("snapshot", "") if known else ("", "a pickle, but no memory snapshot of PyTorch")
    if path.name == RUN_FILE and b'"schema"' in head:
        return "run", ""
    if start == b"{" and (b'"traceEvents"' in head or ".trace.json" in path.name) or _BARE_LIST.match(head):
        return "trace", ""
    return "", "JSON, but no trace" if start in (b"{", b"[") else "neither a trace nor a memory snapshot"


def _has_end(path: Path, head: bytes) -> bool:
    """Is the JSON closed, as far as its last bytes tell? Of long zipped files and bare lists it is believed."""
    if head.lstrip().startswith(b"[") or (len(head) == HEAD_BYTES and path.suffix == ".gz"):
        return True
    if len(head) == HEAD_BYTES:
        with open(path, "rb") as file:
            file.seek(-_TAIL_BYTES, os.SEEK_END)
            head = file.read()
    return head.rstrip().endswith(b"}")


def _ranks(head: bytes) -> tuple[int | None, int | None]:
    """(rank, world size) as distributedInfo has them."""
    at = head.find(b'"distributedInfo"')
    if at < 0:
        return None, None
    info = head[at : at + 4096]  # its groups may list many ranks after these two
    rank, size = _RANK.search(info), _WORLD_SIZE.search(info)
    return int(rank[1]) if rank else None, int(size[1]) if size else None


def time_in_name(name: str) -> int | None:
    """Nanoseconds since 1970 when the profiler's window began, as torch and this trainer put it into names."""
    found = _TIME_IN_NAME.findall(name)
    return int(found[-1].ljust(19, "0")) if found else None


# --- of all traces under a folder those that belong together: one of each rank, of the newest window

DAMAGED = "damaged: its header and its end are missing; name it alone to read what is left"
_OF_ONE_RANK = re.compile(r"((?:rank|node|worker|host)[_-]?)\d+", re.IGNORECASE)


def newest_set(files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[tuple[Path, str]]]:
    """(the newest window's files by rank, the others with the reason why they are left out)."""
    if not files:
        return [], []
    damaged = [file for file in files if not (file.whole or file.named)]  # they tell not of which run they are
    whole = [file for file in files if file.whole or file.named]
    if not whole:
        whole, damaged = damaged, []
    newest = max(whole, key=_age)
    ignored, of_run = [(file.path, DAMAGED) for file in damaged], []
    for file in whole:
        if _run_of(file) != _run_of(newest):
            ignored.append((file.path, _other_run(file, newest)))
        else:
            of_run.append(file)
    by_rank: dict[int | None, list[SourceFile]] = {}
    for file in of_run:
        by_rank.setdefault(file.rank, []).append(file)
    kept = []
    for own in by_rank.values():
        best = max(own, key=_age)
        in_window = _nearest(by_rank[newest.rank], best) is newest
        if in_window:
            kept.append(best)
        ignored += [(file.path, _older(file, best, in_window)) for file in own if file is not best or not in_window]
    return sorted(kept, key=lambda file: (file.rank is None, file.rank or 0)), ignored


def newest_reports(files: Sequence[SourceFile]) -> tuple[list[SourceFile], list[tuple[Path, str]]]:
    """The same for reports of Nsight Systems: one per node, whose names differ in the node's number."""
    if not files:
        return [], []
    newest = max(files, key=_age)
    kept = [file for file in files if _without_rank(file.path) == _without_rank(newest.path)]
    ignored = [
        (file.path, f"older than {newest.path.name}; name it alone to read it") for file in files if file not in kept
    ]
    return sorted(kept, key=lambda file: file.path), ignored


def _age(file: SourceFile) -> tuple:
    """Of two files of one window the plain one counts as newer: it is faster to read."""
    return file.time_ns, file.path.suffix != ".gz", file.path.name


def _run_of(file: SourceFile) -> tuple:
    """What files of one run have in common. Folders may be one per rank or node; files that were named may lie anywhere."""
    return file.world_size, "" if file.named else _without_rank(file.path.parent)


def _without_rank(path: Path) -> str:
    return _OF_ONE_RANK.sub(r"\1", str(path))


def _nearest(files: list[SourceFile], other: SourceFile) -> SourceFile:
    """The one of `files` that is closest in time to `other`: ranks write their windows at about the same time."""
    return min(
        files, key=lambda file: (abs(file.time_ns - other.time_ns), -file.time_ns, file.path.name != other.path.name)
    )


def _other_run(file: SourceFile, newest: SourceFile) -> str:
    if file.world_size != newest.world_size:
        return (
            f"of another run ({_size(file)}; the newest trace, {newest.path.name}, is of {_size(newest)}); "
            "name it alone to read it"
        )
    return f"of another run, older than {newest.path}; name it alone to read it"


def _size(file: SourceFile) -> str:
    return "an unknown number of ranks" if file.world_size is None else f"{file.world_size} ranks"


def _older(file: SourceFile, best: SourceFile, in_window: bool) -> str:
    who = "the same process" if file.rank is None else f"rank {file.rank}"
    if not in_window:
        return f"an older window; {who} has none of the newest one"
    if file.time_ns == best.time_ns:
        return f"the same window of {who} as {best.path.name}"
    return f"an older window of {who}; {best.path.name} is the newest"


# --- traces and memory snapshots that a run wrote outside its folder, by the flags in its run.json


def find_artefacts(run_folder: Path) -> list[Path]:
    """Files in the run's --tensorboard-dir and beside its --memory-snapshot-path that were written while it ran."""
    try:
        record = json.loads((run_folder / RUN_FILE).read_bytes())
        started, ended = _seconds(record["started"]), _seconds(record.get("ended"))
        args = record["plan"]["args"]
        tensorboard, snapshot = args["watch"]["tensorboard_dir"], args["profile"]["memory_snapshot_path"]
        recorded = args["profile"]["record_memory_history"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # reading the run itself says what is wrong with it
    found = [path for folder in _places(tensorboard, run_folder) for path in folder.glob("*.pt.trace.json*")]
    if recorded and isinstance(snapshot, str):
        name = Path(snapshot)
        found += [
            path
            for folder in _places(str(name.parent), run_folder)
            for path in folder.glob(f"{name.stem}*{name.suffix}")
        ]
    return sorted({path for path in found if _is_of(path, started, ended)})


def _seconds(text: str | None) -> float:
    """Since 1970; endless for a run that has not ended."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp() if text else math.inf


def _is_of(path: Path, started: float, ended: float) -> bool:
    """Other runs may write to the same folder. A copy may make a file younger, but leaves the time in its name."""
    if time_ns := time_in_name(path.name):
        return started - 1 <= time_ns / 1e9 <= ended + 1
    return path.stat().st_mtime >= started - 1


def _places(written: str | None, run_folder: Path) -> Iterator[Path]:
    """Folders that the text of a flag may mean: the run was perhaps started elsewhere."""
    if isinstance(written, str) and "\0" not in written:
        for place in dict.fromkeys((Path(written), run_folder / written, run_folder.parent / written)):
            if place.is_dir():
                yield place


# --- of several runs under a folder the one that is read, and which files are not its own


def one_run(
    folders: Sequence[Path], files: Sequence[SourceFile], newest: Sequence[Path]
) -> tuple[list[Path], dict[Path, str]]:
    """(run folders, first the one to read, which wrote one of the `newest` files or is the newest run itself; those of
    `files` that other runs wrote, with the reason why they are left out)."""
    folders_seen, writers = set(folders), defaultdict(set)
    for folder in folders_seen:
        for path in find_artefacts(folder):
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


# --- what lies under the paths that a user gave: traces, memory snapshots, run folders; recognised by content

MAX_FILES = 20_000  # of a folder; somebody may have named /
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


def discover_sources(paths: Sequence[Path]) -> Sources:
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
        for path in find_artefacts(run_folder):
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
            if count >= MAX_FILES:
                seen.ignored.append((folder, f"more than {MAX_FILES:,} files; the rest was not looked at"))
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
