"""What a report of Nsight Systems lacks, by its own words, and which of its tables hold work of a device that is not read."""

import re
import sqlite3
from collections.abc import Callable, Mapping

Query = Callable[..., sqlite3.Cursor]
Columns = Mapping[str, set[str]]  # table -> its columns
Owned = list[tuple[int | None, str]]  # (process, or None for all; a sentence)

READ_TABLES = {
    f"CUPTI_ACTIVITY_KIND_{name}"
    for name in ("RUNTIME", "DRIVER", "KERNEL", "MEMCPY", "MEMSET", "SYNCHRONIZATION", "GRAPH_TRACE")
}
# On a stream, and no work: events that were recorded, allocations, overhead of the profiler.
NO_WORK_TABLES = re.compile(r"CUDA_EVENT|MEMORY|MEM_POOL|MEMORY_POOL|OVERHEAD|ENVIRONMENT|CALLCHAIN|NODE_EVENTS|USAGE")
_WARNING, _ERROR = 2, 3  # ENUM_DIAGNOSTIC_SEVERITY_LEVEL
_MAX_TEXT = 300
_MAX_MESSAGES = 20
_LOSS = re.compile(r"not all\b.*\bevents|\blost\b|\bdropp|\bdiscard|\boverflow|\bincomplete", re.IGNORECASE)


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
    told = [(pid or None, " ".join(said.split())[:_MAX_TEXT], level) for pid, said, level in rows if said]
    told.sort(key=lambda one: (-one[2], -len(one[1]), one[1]))
    return [(pid, said) for pid, said, _ in told[:_MAX_MESSAGES]]


def tells_of_loss(text: str) -> bool:
    """Does this message of nsys say that events are missing?"""
    return bool(_LOSS.search(text))
