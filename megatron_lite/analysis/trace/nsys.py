"""An Nsight Systems report, exported with `nsys export --type sqlite` -> a Trace per process.

Tables and columns differ between versions and stand there only if they hold something: what is not there is empty.
"""

import ast
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.trace.columns import (
    WHOLE_GRAPH,
    Events,
    Kind,
    Numbered,
    Shapes,
    Trace,
    TraceError,
    build_events,
    make_no_memory_events,
)
from megatron_lite.analysis.trace.diagnostics import tells_of_loss
from megatron_lite.analysis.trace.kineto import nested_tuples
from megatron_lite.analysis.trace.nsys_gaps import (
    find_system_calls,
    find_unread_communication,
    find_unread_tables,
    read_diagnostics,
)
from megatron_lite.analysis.trace.sqlite_file import open_database

# ENUM_NSYS_EVENT_TYPE
_PUSH_POP = 59
_START_END = 60
_MARK = 34
_OUR_MARK = re.compile(r"rank (\d+) of (\d+)\b")  # megatron_lite/instruments/nsys_range.py
_MAX_NS = 4 * 10**18  # differences of such times still fit 64 bits
_COLUMNS = (
    "name",
    "kind",
    "start",
    "end",
    "process",
    "thread",
    "device",
    "stream",
    "correlation",
    "num_bytes",
    "shapes",
    "sequence",
)

# --- names as the profiler of PyTorch would write them, so that one analysis serves both

# torch.autograd.profiler.emit_nvtx: "aten::mm, seq = 12, sizes = [[2, 3], [3, 4]], op_id = 7, input_op_ids = [...]"
_EMITTED = re.compile(r"(?P<name>.+?)(?:, seq = (?P<seq>\d{1,18}))?(?:, op_id = \d+)?(?:, sizes = (?P<sizes>\[.*?\]))?"
                      r"(?:, op_id = \d+)?(?:, input_op_ids = .*)?\Z", re.DOTALL)  # fmt: skip
_OPERATOR = re.compile(r"(aten|torch|autograd|c10d|prims|triton|inductor|_?[A-Za-z]\w*)::\w|.*Backward\d*\Z")
_VERSION = re.compile(r"(_ptsz|_ptds)?_v\d+(_ptsz|_ptds)?\Z")
# ENUM_CUDA_MEMCPY_OPER; from 11 on: unified memory
_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH",
           10: "PtoP", 11: "HtoD", 12: "DtoH", 13: "DtoD"}  # fmt: skip
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
_SYNCS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}  # ENUM_CUPTI_SYNC_TYPE


def parse_range(text: str) -> tuple[str, Kind, int, Shapes | None]:
    """Parse the text of a range: name, kind, autograd's sequence number or -1, and shapes.

    The kind is OP for the ranges that PyTorch emits for operators, ANNOTATION for those that code named.
    """
    found = _EMITTED.match(text)
    if found is None or len(found["name"]) == len(text):
        kind = Kind.OP if _OPERATOR.match(text) else Kind.ANNOTATION
        return text, kind, -1, None
    sequence = int(found["seq"] or -1)
    return found["name"], Kind.OP, sequence, _parse_sizes(found["sizes"] or "")


def _parse_sizes(text: str) -> Shapes | None:
    """The shapes of "[[2, 3], [3, 4]]"; None for a text that is no list."""
    try:
        dims = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    if not dims or not isinstance(dims, list):
        return None
    return Shapes(nested_tuples(dims), dtypes=("",) * len(dims))


def name_memcpy(copy: int, source: int, target: int) -> str:
    """Name a copy as kineto does: 'Memcpy HtoD (Pageable -> Device)'.

    Args:
        copy: its kind.
        source: kind of memory that is read.
        target: kind of memory that is written.
    """
    kind = _COPIES.get(copy, "Unknown")
    read = _MEMORIES.get(source, "Unknown")
    written = _MEMORIES.get(target, "Unknown")
    return f"Memcpy {kind} ({read} -> {written})"


# --- the tables of a report


class _Tables:
    """An open database, whichever tables and columns are in it."""

    def __init__(self, database: sqlite3.Connection):
        self.query = database.execute
        self.columns: dict[str, set[str]] = {}
        tables = self.query("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        for (table,) in tables:
            quoted = table.replace('"', '""')
            described = self.query(f'PRAGMA table_info("{quoted}")')
            self.columns[table] = {row[1] for row in described}

    @property
    def is_nsys(self) -> bool:
        """Did Nsight Systems write it?"""
        if "StringIds" not in self.columns:
            return False
        prefixes = ("CUPTI_", "META_DATA_", "EXPORT_META")
        return "NVTX_EVENTS" in self.columns or any(table.startswith(prefixes) for table in self.columns)

    def have(self, table: str, *columns: str) -> bool:
        """Whether the table is there, with all of these columns."""
        return table in self.columns and self.columns[table].issuperset(columns)

    def integers(self, table: str, *columns: str) -> Integers:
        """Read columns of a table.

        Returns:
            int64 [rows, columns]; -1 where a value or a column is missing; no rows for a table that is not there.
        """
        if not self.have(table, "start", "end"):
            return np.empty((0, len(columns)), np.int64)
        wanted = []
        for name in columns:
            is_there = name in self.columns[table]
            wanted.append(f"coalesce(CAST({name} AS INTEGER), -1)" if is_there else "-1")
        rows = self.query(f"SELECT {', '.join(wanted)} FROM {table} WHERE start IS NOT NULL").fetchall()
        return np.array(rows, np.int64).reshape(-1, len(columns))

    def text_of_nvtx(self) -> str:
        """The expression for an NVTX event's text; '' where no event has one."""
        texts = []
        if self.have("NVTX_EVENTS", "text"):
            texts.append("text")
        if self.have("NVTX_EVENTS", "textId"):
            texts.append("(SELECT value FROM StringIds WHERE id = textId)")
        if not texts or not self.have("NVTX_EVENTS", "start", "end", "eventType", "globalTid"):
            return ""
        return f"coalesce({', '.join(texts)}, NULL)"

    def ranges(self) -> tuple[Integers, list[str]]:
        """Read the NVTX ranges that ended: int64 [rows, 3] of start, end and thread, and their texts."""
        text = self.text_of_nvtx()
        if not text:
            return np.empty((0, 3), np.int64), []
        rows = self.query(
            f"SELECT CAST(start AS INTEGER), CAST(end AS INTEGER), coalesce(CAST(globalTid AS INTEGER), -1), {text} "
            "FROM NVTX_EVENTS WHERE eventType IN (?, ?) AND start IS NOT NULL AND end IS NOT NULL",
            (_PUSH_POP, _START_END),
        ).fetchall()
        numbers = []
        texts = []
        for start, end, thread, said in rows:
            if said:
                numbers.append((start, end, thread))
                texts.append(str(said))
        return np.array(numbers, np.int64).reshape(-1, 3), texts

    def marks(self) -> dict[int, str]:
        """Read for each process the NVTX mark that names its rank."""
        text = self.text_of_nvtx()
        if not text:
            return {}
        return dict(
            self.query(
                f"SELECT globalTid >> 24 & 0xffffff, {text} AS said FROM NVTX_EVENTS WHERE eventType = ? "
                "AND said LIKE 'rank %'",
                (_MARK,),
            )
        )

    def clock_ns(self) -> int | None:
        """Nanoseconds since 1970 of the report's time 0, by the machine's clock; None where it does not say."""
        if not self.have("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
            return None
        row = self.query("SELECT CAST(utcEpochNs AS INTEGER) FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        if not row or row[0] is None:
            return None
        start = None
        if self.have("ANALYSIS_DETAILS", "startTime"):
            start = self.query("SELECT CAST(startTime AS INTEGER) FROM ANALYSIS_DETAILS").fetchone()
        since_start = start[0] if start else None
        return int(row[0]) - int(since_start or 0)

    def devices(self) -> tuple[str, ...]:
        """Names of the GPUs."""
        if not self.have("TARGET_INFO_GPU", "id", "name"):
            return ()
        return tuple(str(name) for (name,) in self.query("SELECT name FROM TARGET_INFO_GPU ORDER BY id"))

    def facts(self) -> dict[str, str]:
        """The version of the tool and of its tables."""
        wanted = {
            "EXPORT_PRODUCT_VERSION": "nsys_version",
            "EXPORT_SCHEMA_VERSION": "nsys_schema",
        }
        for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            if self.have(table, "name", "value"):
                rows = dict(self.query(f"SELECT name, value FROM {table}"))
                return {ours: str(rows[theirs]) for theirs, ours in wanted.items() if theirs in rows}
        return {}


# --- the traces


def read_nsys(path: Path) -> tuple[Trace, ...]:
    """The traces in `path`, by process id. Raises TraceError for an sqlite file of something else."""
    try:
        with open_database(path) as database:
            tables = _Tables(database)
            if not tables.is_nsys:
                why = "an sqlite file, but not of Nsight Systems (nsys export --type sqlite makes one)."
                raise TraceError(f"{path}: {why}")
            return _read_processes(path, tables)
    except sqlite3.Error as error:
        raise TraceError(f"{path}: sqlite cannot read it ({error}); export the report again.") from None


def _read_processes(path: Path, tables: _Tables) -> tuple[Trace, ...]:
    """The traces of the report's processes, by process id."""
    names: Numbered[str] = Numbered()
    shapes: Numbered[Shapes] = Numbered()
    pieces = [_read_ranges(tables, names, shapes), *_read_cuda(tables, names)]
    columns = {}
    for key in _COLUMNS:
        columns[key] = np.concatenate([piece[key] for piece in pieces])
    process = columns.pop("process")
    if not len(process):
        raise TraceError(f"{path}: no CUDA or NVTX events in it; trace with -t cuda,nvtx.")
    report = _Report(
        file_name=path.name,
        names=tuple(names),
        shapes=tuple(shapes),
        marks=tables.marks(),
        devices=tables.devices(),
        clock_ns=tables.clock_ns(),
        facts=tables.facts(),
        unread=(
            *find_unread_tables(tables.query, tables.columns),
            *find_unread_communication(tables.query, tables.columns),
        ),
        system_calls=tuple(find_system_calls(tables.query, tables.columns)),
        diagnostics=tuple(read_diagnostics(tables.query, tables.columns)),
    )
    traces = []
    for pid in np.unique(process).tolist():
        is_own = process == pid
        own = {key: column[is_own] for key, column in columns.items()}
        traces.append(_build_trace(report, pid, own))
    return tuple(traces)


def _read_ranges(
    tables: _Tables,
    names: Numbered[str],
    shapes: Numbered[Shapes],
) -> dict[str, Integers]:
    """Columns of the ranges, which give numbers to `names` and `shapes`."""
    ranges, texts = tables.ranges()
    # each distinct text is parsed once
    numbers_of_text = {}
    for text in dict.fromkeys(texts):
        name, kind, sequence, dims = parse_range(text)
        shape = shapes[dims] if dims else -1
        numbers_of_text[text] = (names[name], kind, sequence, shape)
    numbers = np.array([numbers_of_text[text] for text in texts], np.int64)
    numbers = numbers.reshape(-1, 4)
    return _piece(
        ranges,
        name=numbers[:, 0],
        kind=numbers[:, 1],
        sequence=numbers[:, 2],
        shapes=numbers[:, 3],
    )


@dataclass(frozen=True)
class _Report:
    """Facts that a report tells of all its processes."""

    file_name: str
    names: tuple[str, ...]
    shapes: tuple[Shapes, ...]
    marks: dict[int, str]  # by process: the mark that names its rank
    devices: tuple[str, ...]  # names
    clock_ns: int | None  # since 1970, of the report's time 0
    facts: dict[str, str]
    unread: tuple[tuple[int | None, str], ...]  # (process, or None for all; what of it is not read)
    system_calls: tuple[tuple[int | None, str], ...]  # (process; the longest call of the operating system)
    diagnostics: tuple[tuple[int | None, str], ...]  # (process, or None for all; the tool's message)


def _build_trace(report: _Report, pid: int, columns: dict[str, Integers]) -> Trace:
    """The trace of one process. columns: of its events."""
    events, thread_ids, first_ns, notes = _build_events(columns)
    mark = _OUR_MARK.match(report.marks.get(pid, ""))
    diagnostics = _choose_own(report.diagnostics, pid)
    clock_ns = report.clock_ns
    return Trace(
        source=f"{report.file_name} (process {pid})",
        writer="nsys",
        rank=int(mark[1]) if mark else None,
        world_size=int(mark[2]) if mark else None,
        devices=report.devices,
        base_ns=None if clock_ns is None else clock_ns + first_ns,
        with_stack=False,
        with_shapes=bool((events.shapes >= 0).any()),
        names=report.names,
        threads=tuple((str(pid), str(tid) if tid >= 0 else "") for tid in thread_ids),
        shapes=report.shapes,
        collectives=(),
        events=events,
        memory=make_no_memory_events(),
        notes=(
            *notes,
            *(text for owner, text in report.system_calls if owner == pid),
            *map(_quote, diagnostics),
            *_describe_whole_graphs(events, report.names),
        ),
        facts=report.facts,
        damage=tuple(map(_quote, filter(tells_of_loss, diagnostics))),
        diagnostics=diagnostics,
        unread=_choose_own(report.unread, pid),
    )


def _choose_own(told: tuple[tuple[int | None, str], ...], pid: int) -> tuple[str, ...]:
    """Choose what is told of that process, or of all."""
    return tuple(text for owner, text in told if owner in (pid, None))


def _quote(diagnostic: str) -> str:
    return f'nsys reports: "{diagnostic}"'


def _describe_whole_graphs(events: Events, names: tuple[str, ...]) -> list[str]:
    """Describe what is known of CUDA graphs that are recorded as a whole."""
    kernels = events.name[events.kind == Kind.KERNEL]
    graphs = 0
    for name, times in zip(*np.unique(kernels, return_counts=True)):
        if WHOLE_GRAPH.match(names[name]):
            graphs += int(times)
    if not graphs:
        return []
    said = (
        f"launches of CUDA graphs: {graphs:,}, each recorded as a whole: "
        "their kernels are not in the report, so what a "
        "graph computes or communicates and whether it idles is not known; "
        "nsys profile --cuda-graph-trace=node records kernels"
    )
    return [said]


def _build_events(columns: dict[str, Integers]) -> tuple[Events, list[int], int, list[str]]:
    """Build the events of one process.

    Returns:
        The events, ids of its threads, start of the first event in the report's time, and notes.
    """
    start = columns["start"]
    end = np.maximum(columns["end"], start)
    first = int(start.min())
    thread_ids, thread = np.unique(columns["thread"], return_inverse=True)
    device = np.clip(columns["device"], -1, 2**15 - 1)
    stream = np.clip(columns["stream"], -1, 2**31 - 1)
    nothing = np.full(len(thread), -1, np.int64)
    has_gpu_work = np.isin(columns["kind"], (Kind.KERNEL, Kind.MEMCPY)).any()
    events, notes = build_events(
        {
            "name": columns["name"].astype(np.int32),
            "kind": columns["kind"].astype(np.uint8),
            "start_ns": start - first,
            "end_ns": end - first,
            "thread": thread.astype(np.int32),
            "device": device.astype(np.int16),
            "stream": stream.astype(np.int32),
            "correlation": columns["correlation"],
            "num_bytes": columns["num_bytes"],
            "shapes": columns["shapes"].astype(np.int32),
            "collective": nothing.astype(np.int32),
            "sequence": columns["sequence"],
            "forward_thread": nothing,
        }
    )
    if not has_gpu_work:
        notes.append("no GPU work of this process is in the report")
    return events, thread_ids.tolist(), first, notes


def _read_cuda(tables: _Tables, names: Numbered[str]) -> list[dict[str, Integers]]:
    """Columns of the calls of the CUDA runtime, and of each kind of device work."""
    pairs = tables.query("SELECT id, value FROM StringIds WHERE value IS NOT NULL")
    strings = {number: str(text) for number, text in pairs}
    # names get their numbers in this order
    return [
        _read_runtime(tables, names, strings),
        _read_kernels(tables, names, strings),
        _read_copies(tables, names),
        _read_graphs(tables, names),
        _read_memsets(tables, names),
        _read_synchronizations(tables, names),
    ]


def _number_names(
    names: Numbered[str],
    ids: Integers,
    name_of: Callable[[int], str],
) -> Integers:
    """Numbers of the names that `name_of` gives to ids; each distinct id is asked once."""
    distinct, place = np.unique(ids, return_inverse=True)
    numbers = [names[name_of(one)] for one in distinct.tolist()]
    return np.array(numbers, np.int64)[place.reshape(-1)]


def _read_runtime(
    tables: _Tables,
    names: Numbered[str],
    strings: dict[int, str],
) -> dict[str, Integers]:
    """Columns of the calls of the CUDA runtime."""
    rows = tables.integers("CUPTI_ACTIVITY_KIND_RUNTIME", "start", "end", "globalTid", "correlationId", "nameId")

    def name_call(number: int) -> str:
        return _VERSION.sub("", strings.get(number, ""))

    return _piece(
        rows,
        name=_number_names(names, rows[:, 4], name_call),
        kind=Kind.RUNTIME,
        correlation=rows[:, 3],
    )


# columns that all tables of device work have; those of a single table follow them
_PLACE = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId")


def _device_piece(rows: Integers, kind: Kind, **columns: Integers | int) -> dict[str, Integers]:
    """Columns of device work. The first of `rows` are _PLACE."""
    return _piece(
        rows,
        kind=kind,
        thread=-1,
        device=rows[:, 3],
        stream=rows[:, 4],
        correlation=rows[:, 5],
        **columns,
    )


def _read_kernels(
    tables: _Tables,
    names: Numbered[str],
    strings: dict[int, str],
) -> dict[str, Integers]:
    """Columns of the kernels."""
    rows = tables.integers("CUPTI_ACTIVITY_KIND_KERNEL", *_PLACE, "demangledName", "shortName")
    demangled = rows[:, 6]
    ids = np.where(demangled >= 0, demangled, rows[:, 7])

    def name_kernel(number: int) -> str:
        return strings.get(number, "unknown kernel")

    return _device_piece(rows, Kind.KERNEL, name=_number_names(names, ids, name_kernel))


def _read_copies(tables: _Tables, names: Numbered[str]) -> dict[str, Integers]:
    """Columns of the copies."""
    rows = tables.integers("CUPTI_ACTIVITY_KIND_MEMCPY", *_PLACE, "bytes", "copyKind", "srcKind", "dstKind")
    # the three kinds, of a byte each, as one number
    copy, source, target = (rows[:, 7:10] & 255).T
    kinds = copy << 16 | source << 8 | target

    def name_copy(number: int) -> str:
        return name_memcpy(number >> 16, number >> 8 & 255, number & 255)

    return _device_piece(
        rows,
        Kind.MEMCPY,
        name=_number_names(names, kinds, name_copy),
        num_bytes=rows[:, 6],
    )


def _read_graphs(tables: _Tables, names: Numbered[str]) -> dict[str, Integers]:
    """Columns of the CUDA graphs that are recorded as a whole."""
    rows = tables.integers("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", *_PLACE, "graphId")
    name = _number_names(names, rows[:, 6], "CUDA graph {}".format)
    piece = _device_piece(rows, Kind.KERNEL, name=name)
    # graphs whose kernels stand in the table of kernels, too, are not counted twice
    nodes = tables.integers("CUPTI_ACTIVITY_KIND_KERNEL", "correlationId", "graphNodeId")
    is_of_graph = nodes[:, 1] > 0
    is_known = np.isin(rows[:, 5], nodes[is_of_graph, 0])
    return {key: column[~is_known] for key, column in piece.items()}


def _read_memsets(tables: _Tables, names: Numbered[str]) -> dict[str, Integers]:
    """Columns of what sets memory."""
    rows = tables.integers("CUPTI_ACTIVITY_KIND_MEMSET", *_PLACE, "bytes")
    return _device_piece(rows, Kind.MEMSET, name=names["Memset (Device)"], num_bytes=rows[:, 6])


def _read_synchronizations(tables: _Tables, names: Numbered[str]) -> dict[str, Integers]:
    """Columns of what a stream or the host waited for."""
    rows = tables.integers("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", *_PLACE, "syncType")
    name = _number_names(names, rows[:, 6], lambda one: _SYNCS.get(one, "Sync"))
    return _device_piece(rows, Kind.SYNC, name=name)


def _piece(rows: Integers, **columns: Integers | int) -> dict[str, Integers]:
    """A table's columns; what it does not have is -1. The first three of `rows`: start, end, process or thread."""
    start, end = np.clip(rows[:, :2], -_MAX_NS, _MAX_NS).T
    # a process' number stands before its thread's
    place = rows[:, 2]
    known = {
        "start": start,
        "end": end,
        "process": place >> 24 & 0xFFFFFF,
        "thread": place & 0xFFFFFF,
    }
    known |= columns
    return {key: np.broadcast_to(known.get(key, -1), len(rows)) for key in _COLUMNS}
