"""What a single file is, by its first bytes."""

import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.analysis.trace.blocks import first_bytes
from megatron_lite.analysis.trace.kineto_header import rank_in_name
from megatron_lite.analysis.trace.read import NSYS_REPORTS, SQLITE_MAGIC, export_first
from megatron_lite.run_folder import RUN_FILE

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
