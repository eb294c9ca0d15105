"""Tell what a report of Nsight Systems lacks, by its own words and by tables that are not read."""

import re
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_lite.analysis.trace.diagnostics import MAX_DIAGNOSTIC, MAX_DIAGNOSTICS
from megatron_lite.analysis.trace.sqlite_file import open_database

Query = Callable[..., sqlite3.Cursor]
Columns = Mapping[str, set[str]]  # table -> its columns
Owned = list[tuple[int | None, str]]  # (process, or None for all; a sentence)

READ_TABLES = {
    f"CUPTI_ACTIVITY_KIND_{name}"
    for name in ("RUNTIME", "DRIVER", "KERNEL", "MEMCPY", "MEMSET", "SYNCHRONIZATION", "GRAPH_TRACE")
}
# On a stream, and no work: events that were recorded, allocations, overhead of the profiler.
NO_WORK_TABLES = re.compile(r"CUDA_EVENT|MEMORY|MEM_POOL|MEMORY_POOL|OVERHEAD|ENVIRONMENT|CALLCHAIN|NODE_EVENTS|USAGE")
# Communication that a thread of the host waits in.
HOST_COMMUNICATION = re.compile(r"(MPI|UCP|OPENSHMEM|NVSHMEM)_.*EVENTS$")
MIN_CALL_MS = 1.0  # of the operating system's calls that a note names
# (who wrote it and what to name instead, a table of it)
OTHER_DATABASES = (
    (
        "a database of Ascend's profiler; name its trace_view.json",
        re.compile(r"(CANN_API|STRING_IDS|ENUM_HCCL_\w+|PYTORCH_API)$"),
    ),
    ("a database of rocprofv3 (rocpd), which is not read; torch.profiler records a trace", re.compile(r"rocpd_")),
    ("a database of nvprof, which is not read; torch.profiler records a trace", re.compile(r"StringTable$")),
)
# ENUM_DIAGNOSTIC_SEVERITY_LEVEL
_WARNING = 2
_ERROR = 3


def find_unread_tables(query: Query, columns: Columns) -> Owned:
    """Tables with work on a stream of a device that no reader knows, by process."""
    found: Owned = []
    for table, have in sorted(columns.items()):
        on_stream = {"start", "end"} <= have and {"deviceId", "streamId"} & have
        if table in READ_TABLES or NO_WORK_TABLES.search(table) or not on_stream:
            continue
        owner = "globalPid >> 24 & 0xffffff" if "globalPid" in have else "NULL"
        quoted = table.replace('"', '""')
        counted = query(f'SELECT {owner}, count(*) FROM "{quoted}" WHERE end > start GROUP BY 1')
        found += [(pid, f"{rows:,} rows of the table {table}, work of the GPU, were not read") for pid, rows in counted]
    return found


def find_unread_communication(query: Query, columns: Columns) -> Owned:
    """Tables with communication on a thread of the host, as of MPI, by process."""
    found: Owned = []
    for table, have in sorted(columns.items()):
        if not HOST_COMMUNICATION.match(table) or not {"start", "end", "globalTid"} <= have:
            continue
        quoted = table.replace('"', '""')
        rows_and_ns = "count(*), sum(end - start)"
        sums = query(f'SELECT globalTid >> 24 & 0xffffff, {rows_and_ns} FROM "{quoted}" WHERE end > start GROUP BY 1')
        for pid, rows, ns in sums:
            lost = f"{rows:,} rows of the table {table}, {ns / 1e6:,.1f} ms of communication of the host, were not read"
            found.append((pid, lost))
    return found


def find_system_calls(query: Query, columns: Columns) -> Owned:
    """The call of the operating system that takes longest on threads that launch kernels, by process.

    They are recorded by default and not read: while the device waits for the host, this is what it may do.
    """
    is_there = {"start", "end", "globalTid", "nameId"} <= columns.get("OSRT_API", set())
    if not is_there or not {"globalTid", "nameId"} <= columns.get("CUPTI_ACTIVITY_KIND_RUNTIME", set()):
        return []
    launching = (
        "SELECT DISTINCT globalTid FROM CUPTI_ACTIVITY_KIND_RUNTIME JOIN StringIds ON nameId = id "
        "WHERE value LIKE '%Launch%'"
    )
    sums = query(
        "SELECT globalTid >> 24 & 0xffffff, (SELECT value FROM StringIds WHERE id = nameId), count(*), "
        f"sum(end - start) AS ns FROM OSRT_API WHERE end > start AND globalTid IN ({launching}) "
        "GROUP BY 1, 2 ORDER BY ns DESC"
    )
    longest: dict[int, str] = {}
    for pid, name, calls, ns in sums:
        if name and ns >= MIN_CALL_MS * 1e6:
            text = f"{calls:,} calls of {name} on threads that launch kernels take {ns / 1e6:,.1f} ms (OSRT_API): "
            longest.setdefault(pid, text + "no figure of the host tells them apart from Python")
    return list(longest.items())


def read_diagnostics(query: Query, columns: Columns) -> Owned:
    """Warnings and errors of nsys about this record, errors first, then the longest, each once; by process."""
    have = columns.get("DIAGNOSTIC_EVENT", set())
    texts = [name for name in ("text", "textId") if name in have]
    if not texts or "severity" not in have:
        return []
    by_id = "(SELECT value FROM StringIds WHERE id = textId)"
    expressions = [by_id if name == "textId" else name for name in texts]
    text = f"coalesce({', '.join(expressions)}, NULL)"
    owner = "globalPid >> 24 & 0xffffff" if "globalPid" in have else "NULL"
    rows = query(
        f"SELECT DISTINCT {owner}, CAST({text} AS TEXT), CAST(severity AS INTEGER) FROM DIAGNOSTIC_EVENT "
        "WHERE severity IN (?, ?)", (_WARNING, _ERROR),
    ).fetchall()  # fmt: skip
    told = []
    for pid, said, level in rows:
        if said:
            shown = " ".join(said.split())[:MAX_DIAGNOSTIC]
            told.append((pid or None, shown, level))
    told.sort(key=lambda one: (-one[2], -len(one[1]), one[1]))
    return [(pid, said) for pid, said, _ in told[:MAX_DIAGNOSTICS]]


def name_database(path: Path) -> str:
    """Name the other profiler that wrote the sqlite file; "" for what may be of Nsight Systems, or cannot be read."""
    try:
        with open_database(path) as database:
            tables = {str(name) for (name,) in database.execute("SELECT name FROM sqlite_master")}
    except (sqlite3.Error, ValueError):
        return ""
    if "StringIds" in tables:
        return ""
    return next((writer for writer, known in OTHER_DATABASES if any(map(known.match, tables))), "")
