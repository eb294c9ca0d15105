"""Any file that may be a trace -> its traces."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_lite.analysis.trace.blocks import BLOCK_BYTES, Blocks
from megatron_lite.analysis.trace.columns import DEVICE_KINDS, Kind, MemoryEvents, Trace, TraceError
from megatron_lite.analysis.trace.kineto_columns import (
    COLUMNS,
    LOST_NS,
    MAX_EVENTS,
    MEMORY_COLUMNS,
    Collected,
    find_kinds,
    joined,
    paired,
)
from megatron_lite.analysis.trace.kineto_header import (
    DEVICE_WAIT,
    KIND_OF_PROCESS,
    OPERATORS_OF_2021,
    Header,
    is_annotation_of_2021,
    last_number,
    read_shapes,
)
from megatron_lite.analysis.trace.kineto_json import Event, decoded, decoded_alone, mended
from megatron_lite.analysis.trace.repair import repaired

# --- A Kineto file cut into chunks of whole events, without parsing it as a whole

_ARRAY = re.compile(rb'(?<!\\)"traceEvents"\s*:\s*\[')
_BARE_ARRAY = re.compile(rb"\s*\[")
_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_END = re.compile(rb"\}\s*\]")
_BLANK = b", \t\r\n"
_LEADING = re.compile(rb"[, \t\r\n]*")
_MAX_HEADER_BYTES = 64 << 20
_NEAR = 64 << 10  # how far before a chunk's end the last border between two events is looked for first
_MAX_EVENT_BYTES = 64 << 20  # no event is that long: what is there is something else
_MAX_ENDS, _MAX_PIECES = 8, 16


class Chunks:
    """Iterates over lists of events. After it: `header`, all that stands beside the events, and `damage`, a sentence."""

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES):
        self.path, self.header, self.damage = path, {}, None
        self._blocks, self._unreadable = Blocks(path, block_bytes), 0
        self._before, self._text, self._at = b"", b"", 0  # _at: place of _text in the file's text

    @property
    def bytes_read(self) -> int:
        """Of the file as it lies on the disk, for what shows how far it is read."""
        return self._blocks.bytes_read

    def __iter__(self) -> Iterator[list[Event]]:
        blocks, ended = iter(self._blocks), False
        self._find_array(blocks)
        for block in blocks:
            self._text += block
            if not ended and len(self._text) >= self._blocks.block_bytes:
                events, ended = self._next_chunk()
                yield events
                if not ended and len(self._text) > _MAX_EVENT_BYTES:
                    break
        size = None
        while not ended and self._text and size != len(self._text):
            size = len(self._text)
            events, ended = self._next_chunk(last=True)
            yield events
        self.header = self._header(self._text if ended else None)
        self.damage, self.cut = self._blocks.damage or self._damage(ended), not ended

    def _find_array(self, blocks: Iterator[bytes]):
        """Stand at the first event."""
        for block in blocks:
            self._text += block
            start = self._text[:4096].lstrip()[:1]
            found = (_BARE_ARRAY.match if start == b"[" else _ARRAY.search)(self._text)
            if found:
                self._before = self._text[: found.start()] if start == b"{" else b""
                self._move(found.end())
                return
            if start not in (b"{", b"[", b"") or len(self._text) > _MAX_HEADER_BYTES:
                break
        raise TraceError(f"{self.path}: {_what_it_is(self._text, self._blocks.damage)}")

    def _next_chunk(self, last: bool = False) -> tuple[list[Event], bool]:
        """The next events, and whether their array ends there."""
        start = _LEADING.match(self._text).end()
        if self._text.startswith(b"]", start):
            return [], True
        border = self._last_border()
        if border and (events := decoded(self._text[start:border])) is not None:
            self._move(border)
            return events, False
        for number, end in enumerate(_END.finditer(self._text)):
            if number < _MAX_ENDS and (events := decoded(self._text[start : end.start() + 1])) is not None:
                self._move(end.end())
                return events, True
        return self._one_by_one(last)

    def _last_border(self) -> int:
        """Place after the last event that another one follows; 0: none is seen."""
        for start in (max(len(self._text) - _NEAR, 0), 0):
            if places := [found.start() + 1 for found in _BETWEEN.finditer(self._text, start)]:
                return places[-1]
        return 0

    def _one_by_one(self, last: bool) -> tuple[list[Event], bool]:
        """The events of a chunk that holds something unreadable, which is left out. `last`: no more text will come."""
        borders = [0, *(found.start() + 1 for found in _BETWEEN.finditer(self._text))]
        events, place = [], 0
        while place < len(borders) - 1:
            event, after = self._event_at(borders, place)
            if event is not None:
                events.append(event)
            elif end := self._end_within(borders[place], borders[place + 1]):
                return self._ended(events, *end)
            elif not last and place + _MAX_PIECES >= len(borders):
                break  # the event may end in what is not read yet
            else:
                self._unreadable, after = self._unreadable + 1, place + 1
            place = after
        if end := self._end_within(borders[place], len(self._text)):
            return self._ended(events, *end)
        if last and (event := decoded_alone(self._text[borders[place] :].strip(_BLANK))) is not None:
            events.append(event)
            borders[place] = len(self._text)
        self._move(borders[place])
        return events, False

    def _event_at(self, borders: list[int], place: int) -> tuple[Event | None, int]:
        """The event that begins at a border, and the border where it ends: borders may stand inside of events."""
        for after in range(place + 1, min(place + 1 + _MAX_PIECES, len(borders))):
            piece = self._text[borders[place] : borders[after]].strip(_BLANK)
            event = None if _is_open(piece) else decoded_alone(piece)
            if event is not None:
                return event, after
        return None, place

    def _end_within(self, start: int, stop: int) -> tuple[Event, int] | None:
        """The array's last event and the place after the array, if it ends between the two places."""
        for end in _END.finditer(self._text, start, stop):
            event = decoded_alone(self._text[start : end.start() + 1].strip(_BLANK))
            if event is not None:
                return event, end.end()
        return None

    def _ended(self, events: list[Event], last: Event, end: int) -> tuple[list[Event], bool]:
        self._move(end)
        return [*events, last], True

    def _move(self, by: int):
        self._text = self._text[by:]
        self._at += by

    def _damage(self, ended: bool) -> str | None:
        if not ended:
            left = self._text.lstrip(_BLANK)
            where = self._at + len(self._text) - len(left)
            what = f"in the event at byte {where:,}" if left else f"after byte {where:,}"
            return f"the JSON breaks off {what}; what stands before it was read"
        return f"events that cannot be read: {self._unreadable:,}, left out" if self._unreadable else None

    def _header(self, after: bytes | None) -> dict:
        """What stands before and after the events; only what stands before where the end is missing or damaged."""
        before = self._before.rstrip(_BLANK) + b"}"
        for text in ([] if after is None else [self._before + b'"traceEvents":[]' + after]) + [before]:
            try:
                header = json.loads(mended(text), strict=False)
            except (ValueError, RecursionError):
                continue
            return header if isinstance(header, dict) else {}
        return {}


def _is_open(piece: bytes) -> bool:
    """Does it end inside of a list or a string?"""
    return piece.count(b"[") > piece.count(b"]") or (piece.count(b'"') - piece.count(rb"\"")) % 2 == 1


def _what_it_is(text: bytes, damage: str | None) -> str:
    if damage:
        return f"{damage}, and holds no event."
    if not text.strip():
        return "empty; a trace holds a JSON object with traceEvents."
    if text.lstrip()[:1] not in (b"{", b"["):
        return "not a trace: neither JSON nor gzipped JSON."
    return "JSON without traceEvents, so no trace of torch.profiler."


# --- A trace of torch.profiler (Kineto), of any year -> Trace

_UNIX_NS = 10**18  # larger times count from 1970 (2001 and later), by the clock of the machine
_MANY_LOST = 0.01  # of the events, without a time; profilers lose single ones in sound files
_LONG_AFTER_0 = 10**12  # a trace whose times are larger did not begin at 0


def read_kineto(
    path: Path, max_events: int = MAX_EVENTS, report: Callable[[int], None] = lambda bytes_read: None
) -> Trace:
    """The trace in the file `path`, its first part in time where it has more than max_events. Raises TraceError for what is none.

    report(bytes of the file that are read) is called now and then.
    """
    chunks, collected, notes, damage = Chunks(path), Collected(max_events), [], []
    for events in chunks:
        collected.add(events)
        report(chunks.bytes_read)
    if chunks.damage:
        damage.append(f"{path.name}: {chunks.damage}")
    if collected.halves:
        spans, alone = paired(collected.halves)
        collected.add(spans)
        if alone:
            notes.append(f"beginnings or ends of spans without a counterpart: {alone:,}, left out")
    if not collected.spans:
        raise TraceError(f"{path}: {chunks.damage or 'a trace without events; was the profiler on?'}")
    trace = _trace(path, Header(chunks.header, path), collected, notes, damage)
    return replace(trace, cut=chunks.cut or collected.until_ns is not None)


def _trace(path: Path, header: Header, collected: Collected, notes: list[str], damage: list[str]) -> Trace:
    columns = joined(collected.spans, COLUMNS)
    first_ns = _place_in_time(columns, notes, damage)
    if first_ns is None:
        raise TraceError(f"{path}: no event of it has a start time, so there is nothing to analyse.")
    if collected.until_ns is not None:
        seconds, of_all = ((end - first_ns) / 1e9 for end in (collected.until_ns, collected.last_ns))
        notes.append(
            f"{path.name}: more than {collected.max_events:,} events; what ends in its first {seconds:.3g} of {of_all:.3g} s was read, "
            "the rest left out; a window of fewer steps (--profile-step-end) is read whole"
        )
    names = tuple(collected.names)
    columns["kind"] = _kinds(columns, names, list(collected.categories), list(collected.threads))
    _place_on_devices(columns, list(collected.threads))
    columns["thread"], threads = _threads(collected, columns["thread"])
    events, more = repaired(columns)
    notes += more
    return Trace(
        source=path.name, writer="pytorch", rank=header.rank, world_size=header.world_size, devices=header.devices,
        base_ns=header.clock_ns(first_ns) if header.has_clock or first_ns > _UNIX_NS else None,
        with_stack=header.says("with_stack") or bool((events.kind == Kind.PYTHON).any()),
        with_shapes=header.says("record_shapes") or bool((events.shapes >= 0).any()),
        names=names, threads=threads, shapes=read_shapes(collected.shapes),
        collectives=tuple(collected.collectives), events=events, memory=_memory(collected, first_ns), notes=(*damage, *notes),
        damage=tuple(damage), without_gpu=header.without_gpu, facts=header.facts,
    )  # fmt: skip


def _place_in_time(columns: dict, notes: list[str], damage: list[str]) -> int | None:
    """Make start_ns relative to the first event, end_ns of length_ns, and drop events without a time; the first's start
    by the file's clock, None if no event has one."""
    start, length = columns["start_ns"], columns.pop("length_ns")
    usable = start != LOST_NS
    if usable.any() and np.median(start[usable]) > _LONG_AFTER_0:
        usable &= start > 0  # the profiler lost their time: pytorch/kineto#109
    if not usable.any():
        return None
    if not usable.all():
        many = (~usable).mean() > _MANY_LOST
        (damage if many else notes).append(f"events without a start time: {(~usable).sum():,}, left out")
        for name, column in columns.items():
            columns[name] = column[usable]
        start, length = columns["start_ns"], length[usable]
    if negative := int((length < 0).sum()):
        notes.append(f"events with a negative duration: {negative:,}, taken as instants")
    first = int(start.min())
    columns["start_ns"] = start - first
    columns["end_ns"] = columns["start_ns"] + np.maximum(length, 0)
    return first


def _kinds(columns: dict, names: tuple[str, ...], categories: list[str], threads: list[tuple]) -> np.ndarray:
    kind = find_kinds(categories)[columns.pop("category")]
    of_process = np.array([KIND_OF_PROCESS.get(pid, Kind.OTHER) for pid, _ in threads], np.uint8)
    kind = np.where(kind == Kind.OTHER, of_process[columns["thread"]], kind)
    if OPERATORS_OF_2021 in categories:
        named_by_code = np.fromiter(map(is_annotation_of_2021, names), bool, len(names))
        kind[(kind == Kind.OP) & named_by_code[columns["name"]]] = Kind.ANNOTATION
    waits = np.fromiter((bool(DEVICE_WAIT.fullmatch(name)) for name in names), bool, len(names))
    kind[(kind == Kind.KERNEL) & waits[columns["name"]]] = Kind.SYNC
    return kind


def _place_on_devices(columns: dict, threads: list[tuple]):
    """device and stream of device work and syncs: its arguments, else (work) its pid and tid; -1 for the host's events."""
    kind, thread = columns["kind"], columns["thread"]
    on_device = np.isin(kind, (*DEVICE_KINDS, Kind.GPU_ANNOTATION))
    for name, which, largest, dtype in (("device", 0, 2**15, np.int16), ("stream", 1, 2**31, np.int32)):
        place = np.array([last_number(ids[which]) for ids in threads], np.int64)[thread]
        value = np.where(on_device & (columns[name] < 0), place, columns[name])
        columns[name] = np.where((value >= 0) & (value < largest), value, -1).astype(dtype)


def _threads(collected: Collected, thread: np.ndarray) -> tuple[np.ndarray, tuple[tuple[str, str], ...]]:
    """Threads by their text: files of 2021 write the same id as a number and as a string."""
    texts = [(str(pid), str(tid)) for pid, tid in collected.threads]
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    return np.array([number[text] for text in texts], np.int32)[thread], tuple(number)


def _memory(collected: Collected, first_ns: int) -> MemoryEvents:
    m = joined(collected.instants, MEMORY_COLUMNS)
    order = np.argsort(m["time_ns"], kind="stable")
    order = order[m["time_ns"][order] != LOST_NS]
    m = {name: column[order] for name, column in m.items()}
    device = np.where(m.pop("device_type") == 0, -1, m["device"])
    m["device"] = np.clip(device, -1, 2**15 - 1).astype(np.int16)
    return MemoryEvents(**m | {"time_ns": m["time_ns"] - first_ns})


# --- any file that may be a trace -> its traces

SQLITE_MAGIC = b"SQLite format 3\0"
NSYS_REPORTS = (".nsys-rep", ".qdstrm")


def read_traces(
    path: Path, max_events: int = MAX_EVENTS, report: Callable[[int], None] = lambda bytes_read: None
) -> tuple[Trace, ...]:
    """The traces in the file `path`: one of a torch.profiler file, one per process of an Nsight Systems .sqlite.
    Raises TraceError, one line, for what is no trace. max_events, report: as of read_kineto."""
    if path.suffix in NSYS_REPORTS:
        raise TraceError(f"{path}: {export_first(path)}")
    try:
        with open(path, "rb") as file:
            magic = file.read(16)
    except IsADirectoryError:
        raise TraceError(f"{path}: a folder; name a file in it.") from None
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}; name a trace that can be read.") from None
    if magic == SQLITE_MAGIC:
        from megatron_lite.analysis.trace.nsys import read_nsys

        return read_nsys(path)
    return (read_kineto(path, max_events, report),)


def export_first(report: Path) -> str:
    """What to do with a report of Nsight Systems."""
    if report.suffix == ".qdstrm":
        return (
            "what nsys recorded, not imported yet; run QdstrmImporter -i on it, then nsys export --type sqlite on its "
            ".nsys-rep"
        )
    return f"a report of Nsight Systems; export it first: nsys export --type sqlite {report.name}"
