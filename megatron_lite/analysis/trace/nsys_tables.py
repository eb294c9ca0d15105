"""Reading the tables of an Nsight Systems export, whichever of them and of their columns are there."""

import sqlite3

import numpy as np

_PUSH_POP, _START_END, _MARK = 59, 60, 34  # ENUM_NSYS_EVENT_TYPE


class NsysTables:
    """The tables of an open database."""

    def __init__(self, database: sqlite3.Connection):
        self._database = database
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")]
        self._columns = {name: self._columns_of(name) for name in names}
        self.is_nsys = "StringIds" in self._columns and (
            "NVTX_EVENTS" in self._columns
            or any(name.startswith(("CUPTI_", "META_DATA_", "EXPORT_META")) for name in names)
        )
        strings = database.execute("SELECT id, value FROM StringIds WHERE value IS NOT NULL") if self.is_nsys else ()
        self.strings = {number: str(text) for number, text in strings}

    def _columns_of(self, table: str) -> set[str]:
        quoted = table.replace('"', '""')
        return {row[1] for row in self._database.execute(f'PRAGMA table_info("{quoted}")')}

    def ints(self, table: str, *columns: str) -> np.ndarray:
        """int64 [rows, columns]; -1 where a value or a column is missing; (0, columns) for a table that is not there."""
        if not {"start", "end"} <= self._columns.get(table, set()):
            return np.empty((0, len(columns)), np.int64)
        have = self._columns[table]
        wanted = ", ".join(f"coalesce(CAST({name} AS INTEGER), -1)" if name in have else "-1" for name in columns)
        rows = self._database.execute(f"SELECT {wanted} FROM {table} WHERE start IS NOT NULL").fetchall()
        return np.array(rows, np.int64).reshape(-1, len(columns))

    def nvtx(self) -> tuple[np.ndarray, list[str]]:
        """(int64 [rows, 3]: start, end, thread; their texts) of the ranges that ended."""
        if not (text := self._nvtx_text()):
            return np.empty((0, 3), np.int64), []
        rows = self._database.execute(
            f"SELECT CAST(start AS INTEGER), CAST(end AS INTEGER), coalesce(CAST(globalTid AS INTEGER), -1), {text} "
            "FROM NVTX_EVENTS WHERE eventType IN (?, ?) AND start IS NOT NULL AND end IS NOT NULL", (_PUSH_POP, _START_END),
        ).fetchall()  # fmt: skip
        rows = [row for row in rows if row[3]]
        return np.array([row[:3] for row in rows], np.int64).reshape(-1, 3), [str(row[3]) for row in rows]

    def marks(self) -> list[tuple[int, str]]:
        """(process id, text) of NVTX marks that name a rank."""
        if not (text := self._nvtx_text()):
            return []
        return self._database.execute(
            f"SELECT globalTid >> 24 & 0xffffff, {text} AS said FROM NVTX_EVENTS WHERE eventType = ? "
            "AND said LIKE 'rank %'", (_MARK,),
        ).fetchall()  # fmt: skip

    def _nvtx_text(self) -> str | None:
        """SQL for the text of a row of NVTX_EVENTS; None without the table."""
        have = self._columns.get("NVTX_EVENTS", set())
        if not {"start", "end", "eventType", "globalTid"} <= have:
            return None
        registered = "(SELECT value FROM StringIds WHERE id = textId)"
        parts = [part for name, part in (("text", "text"), ("textId", registered)) if name in have]
        return f"coalesce({', '.join(parts)}, NULL)" if parts else None

    def devices(self) -> tuple[str, ...]:
        """Names of the GPUs, by index."""
        if not {"id", "name"} <= self._columns.get("TARGET_INFO_GPU", set()):
            return ()
        return tuple(str(name) for (name,) in self._database.execute("SELECT name FROM TARGET_INFO_GPU ORDER BY id"))

    def clock_ns(self) -> int | None:
        """Nanoseconds since 1970 of the report's time 0, by the machine's clock; None where it does not say."""
        if "utcEpochNs" not in self._columns.get("TARGET_INFO_SESSION_START_TIME", set()):
            return None
        row = self._database.execute(
            "SELECT CAST(utcEpochNs AS INTEGER) FROM TARGET_INFO_SESSION_START_TIME"
        ).fetchone()
        start = None
        if "startTime" in self._columns.get("ANALYSIS_DETAILS", set()):
            start = self._database.execute("SELECT CAST(startTime AS INTEGER) FROM ANALYSIS_DETAILS").fetchone()
        return None if not row or row[0] is None else int(row[0]) - int(start[0] or 0 if start else 0)

    def facts(self) -> dict:
        """The version of the tool and of its tables."""
        for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            if {"name", "value"} <= self._columns.get(table, set()):
                rows = dict(self._database.execute(f"SELECT name, value FROM {table}"))
                wanted = {"EXPORT_PRODUCT_VERSION": "nsys_version", "EXPORT_SCHEMA_VERSION": "nsys_schema"}
                return {ours: str(rows[theirs]) for theirs, ours in wanted.items() if theirs in rows}
        return {}
