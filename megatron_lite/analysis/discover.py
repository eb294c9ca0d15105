"""Files under the paths that a user gave: traces, memory snapshots, run folders; recognized by content."""

import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from megatron_lite.analysis.memory.snapshot_forms import (
    CannotUnpackError,
    find_packing,
    is_snapshot_beginning,
    read_beginning,
)
from megatron_lite.analysis.run.read_record import read_record
from megatron_lite.analysis.trace.file_blocks import first_bytes
from megatron_lite.analysis.trace.foreign import (
    are_packets_of_torch,
    describe_foreign,
    describe_foreign_packets,
    is_of_torch,
    is_own_timeline,
    name_foreign_file,
)
from megatron_lite.analysis.trace.kineto import rank_in_name
from megatron_lite.analysis.trace.perfetto_packets import is_perfetto
from megatron_lite.analysis.trace.read import NSYS_REPORTS, SQLITE_MAGIC, any_block, export_first
from megatron_lite.errors import UserError
from megatron_lite.formats import perfetto_trace
from megatron_lite.formats.file_names import RANKS_FILE, RUN_FILE, STEPS_FILE
from megatron_lite.formats.run_record import Settings
from megatron_lite.plain_pickles import PICKLE
from megatron_lite.run_folder import PROCESS_FOLDER, iteration_of
from megatron_lite.shared_files import open_foreign
from megatron_lite.units import counted

Ignored = list[tuple[Path, str]]  # with the reason


# --- what a single file is, by its first bytes

TRACE_HEAD_BYTES = 1 << 20  # a trace's events begin after its header, which may hold a list of all packages
# of a run folder; what run.json names is read elsewhere
OWN_FILES = re.compile(r"(report|manifest|ranks|job_evidence|run-[\d-]+)\.json")
CANDIDATES = (
    ".json",
    ".gz",
    ".sqlite",
    ".sqlite3",
    ".db",
    *perfetto_trace.ENDINGS,
    ".pickle",
    ".pkl",
    ".ncu-rep",
    *NSYS_REPORTS,
)
# in a folder such files are mostly something else, such as checkpoints: named only if they hold a snapshot
PERHAPS = (
    ".bz2",
    ".xz",
    ".zst",
    ".pt",
    ".pth",
    ".zip",
    ".snapshot",
    ".dump",
    ".p",
    ".html",
)
OF_OTHERS = (".pb",)  # in a folder named only if it is known what they are
NO_TRACE_JSON = "JSON, but no trace"
OWN_TIMELINE_REMEDY = "what report --perfetto wrote, to be looked at; name the traces that it was made of"
NEITHER = "neither a trace nor a memory snapshot"
_HEADER = (b'"schemaVersion"', b'"distributedInfo"')  # torch writes them first
_INFO_BYTES = 4096  # of "distributedInfo" that are read
_TAIL_BYTES = 64  # room for line ends after the last bracket
# an event's arguments come before its phase where keys are sorted
_BARE_LIST = re.compile(rb'\s*\[\s*\{.{0,4096}?"ph"\s*:\s*"[A-Za-z]"', re.DOTALL)
_RANK = re.compile(rb'"rank"\s*:\s*"?(\d{1,6})\b')
_WORLD_SIZE = re.compile(rb'"world_size"\s*:\s*"?(\d{1,6})\b')
_TIME_IN_NAME = re.compile(r"(?<!\d)(\d{13,19})(?!\d)")  # since 1970, in ms (2021) to ns


@dataclass(frozen=True)
class SourceFile:
    """A file: what it is, and what its beginning and name say of its rank and time."""

    path: Path
    what: str  # "trace", "nsys", "snapshot", "run", or "" for nothing that is read here
    why_not: str = ""  # of ""
    rank: int | None = None
    world_size: int | None = None
    time_ns: int = 0  # by the name, else by the file system
    named: bool = False  # by the user, not found in a folder
    whole: bool = True  # False: a trace whose header and end are both missing


def look_at(path: Path, named: bool = False) -> SourceFile:
    """Look at a file to say what it is. Never raises for what stands in the file."""
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
        what = ""
        why_not = f"packed with {packing}; unpack it first, or pack it with gzip"
    if what == "trace":
        why_not = _find_foreign_writer(path, head)
        what = "" if why_not else "trace"
    file = SourceFile(
        path=path,
        what=what,
        why_not=why_not,
        rank=rank_in_name(path.name),
        time_ns=time_ns,
        named=named,
    )
    return _read_header(file, head) if what == "trace" else file


def _read_header(file: SourceFile, head: bytes) -> SourceFile:
    """Add to a trace what its header tells of rank and world size, and whether the file is whole."""
    has_header = any(key in head for key in _HEADER) or is_perfetto(head)
    is_whole = has_header or _has_end(file.path, head)
    file = replace(file, whole=is_whole)
    at = head.find(_HEADER[1])
    if at < 0:
        return file
    # its groups may list many ranks after these two
    info = head[at : at + _INFO_BYTES]
    rank = _RANK.search(info)
    if rank:
        file = replace(file, rank=int(rank[1]))
    world_size = _WORLD_SIZE.search(info)
    if world_size:
        file = replace(file, world_size=int(world_size[1]))
    return file


def _classify(path: Path, head: bytes) -> tuple[str, str]:
    """Tell by its first bytes what a file is, "" for nothing that is read here; and why it is not read."""
    start = head.lstrip()[:1]
    if not start:
        return "", "empty"
    if is_own_timeline(head):
        return "", OWN_TIMELINE_REMEDY
    if is_perfetto(head):
        return "trace", ""
    if head.startswith(SQLITE_MAGIC):
        # here: other sources are not to wait for sqlite
        from megatron_lite.analysis.trace.nsys_gaps import name_database

        other = name_database(path)
        return ("", other) if other else ("nsys", "")
    if PICKLE.match(head):
        if is_snapshot_beginning(head):
            return "snapshot", ""
        return "", "a pickle, but no memory snapshot of PyTorch"
    if path.name == RUN_FILE and b'"schema"' in head:
        return "run", ""
    has_events = b'"traceEvents"' in head
    if start in (b"{", b"[", b"<") and not has_events and is_snapshot_beginning(head):
        return "snapshot", ""
    if start == b"{" and (has_events or ".trace.json" in path.name):
        return "trace", ""
    if _BARE_LIST.match(head):
        return "trace", ""
    known = name_foreign_file(head)
    if known:
        return "", known
    return "", NO_TRACE_JSON if start in (b"{", b"[") else NEITHER


def _find_foreign_writer(path: Path, head: bytes) -> str:
    """Explain why a trace is none of PyTorch's; '' where it is, or where only the whole file can tell."""
    is_whole = len(head) < TRACE_HEAD_BYTES
    if is_perfetto(head):
        is_own = are_packets_of_torch(head) or (not is_whole and any_block(path, are_packets_of_torch))
        return "" if is_own else describe_foreign_packets(head)
    if is_of_torch(head):
        return ""
    why_not = describe_foreign(head, is_whole)
    # other tools, such as VizTracer, put PyTorch's events behind their own
    if why_not and not is_whole and any_block(path, is_of_torch):
        return ""
    return why_not


def _has_end(path: Path, head: bytes) -> bool:
    """Tell by its last bytes whether the JSON is closed. Long zipped files and bare lists are believed to be."""
    if head.lstrip().startswith(b"["):
        return True
    end = head
    if len(head) == TRACE_HEAD_BYTES:
        if path.suffix == ".gz":
            return True
        with open_foreign(path) as file:
            file.seek(-_TAIL_BYTES, os.SEEK_END)
            end = file.read()
    return end.rstrip().endswith(b"}")


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
        single = [file for file in files if file not in merged]
        kept, ignored = choose_newest(single)
        ignored += [(file.path, MERGE) for file in merged]
        return kept, ignored
    # a damaged file does not tell of which run it is
    whole = [file for file in files if file.whole or file.named]
    if not whole:
        whole = list(files)
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
    kept.sort(key=lambda file: (file.rank is None, file.rank or 0))
    return kept, [*ignored, *older]


def _explain_other_run(file: SourceFile, newest: SourceFile) -> str:
    """Explain why `file` is of another run than the newest one; '' where both are of the same."""
    if file.world_size != newest.world_size:
        own_size = _describe_world_size(file)
        newest_size = _describe_world_size(newest)
        return f"of another run ({own_size}; the newest trace, {newest.path.name}, is of {newest_size}); {ALONE}"
    if _place(file) != _place(newest):
        return f"of another run, older than {newest.path}; {ALONE}"
    return ""


def _describe_world_size(file: SourceFile) -> str:
    """Write of how many ranks a file says that its run is."""
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
        who = "a process that names no rank" if rank is None else f"rank {rank}"
        # ranks write their windows at about the same time
        if _find_nearest_in_time(by_rank[newest.rank], best) is not newest:
            why = f"an older window; {who} has none of the newest one"
            ignored += [(file.path, why) for file in own]
            continue
        kept.append(best)
        for file in own:
            if file is not best:
                ignored.append((file.path, _explain_older_window(file, best)))
    return kept, ignored


def _find_nearest_in_time(files: Sequence[SourceFile], other: SourceFile) -> SourceFile:
    """Find the one of `files` that was written closest to `other`.

    Of two as close it is the later one, then one of the same name.
    """

    def distance(file: SourceFile) -> tuple[int, int, bool]:
        apart_ns = abs(file.time_ns - other.time_ns)
        has_other_name = file.path.name != other.path.name
        return apart_ns, -file.time_ns, has_other_name

    return min(files, key=distance)


def _explain_older_window(file: SourceFile, best: SourceFile) -> str:
    """Explain why `best` is read instead of `file`, both of which name the same rank, or none."""
    if best.rank is None:
        return f"not newer than {best.path.name}; neither names its rank, so they may be of two processes; {ALONE}"
    if file.time_ns == best.time_ns:
        return f"the same window of rank {best.rank} as {best.path.name}"
    return f"an older window of rank {best.rank}; {best.path.name} is the newest"


def choose_newest_reports(files: Sequence[SourceFile]) -> tuple[list[SourceFile], Ignored]:
    """Choose the newest reports of Nsight Systems: one per node, whose names differ in the node's number.

    Returns:
        The chosen files by path, and the others with the reason why they are left out.
    """
    if not files:
        return [], []
    newest = max(files, key=_age)
    why = f"older than {newest.path.name}; {ALONE}"
    kept = []
    ignored = []
    for file in files:
        if _drop_rank(file.path) == _drop_rank(newest.path):
            kept.append(file)
        else:
            ignored.append((file.path, why))
    kept.sort(key=lambda file: file.path)
    return kept, ignored


def _age(file: SourceFile) -> tuple[int, bool, str]:
    """Order files by time. The plain one of two files of a window counts as newer: it is faster to read."""
    is_plain = file.path.suffix != ".gz"
    return file.time_ns, is_plain, file.path.name


def _place(file: SourceFile) -> str:
    """Name the folder of a run, which may be one per rank or node; '' for files that were named, which lie anywhere."""
    return "" if file.named else _drop_rank(file.path.parent)


def _drop_rank(path: Path) -> str:
    """Remove the numbers of ranks and nodes from a path."""
    return _OF_ONE_RANK.sub(r"\1", str(path))


# --- traces and memory snapshots that a run wrote outside its folder, by the flags in its run.json


def find_artefacts(run_folder: Path) -> list[Path]:
    """List the files in the run's --tensorboard-dir and beside its --memory-snapshot-path that it wrote."""
    # reading the run itself says what is wrong with its record
    record, _ = read_record(run_folder)
    if record is None or record.plan is None or record.started is None:
        return []
    try:
        started_s = _to_seconds(record.started)
        ended_s = _to_seconds(record.ended)
    except ValueError:
        return []
    found: set[Path] = set()
    for written, pattern in _list_patterns(record.plan.settings):
        # the run was perhaps started elsewhere
        for folder in (Path(written), run_folder / written, run_folder.parent / written):
            if folder.is_dir():
                found.update(folder.glob(pattern))
    return sorted(path for path in found if _was_written_between(path, started_s, ended_s))


def _list_patterns(settings: Settings) -> list[tuple[str, str]]:
    """List where a run with these settings writes traces and snapshots: folders, and patterns of names in them."""
    patterns = [(settings.tensorboard_dir, "*.pt.trace.json*")]
    if settings.record_memory_history and settings.memory_snapshot_path is not None:
        name = Path(settings.memory_snapshot_path)
        patterns.append((str(name.parent), f"{name.stem}*{name.suffix}"))
    return [(folder, pattern) for folder, pattern in patterns if folder is not None and "\0" not in folder]


def _was_written_between(path: Path, started_s: float, ended_s: float) -> bool:
    """Tell whether a file was written while a run ran: other runs may write to the same folder.

    A copy may make a file younger, but leaves the time in its name.

    Args:
        path: the file.
        started_s: when the run started, seconds since 1970.
        ended_s: when it ended.
    """
    named_ns = time_in_name(path.name)
    if named_ns:
        return started_s - 1 <= named_ns / 1e9 <= ended_s + 1
    return started_s - 1 <= path.stat().st_mtime_ns / 1e9


def _to_seconds(text: str | None) -> float:
    """Read a time as seconds since 1970; endless for a run that has not ended."""
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S%z").timestamp() if text else math.inf


# --- of several runs under a folder the one that is read, and which files are not its own


def choose_run(
    folders: Sequence[Path], files: Sequence[SourceFile], newest: Sequence[SourceFile]
) -> tuple[list[Path], dict[Path, str]]:
    """Choose the run to read, of several under a folder.

    Args:
        folders: those of the runs.
        files: traces and snapshots, of these runs or of others.
        newest: those of them that would be read.

    Returns:
        The run folders, first the one to read, which wrote one of the `newest` files or is the newest run itself; and
        those of `files` that other runs wrote, with the reason why they are left out.
    """
    owners = _find_owners(set(folders), files)
    owners_of_newest = set[Path]().union(*(owners[file.path] for file in newest))

    def order(folder: Path) -> tuple[bool, float, Path]:
        records = [folder / name for name in (RUN_FILE, STEPS_FILE)]
        times_s = [path.stat().st_mtime for path in records if path.exists()]
        written_s = max(times_s, default=0.0)
        return folder not in owners_of_newest, -written_s, folder

    runs = sorted(set(folders), key=order)
    of_others = {}
    for file in files:
        own = owners[file.path]
        if own and runs[0] not in own and not file.named:
            of_others[file.path] = f"of another run than {runs[0]}; name {min(own)} alone to read it"
    return runs, of_others


def _find_owners(folders: set[Path], files: Sequence[SourceFile]) -> dict[Path, set[Path]]:
    """Find the run folders whose runs wrote each file: by their flags, or because it lies in them."""
    owners = defaultdict[Path, set[Path]](set)
    for folder in folders:
        for path in find_artefacts(folder):
            owners[path].add(folder)
    for file in files:
        around = [folder for folder in file.path.parents if folder in folders]
        # the innermost of the run folders in which it lies
        owners[file.path].update(around[:1])
    return owners


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
    """Files and folders to read, and those that were seen and are not read."""

    traces: tuple[Path, ...] = ()  # by rank
    snapshots: tuple[Path, ...] = ()
    run_folders: tuple[Path, ...] = ()  # at most one: the run that wrote the traces or snapshots, else the newest
    ignored: tuple[tuple[Path, str], ...] = ()  # with the reason


def discover_sources(paths: Sequence[Path], *, may_be_none: bool = False) -> Sources:
    """Find what to read under `paths`.

    Args:
        paths: files and folders.
        may_be_none: whether something else tells of the job.

    Raises:
        UserError: nothing is readable, one line.
    """
    looked_at, folders, left_out = _look_under(paths)
    folders += [file.path.parent for file in looked_at if file.what == "run"]
    files = [file for file in looked_at if file.what not in ("", "run")]
    left_out += [(file.path, file.why_not) for file in looked_at if not file.what]
    newest, _ = _choose_files(files)
    runs, of_others = choose_run(folders, files, newest)
    of_this_run = [file for file in files if file.path not in of_others]
    chosen, older = _choose_files(of_this_run)
    ignored = _leave_out_exported(left_out, files)
    ignored += of_others.items()
    ignored += older
    for folder in runs[1:]:
        ignored.append((folder, f"another run's folder than {runs[0]}; {ALONE}"))
    if not (chosen or runs or may_be_none):
        raise UserError(_explain_nothing_found(paths, ignored))
    traces = [file.path for file in chosen if file.what != "snapshot"]
    snapshots = [file.path for file in chosen if file.what == "snapshot"]
    return Sources(
        traces=tuple(traces),
        snapshots=tuple(snapshots),
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
        folder = path
        if not path.is_dir():
            if path.name not in (RUN_FILE, STEPS_FILE, RANKS_FILE):
                looked_at.append(look_at(path, named=True))
                continue
            folder = path.parent
        listed = list(_list_files(folder, left_out))
        under = _leave_out_processes(listed, left_out)
        folders += [file.parent for file in under if file.name in (RUN_FILE, STEPS_FILE)]
        known = {file.path.resolve() for file in looked_at if file.what}
        looked_at += _look_at_candidates(under, known)
    return looked_at, folders, left_out


def _look_at_candidates(under: Sequence[Path], known: set[Path]) -> list[SourceFile]:
    """Look at the files under a folder that may be traces or snapshots, and at what runs in it wrote elsewhere.

    Args:
        under: the folder's files.
        known: resolved paths of the files that were looked at before.
    """
    found = [file for file in under if file.name != RUN_FILE and not OWN_FILES.fullmatch(file.name)]
    for file in under:
        if file.name == RUN_FILE:
            found += find_artefacts(file.parent)
    # of several paths to one file the first one counts, which stands where the last one was found
    endings = CANDIDATES + PERHAPS + OF_OTHERS
    candidates = {file.resolve(): file for file in reversed(found) if file.suffix in endings}
    seen = []
    for resolved, file in reversed(candidates.items()):
        if resolved not in known:
            seen.append(look_at(file))
    return [file for file in seen if _is_worth_naming(file)]


def _is_worth_naming(file: SourceFile) -> bool:
    """Whether a file under a folder is read, or is told of as left out."""
    if file.path.suffix in OF_OTHERS:
        return file.why_not != NEITHER
    # what a report wrote there is passed over, as its page is
    return bool(file.what) or (file.path.suffix in CANDIDATES and file.why_not != OWN_TIMELINE_REMEDY)


def _leave_out_exported(left_out: Ignored, files: Sequence[SourceFile]) -> Ignored:
    """Drop from `left_out` the reports of Nsight Systems whose exported databases are among `files`."""
    exported = {file.path.with_suffix("") for file in files if file.what == "nsys"}
    kept = []
    for path, why in left_out:
        is_exported = path.suffix in NSYS_REPORTS and path.with_suffix("") in exported
        if not is_exported:
            kept.append((path, why))
    return kept


def _explain_nothing_found(paths: Sequence[Path], ignored: Ignored) -> str:
    """Write one line that says why nothing under `paths` can be read."""
    if len(ignored) == 1:
        [(path, why)] = ignored
        return f"{path}: {why}; nothing to report on."
    line = f"{', '.join(map(str, paths))}: no trace, memory snapshot or run found"
    if not ignored:
        return f"{line}; {TO_NAME}."
    reasons = [f"{path.name}: {why}" for path, why in ignored[:MAX_UNREAD_REASONS]]
    more = len(ignored) - MAX_UNREAD_REASONS
    if more > 0:
        reasons.append(f"and {more} more")
    return f"{line} ({'; '.join(reasons)}); {TO_NAME}."


def _choose_files(files: Sequence[SourceFile]) -> tuple[list[SourceFile], Ignored]:
    """Choose the newest window's traces or, without any, its reports of Nsight Systems; and its snapshots.

    Returns:
        The chosen files by rank, and the others with the reason why they are left out.
    """

    def select(what: str) -> list[SourceFile]:
        return [file for file in files if file.what == what]

    told, twice = _choose_form(select("trace"))
    traces, older = choose_newest(told)
    snapshots, older_snapshots = choose_newest(select("snapshot"))
    reports, older_reports = choose_newest_reports(select("nsys"))
    if traces and reports:
        older_reports += [(file.path, BESIDE_TRACES) for file in reports]
        reports = []
    return [*traces, *reports, *snapshots], [*twice, *older, *older_reports, *older_snapshots]


def _choose_form(traces: Sequence[SourceFile]) -> tuple[list[SourceFile], Ignored]:
    """Choose JSON of traces that were exported in both forms of torch, beside each other under the same name.

    Returns:
        The chosen files, and the others with the reason why they are left out.
    """
    of_json = {_cut_endings(file.path): file.path for file in traces if not _is_named_packets(file.path)}
    kept = []
    left_out = []
    for file in traces:
        twin = of_json.get(_cut_endings(file.path))
        if twin is not None and twin != file.path and _is_named_packets(file.path):
            left_out.append((file.path, f"the same as {twin.name}, which says more"))
        else:
            kept.append(file)
    return kept, left_out


def _is_named_packets(path: Path) -> bool:
    """Whether a file's name is that of a trace of Perfetto's."""
    return path.name.removesuffix(".gz").endswith(perfetto_trace.ENDINGS)


def _cut_endings(path: Path) -> Path:
    """Cut off what names the form of a trace."""
    name = path.name.removesuffix(".gz")
    for ending in (".json", *perfetto_trace.ENDINGS, ".trace", ".pt"):
        name = name.removesuffix(ending)
    return path.with_name(name)


def _leave_out_processes(files: Sequence[Path], left_out: Ignored) -> list[Path]:
    """Leave out files of processes that trained beside a run's first one, which have folders in its folder.

    Args:
        files: all files.
        left_out: grows by a line for each such run.

    Returns:
        The other files.
    """
    runs = {file.parent for file in files if file.name in (RUN_FILE, STEPS_FILE)}
    beside = sorted(folder for folder in runs if folder.name.startswith(PROCESS_FOLDER) and folder.parent in runs)
    for run in sorted({folder.parent for folder in beside}):
        others = [folder.name for folder in beside if folder.parent == run]
        named = ", ".join(others[:MAX_PROCESSES_NAMED])
        if len(others) > MAX_PROCESSES_NAMED:
            named += ", ..."
        said = (
            f"{len(others) + 1} processes without ranks trained at the same time; "
            "this report is of the first, the others are in"
        )
        left_out.append((run, f"{said} {named}"))
    return [file for file in files if not any(folder in file.parents for folder in beside)]


def _list_files(folder: Path, left_out: Ignored) -> Iterator[Path]:
    """List the files below `folder`, without hidden ones and checkpoints."""
    count = 0

    def complain(error: OSError) -> None:
        left_out.append((Path(error.filename), f"cannot be opened ({error.strerror})"))

    for place, folders, names in os.walk(folder, onerror=complain):
        # os.walk goes into those that are left in the list
        folders[:] = sorted(name for name in folders if not name.startswith(".") and iteration_of(name) is None)
        for name in sorted(names):
            if count >= MAX_LISTED_FILES:
                left_out.append((folder, f"more than {MAX_LISTED_FILES:,} files; the rest was not looked at"))
                return
            if not name.startswith("."):
                count += 1
                yield Path(place, name)
