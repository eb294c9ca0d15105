"""Lists of events -> columns; names and shapes become numbers on the way."""

from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from itertools import compress

import numpy as np

from megatron_lite.analysis.trace.columns import DEVICE_KINDS, Collective, Kind, Numbered, TraceError
from megatron_lite.analysis.trace.kineto_header import KIND_OF_CATEGORY
from megatron_lite.analysis.trace.kineto_json import NO_ARGS, Args, Event, ExactEvent

LOST_NS = np.iinfo(np.int64).min  # the start of an event that has none
MAX_EVENTS = 10_000_000  # about 2 GB of text; a trace of 5 million took 1.27 GB of memory, one of 15 million 1.76 GB
_MAX_US = 4e15  # the year 2096; differences of such times in ns still fit 64 bits
COLUMNS = {
    "name": np.int32, "category": np.int16, "thread": np.int32, "start_ns": np.int64, "length_ns": np.int64,
    "device": np.int64, "stream": np.int64, "correlation": np.int64, "num_bytes": np.int64, "shapes": np.int32,
    "collective": np.int32, "sequence": np.int64, "forward_thread": np.int64,
}  # fmt: skip
MEMORY_COLUMNS = dict.fromkeys(
    ("time_ns", "num_bytes", "total_allocated", "total_reserved", "device", "device_type"), np.int64
)


@dataclass
class Collected:
    """Columns of the chunks so far, and what their numbers stand for.

    More than max_events are never held: the latest quarter of them goes, and from then on all that ends after the rest. What stays
    is all that happened up to until_ns, in whatever order the file has it.
    """

    max_events: int = MAX_EVENTS
    until_ns: int | None = None  # None: everything
    last_ns: int = LOST_NS  # end of the last event of the file, held or not
    held: int = 0
    names: Numbered = field(default_factory=Numbered)
    categories: Numbered = field(default_factory=Numbered)
    threads: Numbered = field(default_factory=Numbered)  # (pid, tid)
    shapes: Numbered = field(default_factory=Numbered)  # (dims, dtypes) as JSON
    collectives: Numbered = field(default_factory=Numbered)
    spans: list[dict] = field(default_factory=list)  # columns of each chunk
    instants: list[dict] = field(default_factory=list)
    halves: list[Event] = field(default_factory=list)  # "B" and "E" entries: beginnings and ends of spans

    def add(self, events: list[Event]):
        """Append a chunk."""
        if self.until_ns is not None:
            ends = list(map(_end_ns, events))
            self.last_ns = max([self.last_ns, *ends])
            events = list(compress(events, [end <= self.until_ns for end in ends]))
        spans = [event for event in events if event.ph == "X"]
        if len(spans) < len(events):
            self.halves += [event for event in events if event.ph in ("B", "E") and event.ts is not None]
            memory = [event for event in events if event.ph == "i" and event.name == "[memory]"]
            if memory:
                self.instants.append(_memory(memory))
        if spans:
            self.spans.append(self._columns(spans))
        self.held += len(events)
        if self.held > self.max_events:
            self._shorten()

    def _shorten(self):
        """Let the latest quarter in time go: a smaller part would be let go more often, a larger one leaves fewer whole steps."""
        ends = np.concatenate([_ends_ns(columns) for columns in (*self.spans, *self.instants)])
        ends = ends[ends > LOST_NS // 2]
        if not len(ends):
            raise TraceError(f"more than {self.max_events:,} events without a time")
        self.last_ns = max(self.last_ns, int(ends.max()))
        kept = len(ends) * 3 // 4
        self.until_ns = int(np.partition(ends, kept)[kept])
        for chunks in (self.spans, self.instants):
            chunks[:] = [_rows(columns, _ends_ns(columns) <= self.until_ns) for columns in chunks]
        self.halves = [event for event in self.halves if _end_ns(event) <= self.until_ns]
        self.held = sum(len(next(iter(columns.values()))) for columns in (*self.spans, *self.instants)) + len(
            self.halves
        )

    def _columns(self, spans: list[Event]) -> dict[str, np.ndarray]:
        count = len(spans)
        category = np.fromiter(map(self.categories.__getitem__, [e.cat for e in spans]), np.int16, count)
        columns = {
            "name": np.fromiter(map(self.names.__getitem__, [e.name for e in spans]), np.int32, count),
            "category": category,
            "thread": np.fromiter(map(self.threads.__getitem__, [(e.pid, e.tid) for e in spans]), np.int32, count),
            "start_ns": _start_ns(spans),
            "length_ns": _length_ns(spans),
        }
        columns |= {name: np.full(count, -1, COLUMNS[name]) for name in COLUMNS if name not in columns}
        kind, args = find_kinds(list(self.categories))[category], [event.args or NO_ARGS for event in spans]
        for kinds, readers in self._readers.items():
            of_kind = np.isin(np.arange(len(Kind)), kinds)[kind]
            own = list(compress(args, of_kind.tolist()))
            for name, read in readers.items() if own else ():
                columns[name][of_kind] = read(own)
        return columns

    @cached_property
    def _readers(self) -> dict:
        """Which arguments each kind of event has; asking all events for all of them takes twice as long."""
        return {
            (Kind.OP, Kind.ANNOTATION): {
                "sequence": lambda args: _whole([a.sequence for a in args]),
                "forward_thread": lambda args: _whole([a.forward_thread for a in args]),
                "shapes": self._shapes, "collective": self._collectives,
            },
            (Kind.RUNTIME,): {"correlation": lambda args: _whole([a.correlation for a in args])},
            (*DEVICE_KINDS, Kind.SYNC): {
                "device": lambda args: _whole([a.device for a in args]),
                "stream": lambda args: _whole([a.stream for a in args]),
                "correlation": lambda args: _whole([a.correlation for a in args]),
                "num_bytes": lambda args: _whole([a.bytes for a in args]),
                "collective": self._collectives,
            },
        }  # fmt: skip

    def _shapes(self, args: list[Args]) -> np.ndarray:
        known = self.shapes
        return np.array([known[bytes(a.dims), bytes(a.dtypes)] if a.dims else -1 for a in args], np.int32)

    def _collectives(self, args: list[Args]) -> np.ndarray:
        known = self.collectives
        return np.array(
            [
                -1 if a.collective is None and a.group is None and a.in_elements is None else known[_collective(a)]
                for a in args
            ],
            np.int32,
        )


def _end_ns(event: Event) -> float:
    return LOST_NS if event.ts is None else (float(event.ts) + (event.dur or 0.0)) * 1000


def _ends_ns(columns: dict) -> np.ndarray:
    """Of spans or instants; of one without a time a time before all others."""
    return columns["time_ns"] if "time_ns" in columns else columns["start_ns"] + np.maximum(columns["length_ns"], 0)


def _rows(columns: dict, kept: np.ndarray) -> dict[str, np.ndarray]:
    return {name: column[kept] for name, column in columns.items()}


def _collective(a: Args) -> Collective:
    return Collective(
        a.collective, a.group, a.group_size, a.in_elements, a.out_elements, a.dtype, a.collective_sequence
    )


def _start_ns(events: list[Event]) -> np.ndarray:
    """Exact nanoseconds: whole microseconds and the rest apart, since a product with 1000 may not fit a double."""
    if isinstance(events[0], ExactEvent) or isinstance(events[-1], ExactEvent):
        return np.array([_exact_ns(e.ts) for e in events], np.int64)
    ts_us = np.array([e.ts for e in events], np.float64)
    lost = ~(np.abs(ts_us) < _MAX_US)
    ts_us[lost] = 0
    whole = np.floor(ts_us)
    start = whole.astype(np.int64) * 1000 + np.rint((ts_us - whole) * 1000).astype(np.int64)
    start[lost] = LOST_NS
    return start


def _exact_ns(ts_us: Decimal | float | None) -> int:
    number = Decimal("nan" if ts_us is None else ts_us)
    return int(number * 1000) if number.is_finite() and abs(number) < _MAX_US else LOST_NS


def _length_ns(events: list[Event]) -> np.ndarray:
    """Nanoseconds; 0 where none is given, and negative ones as they are."""
    dur_us = np.nan_to_num(np.array([e.dur for e in events], np.float64), nan=0.0)
    return np.rint(np.clip(dur_us, -_MAX_US / 1000, _MAX_US / 1000) * 1000).astype(np.int64)


def _memory(events: list[Event]) -> dict[str, np.ndarray]:
    args = [event.args or NO_ARGS for event in events]
    return {
        "time_ns": _start_ns(events),
        "num_bytes": _whole([a.memory_bytes for a in args]),
        "total_allocated": _whole([a.allocated for a in args]),
        "total_reserved": _whole([a.reserved for a in args]),
        "device": _whole([a.memory_device for a in args]),
        "device_type": _whole([a.memory_device_type for a in args]),
    }


def _whole(values: list[int | None]) -> np.ndarray:
    try:
        return np.array(values, np.int64)
    except (OverflowError, TypeError):  # an id beyond 64 bits is as good as none
        return np.array([-1 if value is None or abs(value) >= 2**63 else value for value in values], np.int64)


def paired(halves: list[Event]) -> tuple[list[Event], int]:
    """Spans of "B" and "E" entries: an end belongs to the last open beginning of its thread. And how many stay alone."""
    open_ones, spans, alone = {}, [], 0
    for half in sorted(halves, key=lambda half: half.ts):
        stack = open_ones.setdefault((half.pid, half.tid), [])
        if half.ph == "B":
            stack.append(half)
        elif stack:
            begin = stack.pop()
            begin.ph, begin.dur = "X", float(half.ts - begin.ts)
            spans.append(begin)
        else:
            alone += 1
    return spans, alone + sum(map(len, open_ones.values()))


def joined(chunks: list[dict], columns: dict) -> dict[str, np.ndarray]:
    """One dict of columns of many; empties `chunks`, so that nothing is held twice for long."""
    return {
        name: np.concatenate([chunk.pop(name) for chunk in chunks]) if chunks else np.empty(0, dtype)
        for name, dtype in columns.items()
    }


def find_kinds(categories: list[str]) -> np.ndarray:
    """uint8, a Kind per category name."""
    return np.array([KIND_OF_CATEGORY.get(category, Kind.OTHER) for category in categories], np.uint8)
