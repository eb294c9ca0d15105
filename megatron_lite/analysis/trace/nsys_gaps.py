"""What a report of Nsight Systems lacks, by its own words,
and which of its tables hold work of a device that is not read."""

import re
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

from megatron_lite.analysis.trace.diagnostics import MAX_DIAGNOSTIC, MAX_DIAGNOSTICS

Query = Callable[..., sqlite3.Cursor]
Columns = Mapping[str, set[str]]  # table -> its columns
Owned = list[tuple[int | None, str]]  # (process, or None for all; a sentence)

READ_TABLES = {
    f"CUPTI_ACTIVITY_KIND_{name}"
    for name in ("RUNTIME", "DRIVER", "KERNEL", "MEMCPY", "MEMSET", "SYNCHRONIZATION", "GRAPH_TRACE")
}
# On a stream, and no work: events that were recorded, allocations, overhead of the profiler.
NO_WORK_TABLES = re.compile(r"CUDA_EVENT|MEMORY|MEM_POOL|MEMORY_POOL|OVERHEAD|ENVIRONMENT|CALLCHAIN|NODE_EVENTS|USAGE")
# (who wrote it and what to name instead, a table of it)
OTHER_DATABASES = (
    (
        "a database of Ascend's profiler; name its trace_view.json",
        re.compile(r"(CANN_API|STRING_IDS|ENUM_HCCL_\w+|PYTORCH_API)$"),
    ),
    ("a database of rocprofv3 (rocpd), which is not read; torch.profiler records a trace", re.compile(r"rocpd_")),
    ("a database of nvprof, which is not read; torch.profiler records a trace", re.compile(r"StringTable$")),
)
_WARNING, _ERROR = 2, 3  # ENUM_DIAGNOSTIC_SEVERITY_LEVEL


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


def read_diagnostics(query: Query, columns: Columns) -> Owned:
    """Warnings and errors of nsys about this record, errors first, then the longest, each once; by process."""
    have = columns.get("DIAGNOSTIC_EVENT", set())
    texts = [name for name in ("text", "textId") if name in have]
    if not texts or "severity" not in have:
        return []
    by_id = "(SELECT value FROM StringIds WHERE id = textId)"
    text = f"coalesce({', '.join(by_id if name == 'textId' else name for name in texts)}, NULL)"
    owner = "globalPid >> 24 & 0xffffff" if "globalPid" in have else "NULL"
    rows = query(
        f"SELECT DISTINCT {owner}, CAST({text} AS TEXT), CAST(severity AS INTEGER) FROM DIAGNOSTIC_EVENT "
        "WHERE severity IN (?, ?)", (_WARNING, _ERROR),
    ).fetchall()  # fmt: skip
    told = [(pid or None, " ".join(said.split())[:MAX_DIAGNOSTIC], level) for pid, said, level in rows if said]
    told.sort(key=lambda one: (-one[2], -len(one[1]), one[1]))
    return [(pid, said) for pid, said, _ in told[:MAX_DIAGNOSTICS]]


def name_database(path: Path) -> str:
    """Which other profiler wrote the sqlite file; '' for what may be of Nsight Systems, or cannot be read."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            tables = {str(name) for (name,) in database.execute("SELECT name FROM sqlite_master")}
    except (sqlite3.Error, ValueError):
        return ""
    if "StringIds" in tables:
        return ""
    return next((writer for writer, known in OTHER_DATABASES if any(map(known.match, tables))), "")
