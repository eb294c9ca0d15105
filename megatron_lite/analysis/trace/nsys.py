"""An Nsight Systems report, exported with `nsys export --type sqlite` -> a Trace per process.

Tables and columns differ between versions and stand there only if they hold something: what is not there is empty.
"""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

from megatron_lite.analysis.trace.columns import Kind, MemoryEvents, Trace
from megatron_lite.analysis.trace.nsys_names import memcpy_name, nvtx_name, runtime_name, sync_name
from megatron_lite.analysis.trace.nsys_tables import NsysTables
from megatron_lite.analysis.trace.numbered import Numbered
from megatron_lite.analysis.trace.refused import TraceError
from megatron_lite.analysis.trace.repair import repaired

_OUR_MARK = re.compile(r"rank (\d+) of (\d+)\b")  # megatron_lite/instruments/nsys_range.py
_MOST_NS = 4 * 10**18  # differences of such times still fit 64 bits
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
    place, times = rows[:, 2], np.clip(rows[:, :2], -_MOST_NS, _MOST_NS)
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
