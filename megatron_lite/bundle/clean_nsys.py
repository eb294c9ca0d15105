"""Writes an export of Nsight Systems anew: the tables and columns that a report reads, with their texts cleaned."""

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from megatron_lite.analysis.trace.columns import Kind, TraceError
from megatron_lite.analysis.trace.nsys import parse_range
from megatron_lite.analysis.trace.sqlite_file import open_database
from megatron_lite.bundle.names import Substitutes

_Clean = Callable[[Substitutes, str], str]
# work of devices, calls, communication: numbers, and numbers of strings
_TABLES = re.compile(
    r"CUPTI_ACTIVITY_KIND_\w+|NVTX_EVENTS|OSRT_API|DIAGNOSTIC_EVENT|TARGET_INFO_GPU|TARGET_INFO_SESSION_START_TIME"
    r"|ANALYSIS_DETAILS|META_DATA_EXPORT|EXPORT_META_DATA|(?:MPI|UCP|OPENSHMEM|NVSHMEM)_\w*EVENTS"
)
_STRINGS = "StringIds"
_COLUMN = re.compile(r"[A-Za-z_]\w{0,60}")
# columns that hold the number of a string
_REFERENCES = ("nameId", "shortName", "demangledName", "mangledName")
_EXPORT_KEYS = ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION")
_BATCH = 10_000


def _clean_range(names: Substitutes, text: str) -> str:
    """The text of an NVTX range: an operator's name with its shapes, or a label."""
    _, kind, _, _ = parse_range(text)
    return names.clean_name(text) if kind is Kind.OP else names.clean_label(text)


# how texts in columns are cleaned, by table; other texts go
_TEXTS: dict[str, dict[str, _Clean]] = {
    "NVTX_EVENTS": {"text": _clean_range},
    "DIAGNOSTIC_EVENT": {"text": Substitutes.clean_name},
    "TARGET_INFO_GPU": {"name": Substitutes.clean_name},
}


def clean_nsys(source: Path, target: Path, names: Substitutes) -> None:
    """Write the export in `source` to `target`, without what may not be shown.

    Args:
        source: A report of Nsight Systems, exported to sqlite.
        target: The new file.
        names: What stands in the place of names.

    Raises:
        TraceError: `source` cannot be read.
    """
    try:
        with open_database(source) as read, closing(sqlite3.connect(target)) as written:
            _Copy(read, written, names).copy()
            written.commit()
    except sqlite3.Error as error:
        raise TraceError(f"{source}: sqlite cannot read it ({error}); export the report again.") from None


class _Copy:
    """Copies the known tables of one database."""

    def __init__(self, read: sqlite3.Connection, written: sqlite3.Connection, names: Substitutes):
        self.read = read
        self.written = written
        self.names = names
        # string's number -> how it is cleaned
        self.strings: dict[int, _Clean] = {}

    def copy(self) -> None:
        """Copy the tables, and of the strings those that they refer to."""
        tables = [
            name for (name,) in self.read.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        ]
        known = [table for table in tables if _TABLES.fullmatch(table) and self._is_public(table)]
        self.names.drop("other tables of the export", len(set(tables) - set(known) - {_STRINGS}))
        for table in known:
            columns = [row[1] for row in self.read.execute(f'PRAGMA table_info("{table}")')]
            self._copy_table(table, [name for name in columns if _COLUMN.fullmatch(name) and self._is_public(name)])
        if _STRINGS in tables:
            self._copy_strings()

    def _is_public(self, name: str) -> bool:
        """Whether the name of a table or a column is made of known words."""
        return self.names.clean_name(name) == name

    def _copy_table(self, table: str, columns: list[str]) -> None:
        if not columns:
            return
        quoted = ", ".join(f'"{column}"' for column in columns)
        self.written.execute(f'CREATE TABLE "{table}" ({quoted})')
        places = ", ".join("?" * len(columns))
        insert = f'INSERT INTO "{table}" VALUES ({places})'
        cursor = self.read.execute(f'SELECT {quoted} FROM "{table}"')
        while rows := cursor.fetchmany(_BATCH):
            self.written.executemany(insert, [self._clean_row(table, columns, row) for row in rows])

    def _clean_row(self, table: str, columns: list[str], row: tuple[object, ...]) -> list[object]:
        if table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            return self._clean_fact(columns, row)
        rules = _TEXTS.get(table, {})
        cleaned: list[object] = []
        for column, value in zip(columns, row):
            if isinstance(value, str) and column in rules:
                value = rules[column](self.names, value)
            elif isinstance(value, int):
                self._note_string(table, column, value)
            elif not isinstance(value, float):
                value = None
            cleaned.append(value)
        return cleaned

    def _clean_fact(self, columns: list[str], row: tuple[object, ...]) -> list[object]:
        """A row of name and value, of which versions stay."""
        by_column = dict(zip(columns, row))
        if by_column.get("name") not in _EXPORT_KEYS:
            return [None] * len(columns)
        value = str(by_column.get("value", ""))
        kept = {"name": by_column["name"], "value": self.names.clean_name(value)}
        return [kept.get(column) for column in columns]

    def _note_string(self, table: str, column: str, number: int) -> None:
        if column in _REFERENCES:
            self.strings.setdefault(number, Substitutes.clean_name)
        elif column == "textId":
            self.strings[number] = _clean_range if table == "NVTX_EVENTS" else Substitutes.clean_name

    def _copy_strings(self) -> None:
        self.written.execute(f"CREATE TABLE {_STRINGS} (id INTEGER NOT NULL PRIMARY KEY, value TEXT)")
        cursor = self.read.execute(f"SELECT id, value FROM {_STRINGS} WHERE value IS NOT NULL")
        insert = f"INSERT OR IGNORE INTO {_STRINGS} VALUES (?, ?)"
        unread = 0
        while rows := cursor.fetchmany(_BATCH):
            kept = [(number, str(text)) for number, text in rows if number in self.strings]
            unread += len(rows) - len(kept)
            self.written.executemany(
                insert, [(number, self.strings[number](self.names, text)) for number, text in kept]
            )
        self.names.drop("strings of the export that nothing read refers to", unread)
