"""An Nsight Systems report, exported with `nsys export --type sqlite` -> a Trace per process.

Tables and columns differ between versions and stand there only if they hold something: what is not there is empty.
"""

import ast
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_lite.analysis.trace.columns import Kind, MemoryEvents, Numbered, Shapes, Trace, TraceError
from megatron_lite.analysis.trace.repair import repaired

# --- reading the tables of an Nsight Systems export, whichever of them and of their columns are there

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


# --- names of Nsight Systems as the profiler of PyTorch would write them, so that one analysis serves both

# torch.autograd.profiler.emit_nvtx: "aten::mm, seq = 12, sizes = [[2, 3], [3, 4]], op_id = 7, input_op_ids = [...]"
_EMITTED = re.compile(r"(?P<name>.+?)(?:, seq = (?P<seq>\d{1,18}))?(?:, op_id = \d+)?(?:, sizes = (?P<sizes>\[.*?\]))?"
                      r"(?:, op_id = \d+)?(?:, input_op_ids = .*)?\Z", re.DOTALL)  # fmt: skip
_OPERATOR = re.compile(r"(aten|torch|autograd|c10d|prims|triton|inductor|_?[A-Za-z]\w*)::\w|.*Backward\d*\Z")
_VERSION = re.compile(r"(_ptsz|_ptds)?_v\d+(_ptsz|_ptds)?\Z")
_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
           11: "HtoD", 12: "DtoH", 13: "DtoD"}  # fmt: skip  # ENUM_CUDA_MEMCPY_OPER; from 11 on: unified memory
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
_SYNCS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}  # ENUM_CUPTI_SYNC_TYPE


class NvtxName(NamedTuple):
    """A range's text taken apart."""

    name: str
    kind: Kind
    sequence: int  # autograd's; -1: not given
    shapes: Shapes | None


def nvtx_name(text: str) -> NvtxName:
    """OP for the ranges that PyTorch emits for operators, ANNOTATION for those that code named."""
    found = _EMITTED.match(text)
    emitted = found is not None and len(found["name"]) < len(text)
    name = found["name"] if emitted else text
    kind = Kind.OP if emitted or _OPERATOR.match(name) else Kind.ANNOTATION
    dims = _dims(found["sizes"]) if emitted and found["sizes"] else None
    shapes = Shapes(dims, ("",) * len(dims)) if dims else None
    return NvtxName(name, kind, int(found["seq"]) if emitted and found["seq"] else -1, shapes)


def _dims(text: str) -> tuple | None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return _tuples(value) if isinstance(value, list) else None


def _tuples(value):
    return tuple(_tuples(one) if isinstance(one, list) else one for one in value)


def runtime_name(name: str) -> str:
    """cudaLaunchKernel of cudaLaunchKernel_v7000."""
    return _VERSION.sub("", name)


def memcpy_name(copy: int, source: int, target: int) -> str:
    """Memcpy HtoD (Pageable -> Device)."""
    where = f"{_MEMORIES.get(source, 'Unknown')} -> {_MEMORIES.get(target, 'Unknown')}"
    return f"Memcpy {_COPIES.get(copy, 'Unknown')} ({where})"


def sync_name(kind: int) -> str:
    """Stream Sync, Event Sync, ..."""
    return _SYNCS.get(kind, "Sync")


# --- an Nsight Systems report, exported with `nsys export --type sqlite` -> a Trace per process

_OUR_MARK = re.compile(r"rank (\d+) of (\d+)\b")  # megatron_lite/instruments/nsys_range.py
_MAX_NS = 4 * 10**18  # differences of such times still fit 64 bits
_PIECE_COLUMNS = ("name", "kind", "start", "end", "thread", "device", "stream", "correlation", "num_bytes", "shapes",
                  "sequence")  # fmt: skip


def read_nsys(path: Path) -> tuple[Trace, ...]:
    """The traces in `path`, by process id. Raises TraceError for an sqlite file of something else."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            database.text_factory = lambda raw: raw.decode("utf-8", "replace")
            tables = NsysTables(database)
            if not tables.is_nsys:
                raise TraceError(
                    f"{path}: an sqlite file, but not of Nsight Systems (nsys export --type sqlite makes one)."
                )
            return _traces(path, tables)
    except sqlite3.Error as error:
        raise TraceError(f"{path}: damaged, sqlite says: {error}; export the report again.") from None


def _traces(path: Path, tables: NsysTables) -> tuple[Trace, ...]:
    names = Numbered()
    nvtx, nvtx_shapes = _nvtx(tables, names)
    pieces = [nvtx, _runtime(tables, names), _kernels(tables, names), _copies(tables, names),
              _memsets(tables, names), _syncs(tables, names)]  # fmt: skip
    process = np.concatenate([piece["process"] for piece in pieces])
    columns = {key: np.concatenate([piece[key] for piece in pieces]) for key in _PIECE_COLUMNS}
    if not len(process):
        raise TraceError(f"{path}: no CUDA or NVTX events in it; trace with -t cuda,nvtx.")
    context = _Context(path, tables, tuple(names), nvtx_shapes)
    return tuple(
        context.trace(int(pid), {k: v[process == pid] for k, v in columns.items()}) for pid in np.unique(process)
    )


class _Context:
    """What all processes of a report have in common."""

    def __init__(self, path: Path, tables: NsysTables, names: tuple[str, ...], shapes: tuple):
        self.path, self.tables, self.names, self.shapes = path, tables, names, shapes
        self.devices, self.clock_ns, self.facts = tables.devices(), tables.clock_ns(), tables.facts()
        self.marks = dict(tables.marks())

    def trace(self, pid: int, columns: dict[str, np.ndarray]) -> Trace:
        first = int(columns["start"].min())
        thread_ids, thread = np.unique(columns["thread"], return_inverse=True)
        nothing = np.full(len(thread), -1, np.int64)
        events, notes = repaired({
            "name": columns["name"].astype(np.int32), "kind": columns["kind"].astype(np.uint8),
            "start_ns": columns["start"] - first, "end_ns": np.maximum(columns["end"], columns["start"]) - first,
            "thread": thread.astype(np.int32), "device": np.clip(columns["device"], -1, 2**15 - 1).astype(np.int16),
            "stream": np.clip(columns["stream"], -1, 2**31 - 1).astype(np.int32), "correlation": columns["correlation"],
            "num_bytes": columns["num_bytes"], "shapes": columns["shapes"].astype(np.int32),
            "collective": nothing.astype(np.int32), "sequence": columns["sequence"], "forward_thread": nothing,
        })  # fmt: skip
        mark = _OUR_MARK.match(self.marks.get(pid, ""))
        if not len(np.intersect1d(np.unique(columns["kind"]), (Kind.KERNEL, Kind.MEMCPY))):
            notes.append("no GPU work was recorded (nsys was run without -t cuda, or on a machine without a GPU)")
        return Trace(
            source=f"{self.path.name} (process {pid})", writer="nsys", rank=int(mark[1]) if mark else None,
            world_size=int(mark[2]) if mark else None, devices=self.devices,
            base_ns=None if self.clock_ns is None else self.clock_ns + first,
            with_stack=False, with_shapes=bool((events.shapes >= 0).any()), names=self.names,
            threads=tuple((str(pid), str(tid) if tid >= 0 else "") for tid in thread_ids.tolist()), shapes=self.shapes,
            collectives=(), events=events, memory=_no_memory(), notes=tuple(notes), facts=self.facts,
        )  # fmt: skip


def _no_memory() -> MemoryEvents:
    none = np.empty(0, np.int64)
    return MemoryEvents(none, none, none, none, none.astype(np.int16))


def _piece(rows: np.ndarray, kind: Kind | np.ndarray, name: np.ndarray, **columns) -> dict[str, np.ndarray]:
    """A table's columns; what it does not have is -1. The first three of `rows`: start, end, process or thread."""
    count = len(rows)
    piece = {key: np.full(count, -1, np.int64) for key in _PIECE_COLUMNS}
    place, times = rows[:, 2], np.clip(rows[:, :2], -_MAX_NS, _MAX_NS)
    return piece | {
        "start": times[:, 0], "end": times[:, 1], "process": place >> 24 & 0xFFFFFF, "thread": place & 0xFFFFFF,
        "kind": np.full(count, kind), "name": name,
    } | columns  # fmt: skip


def _named(ids: np.ndarray, text_of, names: Numbered) -> np.ndarray:
    """Numbers of the names that `text_of` gives to ids; each distinct id is asked once."""
    distinct, where = np.unique(ids, return_inverse=True)
    return np.array([names[text_of(one)] for one in distinct.tolist()], np.int64)[where.reshape(-1)]


def _nvtx(tables: NsysTables, names: Numbered) -> tuple[dict, tuple]:
    rows, texts = tables.nvtx()
    shapes = Numbered()
    named = {text: nvtx_name(text) for text in set(texts)}
    number = {text: names[one.name] for text, one in named.items()}
    shape = {text: shapes[one.shapes] if one.shapes else -1 for text, one in named.items()}
    kind = np.array([named[text].kind for text in texts], np.int64)
    columns = {
        "sequence": np.array([named[text].sequence for text in texts], np.int64),
        "shapes": np.array([shape[text] for text in texts], np.int64),
    }
    name = np.array([number[text] for text in texts], np.int64)
    return _piece(rows, kind, name, **columns), tuple(shapes)


def _runtime(tables: NsysTables, names: Numbered) -> dict:
    rows = tables.ints("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "end", "globalTid", "correlationId", "nameId")
    name = _named(rows[:, 4], lambda one: runtime_name(tables.strings.get(one, "")), names)
    return _piece(rows, Kind.RUNTIME, name, correlation=rows[:, 3])


_DEVICE = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId")


def _device_piece(rows: np.ndarray, kind: Kind, name: np.ndarray, **columns) -> dict:
    no_thread = np.full(len(rows), -1, np.int64)
    return _piece(
        rows, kind, name, device=rows[:, 3], stream=rows[:, 4], correlation=rows[:, 5], thread=no_thread, **columns
    )


def _kernels(tables: NsysTables, names: Numbered) -> dict:
    rows = tables.ints("CUPTI_ACTIVITY_KIND_KERNEL", *_DEVICE, "demangledName", "shortName")
    ids = np.where(rows[:, 6] >= 0, rows[:, 6], rows[:, 7])
    return _device_piece(rows, Kind.KERNEL, _named(ids, lambda one: tables.strings.get(one, "unknown kernel"), names))


def _copies(tables: NsysTables, names: Numbered) -> dict:
    rows = tables.ints("CUPTI_ACTIVITY_KIND_MEMCPY", *_DEVICE, "bytes", "copyKind", "srcKind", "dstKind")
    three = (rows[:, 7] & 255) << 16 | (rows[:, 8] & 255) << 8 | rows[:, 9] & 255
    name = _named(three, lambda one: memcpy_name(one >> 16, one >> 8 & 255, one & 255), names)
    return _device_piece(rows, Kind.MEMCPY, name, num_bytes=rows[:, 6])


def _memsets(tables: NsysTables, names: Numbered) -> dict:
    rows = tables.ints("CUPTI_ACTIVITY_KIND_MEMSET", *_DEVICE, "bytes")
    name = np.full(len(rows), names["Memset (Device)"], np.int64)
    return _device_piece(rows, Kind.MEMSET, name, num_bytes=rows[:, 6])


def _syncs(tables: NsysTables, names: Numbered) -> dict:
    rows = tables.ints("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", *_DEVICE, "syncType")
    return _device_piece(rows, Kind.SYNC, _named(rows[:, 6], sync_name, names))
