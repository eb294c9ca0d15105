"""A trace of torch.profiler (Kineto), of any year -> Trace."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import compress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_lite.analysis.core_use import read_core_use
from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.trace.columns import (
    DEVICE_KINDS,
    Collective,
    Kind,
    MemoryEvents,
    Numbered,
    ProcessGroup,
    Shapes,
    Trace,
    TraceError,
    build_events,
)
from megatron_lite.analysis.trace.diagnostics import read_warnings, tells_of_loss
from megatron_lite.analysis.trace.foreign import find_foreign
from megatron_lite.analysis.trace.kineto_json import (
    NO_ARGS,
    Args,
    Chunks,
    Event,
    ExactEvent,
    Id,
    read_metadata,
)
from megatron_lite.analysis.trace.kineto_kinds import (
    Tracks,
    category_of_ascend,
    find_kinds_and_devices,
    kinds_of_categories,
)
from megatron_lite.formats.trace_header import CORES_IN_TRACE
from megatron_lite.units import significant

# an operator's output_mask among its "Concrete Inputs": "[False, True, False]"
OUTPUT_MASK = re.compile(rb'"\[(?:True|False)(?:, (?:True|False)){1,2}\]"')

# --- lists of events -> columns; names and shapes become numbers on the way

LOST_NS = np.iinfo(np.int64).min  # the start of an event that has none
MAX_EVENTS = 10_000_000  # about 2 GB of text; a trace of 5 million took 1.27 GB of memory, one of 15 million 1.76 GB
_MAX_US = 4e15  # the year 2096; differences of such times in ns still fit 64 bits
COLUMNS = {
    "name": np.int32, "category": np.int16, "thread": np.int32, "start_ns": np.int64, "length_ns": np.int64,
    "device": np.int64, "stream": np.int64, "correlation": np.int64, "num_bytes": np.int64, "shapes": np.int32,
    "collective": np.int32, "sequence": np.int64, "forward_thread": np.int64,
}  # fmt: skip
# the arguments of events by column; asking in a list of its own is faster than any getattr
ARGS: dict[str, Callable[[list[Args]], list[int | None]]] = {
    "device": lambda args: [a.device for a in args],
    "stream": lambda args: [a.stream for a in args],
    "correlation": lambda args: [a.correlation for a in args],
    "num_bytes": lambda args: [a.bytes for a in args],
    "sequence": lambda args: [a.sequence for a in args],
    "forward_thread": lambda args: [a.forward_thread for a in args],
}
MEMORY_ARGS: dict[str, Callable[[list[Args]], list[int | None]]] = {
    "num_bytes": lambda args: [a.memory_bytes for a in args],
    "total_allocated": lambda args: [a.allocated for a in args],
    "total_reserved": lambda args: [a.reserved for a in args],
    "device": lambda args: [a.memory_device for a in args],
    "device_type": lambda args: [a.memory_device_type for a in args],
}
# Which arguments each kind of event has, by column; asking all events for all of them takes twice as long.
ARGS_OF_KINDS = {
    (Kind.OP, Kind.ANNOTATION): ("sequence", "forward_thread", "shapes", "collective"),
    (Kind.RUNTIME,): ("correlation",),
    (*DEVICE_KINDS, Kind.SYNC): ("device", "stream", "correlation", "num_bytes", "collective"),
}

Columns = dict[str, NDArray[Any]]


@dataclass
class Collected:
    """Columns of the chunks so far, and what their numbers stand for.

    More than max_events are never held: the latest quarter of them goes, and from then on all that ends after the rest.
    What stays is all that happened up to until_ns, in whatever order the file has it.
    """

    max_events: int
    until_ns: int | None = None  # None: everything
    last_ns: float = LOST_NS  # end of the last event of the file, held or not
    held: int = 0
    names: Numbered[str] = field(default_factory=Numbered)
    categories: Numbered[str | None] = field(default_factory=Numbered)
    threads: Numbered[tuple[Id, Id]] = field(default_factory=Numbered)  # (pid, tid)
    shapes: Numbered[tuple[bytes, ...]] = field(default_factory=Numbered)  # (dims, dtypes, output mask)
    collectives: Numbered[Collective] = field(default_factory=Numbered)
    spans: list[Columns] = field(default_factory=list)  # columns of each chunk
    instants: list[Columns] = field(default_factory=list)
    tracks: Tracks = field(default_factory=Tracks)
    halves: list[Event] = field(default_factory=list)  # "B" and "E" entries: beginnings and ends of spans

    def add(self, events: Sequence[Event]) -> None:
        """Append a chunk."""
        if self.until_ns is not None:
            ends = list(map(_end_ns, events))
            self.last_ns = max([self.last_ns, *ends])
            events = list(compress(events, [end <= self.until_ns for end in ends]))
        spans = [event for event in events if event.ph == "X"]
        if len(spans) < len(events):
            halves = [event for event in events if event.ph in ("B", "E")]
            self.halves += [half for half in halves if half.ts is not None and Decimal(half.ts).is_finite()]
            self.tracks.add([read_metadata(event) for event in events if event.ph == "M"])
            memory = [event for event in events if event.ph == "i" and event.name == "[memory]"]
            if memory:
                args = [event.args or NO_ARGS for event in memory]
                columns = {name: _integers(read(args)) for name, read in MEMORY_ARGS.items()}
                lengths = np.zeros(len(memory), np.int64)
                self.instants.append(columns | {"start_ns": _start_ns(memory), "length_ns": lengths})
        if spans:
            self.spans.append(self._columns(spans))
        self.held += len(events)
        if self.held > self.max_events:
            self._shorten()

    def _columns(self, spans: Sequence[Event]) -> Columns:
        """The columns of a chunk of spans; -1 where an event has no such value."""
        count = len(spans)
        columns: Columns = {name: np.full(count, -1, dtype) for name, dtype in COLUMNS.items()}
        of_all: tuple[tuple[str, Numbered[Any], list[Any]], ...] = (
            ("name", self.names, [event.name for event in spans]),
            ("category", self.categories, [event.cat or category_of_ascend(event) for event in spans]),
            ("thread", self.threads, [(event.pid, event.tid) for event in spans]),
        )
        for column, numbers, texts in of_all:
            columns[column] = np.fromiter(map(numbers.__getitem__, texts), COLUMNS[column], count)
        columns["start_ns"] = _start_ns(spans)
        dur_us = np.nan_to_num(np.array([event.dur for event in spans], np.float64), nan=0.0)
        columns["length_ns"] = np.rint(np.clip(dur_us, -_MAX_US / 1000, _MAX_US / 1000) * 1000).astype(np.int64)
        args = [event.args or NO_ARGS for event in spans]
        self._read_arguments(columns, args)
        if any(category and category.startswith("Ascend ") for category in self.categories):
            connections = _integers([one.connection for one in args])
            columns["correlation"] = np.where(connections >= 0, connections, columns["correlation"])
        return columns

    def _read_arguments(self, columns: Columns, args: list[Args]) -> None:
        """Write into `columns` the arguments that each kind of event has."""
        kind = kinds_of_categories(self.categories)[columns["category"]]
        for kinds, names in ARGS_OF_KINDS.items():
            of_kind = np.isin(np.arange(len(Kind)), kinds)[kind]
            own = list(compress(args, of_kind.tolist()))
            for name in names if own else ():
                columns[name][of_kind] = self._read_argument(name, own)

    def _read_argument(self, name: str, args: list[Args]) -> ArrayLike:
        """The values of one column in the arguments of some events."""
        if name == "shapes":
            return self._number_shapes(args)
        if name == "collective":
            return self._number_collectives(args)
        return _integers(ARGS[name](args))

    def _number_shapes(self, args: list[Args]) -> ArrayLike:
        """The numbers of the events' shapes; -1 for an event without any."""
        # local names: this runs for every operator of a trace
        known = self.shapes
        find_mask = OUTPUT_MASK.search
        # of the values only the mask: others differ from call to call
        numbers = [
            known[bytes(a.dims), bytes(a.dtypes), mask[0] if (mask := find_mask(a.values)) else b""] if a.dims else -1
            for a in args
        ]
        return np.array(numbers, np.int32)

    def _number_collectives(self, args: list[Args]) -> ArrayLike:
        """The numbers of the events' collectives; -1 for an event that says nothing of one."""
        has_none = [a.collective is None and a.group is None and a.in_elements is None for a in args]
        return [-1 if none else self._collective(a) for a, none in zip(args, has_none)]

    def _collective(self, a: Args) -> int:
        told = (a.collective, a.group, a.group_size, a.in_elements, a.out_elements, a.dtype, a.collective_sequence)
        return self.collectives[Collective(*told, peer=a.source if a.target is None else a.target)]

    def _shorten(self) -> None:
        """Let the latest quarter in time go: a smaller part would be let go more often,
        a larger one leaves fewer whole steps."""
        ends = np.concatenate([_ends_ns(columns) for columns in (*self.spans, *self.instants)])
        ends = ends[ends > LOST_NS // 2]
        if not len(ends):
            raise TraceError(f"more than {self.max_events:,} events without a time")
        self.last_ns = max(self.last_ns, int(ends.max()))
        kept = len(ends) * 3 // 4
        self.until_ns = int(np.partition(ends, kept)[kept])
        for chunks in (self.spans, self.instants):
            for columns in chunks:
                early = _ends_ns(columns) <= self.until_ns
                columns.update({name: column[early] for name, column in columns.items()})
        self.halves = [event for event in self.halves if _end_ns(event) <= self.until_ns]
        self.held = sum(len(columns["start_ns"]) for columns in (*self.spans, *self.instants)) + len(self.halves)

    def pair_halves(self) -> int:
        """Append spans of "B" and "E" entries: an end belongs to the last open beginning of its thread.

        How many stay alone.
        """
        open_ones: dict[tuple[Id, Id], list[Event]] = {}
        spans, alone = [], 0
        for half in sorted(self.halves, key=lambda half: half.ts or 0):
            stack = open_ones.setdefault((half.pid, half.tid), [])
            if half.ph == "B":
                stack.append(half)
            elif stack:
                begin = stack.pop()
                # one of them may be exact where the other is not
                begin.ph, begin.dur = "X", float(Decimal(half.ts or 0) - Decimal(begin.ts or 0))
                spans.append(begin)
            else:
                alone += 1
        self.add(spans)
        return alone + sum(len(stack) for stack in open_ones.values())


def _end_ns(event: Event) -> float:
    return LOST_NS if event.ts is None else (float(event.ts) + (event.dur or 0.0)) * 1000


def _ends_ns(columns: Columns) -> Integers:
    """Of one without a time a time before all others."""
    ends: Integers = columns["start_ns"] + np.maximum(columns["length_ns"], 0)
    return ends


def _start_ns(events: Sequence[Event]) -> Integers:
    """Exact nanoseconds: whole microseconds and the rest apart, since a product with 1000 may not fit a double."""
    if isinstance(events[0], ExactEvent) or isinstance(events[-1], ExactEvent):
        exact = [Decimal("nan" if event.ts is None else event.ts) for event in events]
        usable = [ts.is_finite() and abs(ts) < _MAX_US for ts in exact]
        return np.array([int(ts * 1000) if use else LOST_NS for ts, use in zip(exact, usable)], np.int64)
    ts_us = np.array([event.ts for event in events], np.float64)
    lost = ~(np.abs(ts_us) < _MAX_US)
    ts_us[lost] = 0
    whole = np.floor(ts_us)
    start = whole.astype(np.int64) * 1000 + np.rint((ts_us - whole) * 1000).astype(np.int64)
    start[lost] = LOST_NS
    return start


def _integers(values: list[int | None]) -> Integers:
    try:
        return np.array(values, np.int64)
    except (OverflowError, TypeError):  # an id beyond 64 bits is as good as none
        return np.array([-1 if value is None or abs(value) >= 2**63 else value for value in values], np.int64)


# --- what stands beside the events: ranks, devices, clocks; every value may be missing or of any type

_RANK_IN_NAME = re.compile(r"rank[_-]?\[?(\d{1,6})|\[(\d{1,6})\]", re.IGNORECASE)
_FACTS = ("schemaVersion", "trace_id", "host_name", "cuda_runtime_version", "cuda_driver_version")
_FACTS_OF_RANKS = ("backend", "nccl_version", "pg_count")
_MAX_RANKS = 2**20
_MAX_TEXT = 200  # characters of a header's value that are worth showing
_UNIX_NS = 10**18  # larger times count from 1970 (2001 and later), by the clock of the machine


def read_header(header: dict[str, Any], path: Path, first_ns: int) -> dict[str, Any]:
    """Fields of a Trace whose first event starts at first_ns by the file's clock."""
    ranks = header["distributedInfo"] if isinstance(header.get("distributedInfo"), dict) else {}
    rank, base_ns = _count(ranks.get("rank")), _count(header.get("baseTimeNanoseconds"))
    has_clock = base_ns is not None or first_ns > _UNIX_NS
    devices = header["deviceProperties"] if isinstance(header.get("deviceProperties"), list) else []
    devices = [row for row in devices if isinstance(row, dict)]
    ids = [_count(row.get("id")) for row in devices]
    facts = {name: header.get(name) for name in _FACTS} | {name: ranks.get(name) for name in _FACTS_OF_RANKS}
    facts = {name: value for name, value in facts.items() if isinstance(value, (str, int, float))}
    return {
        "rank": rank_in_name(path.name) if rank is None else rank,
        "world_size": _count(ranks.get("world_size")) or None,
        "devices": tuple(str(row.get("name", ""))[:_MAX_TEXT] for row in devices),
        "device_ids": tuple(place if number is None else number for place, number in enumerate(ids)),
        "without_gpu": header.get("deviceProperties") == [],
        "facts": {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in facts.items()},
        "base_ns": (base_ns or 0) + first_ns if has_clock else None,
        "groups": _read_groups(ranks),
        "cores": read_core_use(header.get(CORES_IN_TRACE)),
    }


def _read_groups(distributed: dict[str, Any]) -> tuple[ProcessGroup, ...]:
    """Of the header's "distributedInfo"; groups of all ranks may have an empty list of them."""
    rows, world_size = distributed.get("pg_config"), _count(distributed.get("world_size")) or 0
    groups = []
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, dict):
            continue
        size, listed = _count(row.get("pg_size", row.get("group_size"))), row.get("ranks")
        ranks = [_count(rank) for rank in listed] if isinstance(listed, list) else []
        if size == world_size and not ranks and size <= _MAX_RANKS:
            ranks = list(range(size))
        known = tuple(rank for rank in ranks if rank is not None)
        whole = known if len(known) == size else ()
        name, description = (str(row.get(key) or "")[:_MAX_TEXT] for key in ("pg_name", "pg_desc"))
        groups.append(ProcessGroup(name, description, whole))
    return tuple(groups)


def rank_in_name(name: str) -> int | None:
    """3 of host_rank3.17.pt.trace.json and of trace[3].json."""
    found = _RANK_IN_NAME.search(name)
    return int(found[1] or found[2]) if found else None


def _count(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < 2**63 else None


# --- the trace

_MANY_LOST = 0.01  # of the events, without a time; profilers lose single ones in sound files
_LONG_AFTER_0 = 10**12  # a trace whose times are larger did not begin at 0


def read_kineto(
    path: Path, max_events: int = MAX_EVENTS, report: Callable[[int], None] = lambda bytes_read: None
) -> Trace:
    """Read the trace in the file `path`.

    Args:
        path: the file.
        max_events: how many events are held at most; of a larger trace the first part in time is read.
        report: is called now and then with the bytes of the file that are read.

    Raises:
        TraceError: the file is no trace that can be analyzed.
    """
    chunks = Chunks(path)
    collected = Collected(max_events)
    for chunk in chunks:
        collected.add(chunk)
        report(chunks.bytes_read)
    notes: list[str] = []
    damage: list[str] = []
    if chunks.damage:
        damage.append(f"{path.name}: {chunks.damage}")
    alone = collected.pair_halves()
    if alone:
        notes.append(f"beginnings or ends of spans without a counterpart: {alone:,}, left out")
    if not collected.spans:
        raise TraceError(f"{path}: {chunks.damage or 'a trace in which no event has a duration'}")
    columns = _join(collected.spans, COLUMNS)
    first_ns = _place_in_time(columns, notes, damage)
    if first_ns is None:
        raise TraceError(f"{path}: no event of it has a start time, so there is nothing to analyze.")
    foreign = find_foreign(chunks.header, collected.categories, collected.threads, collected.tracks)
    if foreign:
        raise TraceError(f"{path}: {foreign}.")
    if collected.until_ns is not None:
        notes.append(f"{path.name}: {_describe_shortened(collected, collected.until_ns, first_ns)}")
    diagnostics = read_warnings(chunks.header)
    for text in diagnostics:
        line = f'the profiler reports: "{text}"'
        notes.append(line)
        if tells_of_loss(line):
            damage.append(line)
    return _build_trace(path, chunks, collected, columns, first_ns, notes, damage, diagnostics)


def _describe_shortened(collected: Collected, until_ns: int, first_ns: int) -> str:
    """What was read of a trace with more events than are held."""
    read_s = significant((until_ns - first_ns) / 1e9)
    whole_s = significant((collected.last_ns - first_ns) / 1e9)
    return (
        f"more than {collected.max_events:,} events; what ends within its first {read_s} of {whole_s} s was read, "
        "the rest left out; a window of fewer steps (--profile-step-end) is read whole"
    )


def _build_trace(
    path: Path,
    chunks: Chunks,
    collected: Collected,
    columns: Columns,
    first_ns: int,
    notes: list[str],
    damage: list[str],
    diagnostics: tuple[str, ...],
) -> Trace:
    """Build the trace of what was collected from a file. Empties `columns`.

    Args:
        path: the file.
        chunks: the file's reader, which has read its header.
        collected: what columns' numbers stand for.
        columns: all events, start_ns counted from the first one.
        first_ns: start of the first event by the file's clock.
        notes: what a reader of the report should know.
        damage: which of it means that events are missing.
        diagnostics: warnings of the profiler.
    """
    names = tuple(collected.names)
    placed = find_kinds_and_devices(
        columns,
        names,
        list(collected.threads),
        list(collected.categories),
        collected.tracks,
        _find_memory_types(collected),
    )
    threads = _join_threads(columns, collected)
    events, mended = build_events(columns)
    facts = read_header(chunks.header, path, first_ns)
    if placed.accelerator and not facts["devices"]:
        number = int(events.device.max(initial=0)) + 1
        facts |= {"devices": (placed.accelerator,) * number, "without_gpu": False}
    return Trace(
        source=path.name,
        writer="pytorch",
        names=names,
        threads=threads,
        shapes=_read_shapes(collected.shapes),
        with_stack=bool(chunks.header.get("with_stack")) or bool((events.kind == Kind.PYTHON).any()),
        with_shapes=bool(chunks.header.get("record_shapes")) or bool((events.shapes >= 0).any()),
        collectives=tuple(collected.collectives),
        events=events,
        memory=_read_memory(collected.instants, first_ns),
        notes=tuple(dict.fromkeys((*damage, *notes, *mended))),
        damage=tuple(damage),
        diagnostics=diagnostics,
        cut=chunks.cut or collected.until_ns is not None,
        unread=placed.unread,
        **facts,
    )


def _join_threads(columns: Columns, collected: Collected) -> tuple[tuple[str, str], ...]:
    """(process, thread) by number; files of 2021 write the same thread's id as a number and as a string."""
    threads: Numbered[tuple[str, str]] = Numbered()
    written = [(str(pid), str(tid)) for pid, tid in collected.threads]
    columns["thread"] = np.array([threads[text] for text in written], np.int32)[columns["thread"]]
    return tuple(threads)


def _find_memory_types(collected: Collected) -> set[int]:
    """torch's numbers of the types of the devices on which memory was allocated, without the host's."""
    return {int(kind) for chunk in collected.instants for kind in np.unique(chunk["device_type"])} - {0}


def _join(chunks: list[Columns], columns: Iterable[str]) -> Columns:
    """One dict of columns of many; empties `chunks`, so that nothing is held twice for long."""
    return {name: np.concatenate([chunk.pop(name) for chunk in chunks]) for name in columns}


def _place_in_time(columns: Columns, notes: list[str], damage: list[str]) -> int | None:
    """Make start_ns relative to the first event, end_ns of length_ns, and drop events without a time; the first's start
    by the file's clock, None if no event has one."""
    start = columns["start_ns"]
    usable = start != LOST_NS
    if usable.any() and np.median(start[usable]) > _LONG_AFTER_0:
        usable &= start > 0  # the profiler lost their time: pytorch/kineto#109
    if not usable.any():
        return None
    if not usable.all():
        many = (~usable).mean() > _MANY_LOST
        (damage if many else notes).append(f"events without a start time: {(~usable).sum():,}, left out")
        columns.update({name: column[usable] for name, column in columns.items()})
    start, length = columns["start_ns"], columns.pop("length_ns")
    if negative := int((length < 0).sum()):
        notes.append(f"events with a negative duration: {negative:,}, taken as instants")
    first = int(start.min())
    columns["start_ns"] = start - first
    columns["end_ns"] = columns["start_ns"] + np.maximum(length, 0)
    return first


def _read_shapes(texts: Numbered[tuple[bytes, ...]]) -> tuple[Shapes, ...]:
    """Shapes of their JSON texts (dims, dtypes, output mask)."""

    def read(text: bytes) -> list[Any]:
        try:
            value = msgspec.json.decode(text) if text else []
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return []
        return value if isinstance(value, list) else []

    dtypes = {text: tuple(map(str, read(text))) for text in {dtypes for _, dtypes, _ in texts}}
    masks = [tuple(word == b"True" for word in re.findall(rb"\w+", mask)) for _, _, mask in texts]
    return tuple(Shapes(nested_tuples(read(one[0])), dtypes[one[1]], mask) for one, mask in zip(texts, masks))


def nested_tuples(value: list[Any]) -> tuple[Any, ...]:
    return tuple([nested_tuples(one) if isinstance(one, list) else one for one in value])


def _read_memory(instants: list[Columns], first_ns: int) -> MemoryEvents:
    if not instants:
        none = np.empty(0, np.int64)
        return MemoryEvents(none, none, none, none, none.astype(np.int16))
    m = _join(instants, ("start_ns", *MEMORY_ARGS))
    order = np.argsort(m["start_ns"], kind="stable")
    order = order[m["start_ns"][order] != LOST_NS]
    m = {name: column[order] for name, column in m.items()}
    device = np.where(m["device_type"] == 0, -1, m["device"])
    device = np.clip(device, -1, 2**15 - 1).astype(np.int16)
    return MemoryEvents(m["start_ns"] - first_ns, m["num_bytes"], m["total_allocated"], m["total_reserved"], device)
