"""A trace of torch.profiler (Kineto), of any year -> Trace."""

import re
import zlib
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
from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.trace.columns import (
    DEVICE_KINDS,
    Collective,
    Events,
    Kind,
    MemoryEvents,
    Numbered,
    ProcessGroup,
    Shapes,
    Trace,
    TraceError,
    build_events,
    make_no_memory_events,
)
from megatron_lite.analysis.trace.diagnostics import read_warnings, tells_of_loss
from megatron_lite.analysis.trace.file_blocks import first_bytes
from megatron_lite.analysis.trace.foreign import NOT_PYTORCH, NOT_PYTORCH_PACKETS, find_foreign
from megatron_lite.analysis.trace.kineto_counters import CollectedCounters
from megatron_lite.analysis.trace.kineto_json import (
    NO_ARGS,
    Chunks,
    Event,
    EventArgs,
    ExactEvent,
    Id,
    read_metadata,
)
from megatron_lite.analysis.trace.kineto_kinds import (
    COPY,
    Tracks,
    category_of_ascend,
    find_kinds_and_devices,
    kinds_of_categories,
    name_copy,
)
from megatron_lite.analysis.trace.perfetto import PacketChunks
from megatron_lite.analysis.trace.perfetto_packets import is_perfetto
from megatron_lite.formats.hardware_record import HardwareFigures
from megatron_lite.formats.run_record import MAX_RANKS
from megatron_lite.formats.trace_header import CORES_IN_TRACE, HARDWARE_IN_TRACE, KEPT_DAMAGE, KeptDamage
from megatron_lite.units import significant

# an operator's output_mask among its "Concrete Inputs": "[False, True, False]"
OUTPUT_MASK = re.compile(rb'"\[(?:True|False)(?:, (?:True|False)){1,2}\]"')

# --- lists of events -> columns; names and shapes become numbers on the way

LOST_NS = np.iinfo(np.int64).min  # the start of an event that has none
MAX_EVENTS = 10_000_000  # about 2 GB of text; a trace of 5 million took 1.27 GB of memory, one of 15 million 1.76 GB
_MAX_US = 4e15  # the year 2096; differences of such times in ns still fit 64 bits
COLUMNS = {
    "name": np.int32,
    "category": np.int16,
    "thread": np.int32,
    "start_ns": np.int64,
    "length_ns": np.int64,
    "device": np.int64,
    "stream": np.int64,
    "correlation": np.int64,
    "num_bytes": np.int64,
    "shapes": np.int32,
    "collective": np.int32,
    "sequence": np.int64,
    "forward_thread": np.int64,
}
Ask = Callable[[list[EventArgs]], list[int | None]]
# the arguments of events by column; asking in a list of its own is faster than any getattr
ARGS: dict[str, Ask] = {
    "device": lambda args: [a.device for a in args],
    "stream": lambda args: [a.stream for a in args],
    "correlation": lambda args: [a.correlation for a in args],
    "num_bytes": lambda args: [a.bytes for a in args],
    "sequence": lambda args: [a.sequence for a in args],
    "forward_thread": lambda args: [a.forward_thread for a in args],
}
MEMORY_ARGS: dict[str, Ask] = {
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
    counters: CollectedCounters = field(default_factory=CollectedCounters)
    has_critical_path: bool = False  # arrows that HTA adds

    def add(self, events: Sequence[Event]) -> None:
        """Append a chunk of entries."""
        if self.until_ns is not None:
            events = self._drop_late(events, self.until_ns)
        spans = [event for event in events if event.ph == "X"]
        if spans:
            self.spans.append(self._columns(spans))
        if len(spans) < len(events):
            self._add_others(events)
        self.held += len(events)
        if self.held > self.max_events:
            self._shorten()

    def _drop_late(self, events: Sequence[Event], until_ns: int) -> list[Event]:
        """The events that end by then; the last end of all is kept in mind."""
        ends = list(map(_end_ns, events))
        self.last_ns = max([self.last_ns, *ends])
        is_early = [end <= until_ns for end in ends]
        return list(compress(events, is_early))

    def _add_others(self, events: Sequence[Event]) -> None:
        """Append what is no span: halves of spans, names of tracks, and memory events."""
        for half in [event for event in events if event.ph in ("B", "E")]:
            if half.ts is not None and Decimal(half.ts).is_finite():
                self.halves.append(half)
        self.counters.add(events)
        self.has_critical_path |= any(event.cat == CRITICAL_PATH for event in events)
        metadata = [event for event in events if event.ph == "M"]
        self.tracks.add(list(map(read_metadata, metadata)))
        instants = [event for event in events if event.ph == "i"]
        memory = [event for event in instants if event.name == "[memory]"]
        if not memory:
            return
        args = [event.args or NO_ARGS for event in memory]
        columns: Columns = {}
        for name, ask in MEMORY_ARGS.items():
            columns[name] = _integers(ask(args))
        columns["start_ns"] = _start_ns(memory)
        columns["length_ns"] = np.zeros(len(memory), np.int64)
        self.instants.append(columns)

    def _columns(self, spans: Sequence[Event]) -> Columns:
        """The columns of a chunk of spans; -1 where an event has no such value."""
        columns: Columns = {}
        for name, dtype in COLUMNS.items():
            columns[name] = np.full(len(spans), -1, dtype)
        names = [name_copy(event) if event.name == COPY else event.name for event in spans]
        _number(columns, "name", self.names, names)
        categories = [event.cat or category_of_ascend(event) for event in spans]
        _number(columns, "category", self.categories, categories)
        threads = [(event.pid, event.tid) for event in spans]
        _number(columns, "thread", self.threads, threads)
        columns["start_ns"] = _start_ns(spans)
        columns["length_ns"] = _length_ns(spans)
        args = [event.args or NO_ARGS for event in spans]
        self._read_arguments(columns, args)
        if any(category and category.startswith("Ascend ") for category in self.categories):
            connections = _integers([one.connection for one in args])
            is_given = connections >= 0
            columns["correlation"] = np.where(is_given, connections, columns["correlation"])
        return columns

    def _read_arguments(self, columns: Columns, args: list[EventArgs]) -> None:
        """Write into `columns` the arguments that each kind of event has."""
        kind = kinds_of_categories(self.categories)[columns["category"]]
        for kinds, names in ARGS_OF_KINDS.items():
            is_chosen = np.isin(np.arange(len(Kind)), kinds)
            is_own = is_chosen[kind]
            own = list(compress(args, is_own.tolist()))
            if not own:
                continue
            for name in names:
                columns[name][is_own] = self._read_argument(name, own)

    def _read_argument(self, name: str, args: list[EventArgs]) -> ArrayLike:
        """The values of one column in the arguments of some events."""
        if name == "shapes":
            return self._number_shapes(args)
        if name == "collective":
            return self._number_collectives(args)
        return _integers(ARGS[name](args))

    def _number_shapes(self, args: list[EventArgs]) -> ArrayLike:
        """The numbers of the events' shapes; -1 for an event without any."""
        # local names: this runs for every operator of a trace
        known = self.shapes
        find_mask = OUTPUT_MASK.search
        # of the values only the mask: others differ from call to call
        numbers = []
        for a in args:
            if a.dims:
                mask = find_mask(a.values)
                key = (bytes(a.dims), bytes(a.dtypes), mask[0] if mask else b"")
                numbers.append(known[key])
            else:
                numbers.append(-1)
        return np.array(numbers, np.int32)

    def _number_collectives(self, args: list[EventArgs]) -> ArrayLike:
        """The numbers of the events' collectives; -1 for an event that says nothing of one."""
        numbers = []
        for a in args:
            if a.collective is None and a.group is None and a.in_elements is None:
                numbers.append(-1)
            else:
                numbers.append(self._number_collective(a))
        return numbers

    def _number_collective(self, a: EventArgs) -> int:
        """The number of the collective that the arguments tell of."""
        collective = Collective(
            name=a.collective,
            group=a.group,
            group_size=a.group_size,
            in_elements=a.in_elements,
            out_elements=a.out_elements,
            dtype=a.dtype,
            sequence=a.collective_sequence,
            peer=a.source if a.target is None else a.target,
        )
        return self.collectives[collective]

    def _shorten(self) -> None:
        """Let the latest quarter in time go.

        A smaller part would be let go more often, a larger one leaves fewer whole steps.
        """
        chunks = (*self.spans, *self.instants)
        ends = np.concatenate([_ends_ns(columns) for columns in chunks])
        ends = ends[ends > LOST_NS // 2]
        if not len(ends):
            raise TraceError(f"more than {self.max_events:,} events without a time")
        self.last_ns = max(self.last_ns, int(ends.max()))
        kept = len(ends) * 3 // 4
        self.until_ns = int(np.partition(ends, kept)[kept])
        self.halves = [event for event in self.halves if _end_ns(event) <= self.until_ns]
        self.held = len(self.halves)
        for columns in chunks:
            is_early = _ends_ns(columns) <= self.until_ns
            _choose_rows(columns, is_early)
            self.held += len(columns["start_ns"])

    def pair_halves(self) -> int:
        """Append spans of "B" and "E" entries: an end belongs to the last open beginning of its thread.

        How many stay alone.
        """
        open_ones: dict[tuple[Id, Id], list[Event]] = {}
        spans = []
        alone = 0
        for half in sorted(self.halves, key=lambda half: half.ts or 0):
            stack = open_ones.setdefault((half.pid, half.tid), [])
            if half.ph == "B":
                stack.append(half)
            elif stack:
                begin = stack.pop()
                # one of them may be exact where the other is not
                length = Decimal(half.ts or 0) - Decimal(begin.ts or 0)
                begin.ph = "X"
                begin.dur = float(length)
                spans.append(begin)
            else:
                alone += 1
        self.add(spans)
        return alone + sum(map(len, open_ones.values()))


def _number(
    columns: Columns,
    name: str,
    numbers: Numbered[Any],
    values: list[Any],
) -> None:
    """Write the numbers of the values into a column."""
    found = map(numbers.__getitem__, values)
    columns[name] = np.fromiter(found, COLUMNS[name], len(values))


def _choose_rows(columns: Columns, chosen: Flags) -> None:
    """Leave out of all columns the rows that are not chosen."""
    for name in columns:
        columns[name] = columns[name][chosen]


def _end_ns(event: Event) -> float:
    """The event's end; for one without a time a time before all others."""
    if event.ts is None:
        return LOST_NS
    return (float(event.ts) + (event.dur or 0.0)) * 1000


def _ends_ns(columns: Columns) -> Integers:
    """The events' ends; for one without a time a time before all others."""
    ends: Integers = columns["start_ns"] + np.maximum(columns["length_ns"], 0)
    return ends


def _start_ns(events: Sequence[Event]) -> Integers:
    """Exact nanoseconds: whole microseconds and the rest apart, since a product with 1000 may not fit a double."""
    if isinstance(events[0], ExactEvent) or isinstance(events[-1], ExactEvent):
        return np.array([_exact_ns(event) for event in events], np.int64)
    ts_us = np.array([event.ts for event in events], np.float64)
    is_lost = ~(np.abs(ts_us) < _MAX_US)
    ts_us[is_lost] = 0
    whole_us = np.floor(ts_us)
    rest_ns = np.rint((ts_us - whole_us) * 1000)
    start = whole_us.astype(np.int64) * 1000
    start += rest_ns.astype(np.int64)
    start[is_lost] = LOST_NS
    return start


def _exact_ns(event: Event) -> int:
    """The event's start where a double does not hold it."""
    if event.ts is None:
        return LOST_NS
    ts_us = Decimal(event.ts)
    is_usable = ts_us.is_finite() and abs(ts_us) < _MAX_US
    return int(ts_us * 1000) if is_usable else LOST_NS


def _length_ns(events: Sequence[Event]) -> Integers:
    """The events' lengths; 0 for one without any."""
    dur_us = np.array([event.dur for event in events], np.float64)
    dur_us = np.nan_to_num(dur_us, nan=0.0)
    dur_us = np.clip(dur_us, -_MAX_US / 1000, _MAX_US / 1000)
    return np.rint(dur_us * 1000).astype(np.int64)


def _integers(values: list[int | None]) -> Integers:
    """Convert numbers to int64 [k]; an id beyond 64 bits is as good as none."""
    try:
        return np.array(values, np.int64)
    except (OverflowError, TypeError):
        sound = []
        for value in values:
            is_sound = value is not None and abs(value) < 2**63
            sound.append(value if is_sound else -1)
        return np.array(sound, np.int64)


# --- what stands beside the events: ranks, devices, clocks; every value may be missing or of any type

_RANK_IN_NAME = re.compile(r"rank[_-]?\[?(\d{1,6})|\[(\d{1,6})\]", re.IGNORECASE)
_FACTS = ("schemaVersion", "trace_id", "host_name", "cuda_runtime_version", "cuda_driver_version")
_FACTS_OF_RANKS = ("backend", "nccl_version", "pg_count")
_MAX_TEXT = 200  # characters of a header's value that are worth showing
_UNIX_NS = 10**18  # larger times count from 1970 (2001 and later), by the clock of the machine


def read_header(
    header: dict[str, Any],
    path: Path,
    first_ns: int,
) -> dict[str, Any]:
    """Read the fields of a Trace that stand beside the events.

    Args:
        header: what stands there.
        path: the file.
        first_ns: the start of the first event by the file's clock.
    """
    ranks = header.get("distributedInfo")
    if not isinstance(ranks, dict):
        ranks = {}
    rank = _count(ranks.get("rank"))
    base_ns = _count(header.get("baseTimeNanoseconds"))
    has_clock = base_ns is not None or first_ns > _UNIX_NS
    devices = _list_dicts(header.get("deviceProperties"))
    ids = []
    for place, row in enumerate(devices):
        number = _count(row.get("id"))
        ids.append(place if number is None else number)
    return {
        "rank": rank_in_name(path.name) if rank is None else rank,
        "world_size": _read_world_size(ranks),
        "devices": tuple(str(row.get("name", ""))[:_MAX_TEXT] for row in devices),
        "device_ids": tuple(ids),
        "without_gpu": header.get("deviceProperties") == [],
        "facts": _choose_facts(header, _FACTS) | _choose_facts(ranks, _FACTS_OF_RANKS),
        "base_ns": (base_ns or 0) + first_ns if has_clock else None,
        "groups": _read_groups(ranks),
        "cores": read_core_use(header.get(CORES_IN_TRACE)),
        "hardware": _read_hardware(header.get(HARDWARE_IN_TRACE)),
    }


def _read_hardware(written: object) -> HardwareFigures | None:
    """The samples of a rank's hardware; None for nothing, or for what makes no sense."""
    try:
        return msgspec.convert(written, HardwareFigures)
    except msgspec.ValidationError:
        return None


def read_kept_damage(header: dict[str, Any]) -> KeptDamage:
    """Read what was wrong with the trace that one in a bundle was made of; nothing for other traces."""
    try:
        return msgspec.convert(header.get(KEPT_DAMAGE, {}), KeptDamage)
    except msgspec.ValidationError:
        return KeptDamage()


def _list_dicts(value: object) -> list[dict[str, Any]]:
    """The dictionaries in a list; none for what is no list."""
    if not isinstance(value, list):
        return []
    return [row for row in value if isinstance(row, dict)]


def _choose_facts(header: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Choose those of the header's values that are worth showing."""
    facts: dict[str, Any] = {}
    for name in names:
        value = header.get(name)
        if isinstance(value, str):
            facts[name] = value[:_MAX_TEXT]
        elif isinstance(value, (int, float)):
            facts[name] = value
    return facts


def _read_world_size(distributed: dict[str, Any]) -> int | None:
    """The number of ranks of the header's "distributedInfo"; None where it says none, or more than a run can have."""
    size = _count(distributed.get("world_size"))
    return size if size and size <= MAX_RANKS else None


def _read_groups(distributed: dict[str, Any]) -> tuple[ProcessGroup, ...]:
    """The groups of the header's "distributedInfo"; those of all ranks may have an empty list of them."""
    world_size = _read_world_size(distributed)
    groups = []
    for row in _list_dicts(distributed.get("pg_config")):
        size = _count(row.get("pg_size", row.get("group_size")))
        listed = row.get("ranks")
        ranks = [_count(rank) for rank in listed] if isinstance(listed, list) else []
        if size is not None and size == world_size and not ranks:
            ranks = list(range(size))
        known = tuple(rank for rank in ranks if rank is not None)
        group = ProcessGroup(
            name=str(row.get("pg_name") or "")[:_MAX_TEXT],
            description=str(row.get("pg_desc") or "")[:_MAX_TEXT],
            ranks=known if len(known) == size else (),
        )
        groups.append(group)
    return tuple(groups)


def rank_in_name(name: str) -> int | None:
    """3 of host_rank3.17.pt.trace.json and of trace[3].json."""
    found = _RANK_IN_NAME.search(name)
    return int(found[1] or found[2]) if found else None


def _count(value: Any) -> int | None:
    """A number of 0 or more that fits 64 bits; None for anything else."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < 2**63 else None


# --- the trace

# HTA: overlay_critical_path_analysis of hta/analyzers/critical_path_analysis.py, which by default drops other events
CRITICAL_PATH = "critical_path"
# "the actual times do not really matter here": libkineto/src/CuptiRangeProfiler.cpp, until its removal in 2026
RANGE_PROFILER = "cuda_profiler_range"
_MANY_LOST = 0.01  # of the events, without a time; profilers lose single ones in sound files
_HEAD_BYTES = 1 << 16  # tell JSON from packets
_LONG_AFTER_0 = 10**12  # a trace whose times are larger did not begin at 0


def open_chunks(path: Path, max_events: int) -> Chunks | PacketChunks:
    """Open a trace by what stands in it: JSON, or Perfetto's packets. max_events: see read_kineto."""
    try:
        head = first_bytes(path, _HEAD_BYTES)
    except (OSError, zlib.error):
        head = b""  # reading the file says what is wrong with it
    return PacketChunks(path, max_events) if is_perfetto(head) else Chunks(path)


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
    chunks = open_chunks(path, max_events)
    collected = Collected(max_events)
    for chunk in chunks:
        collected.add(chunk)
        report(chunks.bytes_read)
    notes: list[str] = []
    damage: list[str] = []
    kept = read_kept_damage(chunks.header)
    for text in (chunks.damage, kept.text):
        if text:
            damage.append(f"{path.name}: {text}")
    alone = collected.pair_halves()
    if alone:
        notes.append(f"beginnings or ends of spans without a counterpart: {alone:,}, left out")
    if not collected.spans:
        raise TraceError(f"{path}: {chunks.damage or 'a trace in which no event has a duration'}")
    columns = _join(collected.spans, COLUMNS)
    first_ns = _place_in_time(columns, notes, damage)
    if first_ns is None:
        raise TraceError(f"{path}: no event of it has a start time, so there is nothing to analyze.")
    form = NOT_PYTORCH_PACKETS if isinstance(chunks, PacketChunks) else NOT_PYTORCH
    foreign = find_foreign(chunks.header, collected.categories, collected.threads, collected.tracks, form)
    if foreign:
        raise TraceError(f"{path}: {foreign}.")
    if collected.until_ns is not None:
        notes.append(f"{path.name}: {_describe_shortened(collected, collected.until_ns, first_ns)}")
    damage += _describe_altered(collected)
    diagnostics = read_warnings(chunks.header)
    for text in diagnostics:
        line = f'the profiler reports: "{text}"'
        notes.append(line)
        if tells_of_loss(line):
            damage.append(line)
    return _build_trace(path, chunks, collected, columns, first_ns, notes, damage, diagnostics)


def _describe_altered(collected: Collected) -> list[str]:
    """Describe why the times or events of a trace are not those of the run."""
    altered = []
    if collected.has_critical_path:
        altered.append(
            "HTA added its critical path, and may have left nothing else; name the trace that it was made of"
        )
    if RANGE_PROFILER in collected.categories:
        altered.append(
            "counters of CUPTI's range profiler (profiler_metrics) serialize kernels and stand for them in this trace, "
            "with times that are made up; record another trace without them"
        )
    return altered


def _describe_shortened(collected: Collected, until_ns: int, first_ns: int) -> str:
    """Describe what was read of a trace with more events than are held."""
    read_s = significant((until_ns - first_ns) / 1e9)
    whole_s = significant((collected.last_ns - first_ns) / 1e9)
    return (
        f"more than {collected.max_events:,} events; what ends within its first {read_s} of {whole_s} s was read, "
        "the rest left out; a window of fewer steps (--profile-step-end) is read whole"
    )


def _build_trace(
    path: Path,
    chunks: Chunks | PacketChunks,
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
    notes += _describe_vague_copies(events, collected.names)
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
        counters=collected.counters.build(first_ns),
        notes=tuple(dict.fromkeys((*damage, *notes, *mended))),
        damage=tuple(damage),
        diagnostics=diagnostics,
        cut=chunks.cut or read_kept_damage(chunks.header).cut or collected.until_ns is not None,
        unread=placed.unread,
        **facts,
    )


def _describe_vague_copies(events: Events, names: Numbered[str]) -> list[str]:
    """Note copies that nothing but "Memcpy" is known of."""
    is_vague = (events.kind == Kind.MEMCPY) & (events.name == names.get(COPY, -1))
    if not is_vague.any():
        return []
    return [f"copies whose direction the file does not say: {np.count_nonzero(is_vague):,}"]


def _join_threads(columns: Columns, collected: Collected) -> tuple[tuple[str, str], ...]:
    """Join (process, thread) by number; files of 2021 write the same thread's id as a number and as a string."""
    threads: Numbered[tuple[str, str]] = Numbered()
    numbers = []
    for pid, tid in collected.threads:
        text = (str(pid), str(tid))
        numbers.append(threads[text])
    columns["thread"] = np.array(numbers, np.int32)[columns["thread"]]
    return tuple(threads)


def _find_memory_types(collected: Collected) -> set[int]:
    """Find torch's numbers of the types of the devices on which memory was allocated, without the host's."""
    types: set[int] = set()
    for chunk in collected.instants:
        types.update(np.unique(chunk["device_type"]).tolist())
    return types - {0}


def _join(chunks: list[Columns], columns: Iterable[str]) -> Columns:
    """Join the columns of many chunks; empties `chunks`, so that nothing is held twice for long."""
    joined = {}
    for name in columns:
        joined[name] = np.concatenate([chunk.pop(name) for chunk in chunks])
    return joined


def _place_in_time(columns: Columns, notes: list[str], damage: list[str]) -> int | None:
    """Make start_ns relative to the first event, end_ns of length_ns, and drop events without a time.

    Args:
        columns: of all events; are changed.
        notes: what a reader of the report should know; is added to.
        damage: what means that events are missing; is added to.

    Returns:
        The first event's start by the file's clock; None if no event has one.
    """
    start = columns["start_ns"]
    is_usable = start != LOST_NS
    if is_usable.any() and np.median(start[is_usable]) > _LONG_AFTER_0:
        # the profiler lost their time: pytorch/kineto#109
        is_usable &= start > 0
    if not is_usable.any():
        return None
    lost = np.count_nonzero(~is_usable)
    if lost:
        told = damage if lost / len(start) > _MANY_LOST else notes
        told.append(f"events without a start time: {lost:,}, left out")
        _choose_rows(columns, is_usable)
    start = columns["start_ns"]
    length = columns.pop("length_ns")
    negative = np.count_nonzero(length < 0)
    if negative:
        notes.append(f"events with a negative duration: {negative:,}, taken as instants")
    first = int(start.min())
    columns["start_ns"] = start - first
    columns["end_ns"] = columns["start_ns"] + np.maximum(length, 0)
    return first


def _read_shapes(texts: Numbered[tuple[bytes, ...]]) -> tuple[Shapes, ...]:
    """Shapes of their JSON texts (dims, dtypes, output mask)."""
    # few different lists of types stand in a trace with many different shapes
    types: dict[bytes, tuple[str, ...]] = {}
    shapes = []
    for dims, dtypes, mask in texts:
        if dtypes not in types:
            types[dtypes] = tuple(map(str, _read_list(dtypes)))
        words = re.findall(rb"\w+", mask)
        shapes.append(
            Shapes(
                dims=nested_tuples(_read_list(dims)),
                dtypes=types[dtypes],
                output_mask=tuple(word == b"True" for word in words),
            )
        )
    return tuple(shapes)


def _read_list(text: bytes) -> list[Any]:
    """The list of a JSON text; an empty one for what is none."""
    try:
        value = msgspec.json.decode(text) if text else []
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def nested_tuples(value: list[Any]) -> tuple[Any, ...]:
    """The list as a tuple, as are the lists in it."""
    return tuple([nested_tuples(one) if isinstance(one, list) else one for one in value])


def _read_memory(instants: list[Columns], first_ns: int) -> MemoryEvents:
    """The memory events of all chunks, by time. first_ns: start of the first event by the file's clock."""
    if not instants:
        return make_no_memory_events()
    columns = _join(instants, ("start_ns", *MEMORY_ARGS))
    _choose_rows(columns, columns["start_ns"] != LOST_NS)
    order = np.argsort(columns["start_ns"], kind="stable")
    columns = {name: column[order] for name, column in columns.items()}
    is_host = columns["device_type"] == 0
    device = np.where(is_host, -1, columns["device"])
    device = np.clip(device, -1, 2**15 - 1)
    return MemoryEvents(
        time_ns=columns["start_ns"] - first_ns,
        num_bytes=columns["num_bytes"],
        total_allocated=columns["total_allocated"],
        total_reserved=columns["total_reserved"],
        device=device.astype(np.int16),
    )
