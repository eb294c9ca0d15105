"""A timeline as a file of Perfetto's own format (protobuf), for ui.perfetto.dev. Written piece by piece."""

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.timeline.timeline_results import (
    Argument,
    CounterUnit,
    Counts,
    MergedTimeline,
    Slices,
    TextArgument,
    TimelineProcess,
    Track,
)
from megatron_lite.errors import UserError
from megatron_lite.formats import perfetto_trace as proto
from megatron_lite.report.protobuf import (
    Column,
    Fixed64Column,
    MessageColumn,
    VarintColumn,
    bytes_field,
    number_field,
    write_messages,
)

GZIP_ENDING = ".gz"
GZIP_LEVEL = 4
ROWS_AT_ONCE = 1 << 16  # events that are written together


def check_file(flag: str, path: Path) -> None:
    """Refuse a name that Perfetto's page would not know what to do with, and a file that is somebody else's trace.

    Args:
        flag: the flag that names it.
        path: the file.

    Raises:
        UserError: the name has another ending, or the file is not one that was written so; one line.
    """
    name = path.name.removesuffix(GZIP_ENDING)
    if not name.endswith(proto.ENDINGS):
        raise UserError(
            f"{flag} {path}: the file is Perfetto's own format, which is read plain or gzipped; "
            f"name it FILE{proto.ENDINGS[0]} or FILE{proto.ENDINGS[0]}{GZIP_ENDING}."
        )
    if os.path.isfile(path) and os.path.getsize(path) and not _is_own(path):
        raise UserError(f"{flag} {path}: there is a file that {flag} did not write; name another one.")


def _is_own(path: Path) -> bool:
    """Tell whether a report wrote the file; False where it cannot be read."""
    with contextlib.suppress(OSError, EOFError, zlib.error), path.open("rb") as raw:
        file = gzip.open(raw) if path.name.endswith(GZIP_ENDING) else raw
        return proto.MERGED_BY.encode() in file.read(proto.MAX_BEFORE_WRITER)
    return False


def write_perfetto(flag: str, path: Path, timeline: MergedTimeline) -> int:
    """Write a timeline; its contents are asked for one after the other, and held only while they are written.

    Args:
        flag: the flag that names the file, for the message where it cannot be written.
        path: the file; it is gzipped where its name ends so.
        timeline: the tracks and what stands on them.

    Returns:
        The file's size in bytes.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        with path.open("wb") as raw:
            if path.name.endswith(GZIP_ENDING):
                # without name and time the same run gives the same bytes
                with gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0) as packed:
                    _write_all(packed, timeline)
            else:
                _write_all(raw, timeline)
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be written ({error.strerror or error}); name another file.") from error


def _write_all(out: BinaryIO | gzip.GzipFile, timeline: MergedTimeline) -> None:
    """Write what the file says of itself, then track after track."""
    out.write(_describe_notes(timeline))
    out.write(_describe_clock(timeline))
    out.write(_describe_root())
    for process in timeline.processes:
        out.write(_describe_process(process))
    described: set[int] = set()
    for sequence, content in enumerate(timeline.contents, 1):
        track = content.track
        if track.uuid not in described:
            described.add(track.uuid)
            out.write(_describe_track(track))
        if isinstance(content, Slices):
            pieces = _write_slices(content, sequence)
        else:
            pieces = _write_counts(content, sequence)
        for piece in pieces:
            out.write(piece)


# --- what stands before events


def _packet(*fields: bytes) -> bytes:
    """Write a packet of its fields."""
    return bytes_field(proto.TraceField.PACKET, b"".join(fields))


def _describe_clock(timeline: MergedTimeline) -> bytes:
    """Write that time 0 is this moment since 1970, where it is known."""
    clocks = {proto.BOOTTIME_CLOCK: 0}
    if timeline.unix_ns is not None:
        clocks[proto.REALTIME_CLOCK] = timeline.unix_ns
    written = []
    for number, time_ns in clocks.items():
        clock = number_field(proto.ClockField.CLOCK_ID, number)
        clock += number_field(proto.ClockField.TIMESTAMP, time_ns)
        written.append(bytes_field(proto.SnapshotField.CLOCKS, clock))
    written.append(number_field(proto.SnapshotField.PRIMARY_CLOCK, proto.BOOTTIME_CLOCK))
    snapshot = b"".join(written)
    return _packet(bytes_field(proto.PacketField.CLOCK_SNAPSHOT, snapshot))


def _describe_notes(timeline: MergedTimeline) -> bytes:
    """Write the notes and the clocks as metadata."""
    notes = {proto.WRITER_NOTE: proto.MERGED_BY, **timeline.notes}
    for clock in timeline.clocks:
        notes[f"clock of {clock.name}"] = clock.describe()
    written = []
    for name, text in notes.items():
        entry = bytes_field(proto.MetadataField.NAME, name)
        entry += bytes_field(proto.MetadataField.STRING_VALUE, text)
        written.append(bytes_field(proto.ChromeEventsField.METADATA, entry))
    events = b"".join(written)
    return _packet(bytes_field(proto.PacketField.CHROME_EVENTS, events))


def _describe_root() -> bytes:
    """Write that processes and threads stand in the order of their descriptors."""
    fields = (
        number_field(proto.TrackField.UUID, proto.ROOT_UUID),
        number_field(proto.TrackField.PROCESS_ORDERING, proto.EXPLICIT_ROOT_ORDER),
        number_field(proto.TrackField.THREAD_ORDERING, proto.EXPLICIT_ROOT_ORDER),
    )
    return _packet(bytes_field(proto.PacketField.TRACK_DESCRIPTOR, b"".join(fields)))


def _describe_process(process: TimelineProcess) -> bytes:
    """Write the descriptor of a process."""
    own = (
        number_field(proto.ProcessField.PID, process.pid)
        + number_field(proto.ProcessField.SORT_INDEX, process.order)
        + bytes_field(proto.ProcessField.NAME, process.name)
    )
    track = (
        number_field(proto.TrackField.UUID, process.uuid)
        + bytes_field(proto.TrackField.PROCESS, own)
        + number_field(proto.TrackField.CHILD_ORDERING, proto.EXPLICIT_ORDER)
        + number_field(proto.TrackField.SIBLING_ORDER_RANK, process.order)
    )
    return _packet(bytes_field(proto.PacketField.TRACK_DESCRIPTOR, track))


def _describe_track(track: Track) -> bytes:
    """Write the descriptor of a track."""
    fields = [
        number_field(proto.TrackField.UUID, track.uuid),
        number_field(proto.TrackField.SIBLING_ORDER_RANK, track.order),
    ]
    if track.description:
        fields.append(bytes_field(proto.TrackField.DESCRIPTION, track.description))
    if track.thread is not None:
        thread = (
            number_field(proto.ThreadField.PID, track.thread.pid)
            + number_field(proto.ThreadField.TID, track.thread.tid)
            + number_field(proto.ThreadField.SORT_INDEX, track.order)
            + bytes_field(proto.ThreadField.NAME, track.name)
        )
        fields.append(bytes_field(proto.TrackField.THREAD, thread))
    else:
        fields.append(bytes_field(proto.TrackField.NAME, track.name))
        fields.append(number_field(proto.TrackField.PARENT_UUID, track.process.uuid))
    if track.counter is not None:
        unit = bytes_field(proto.CounterField.UNIT_NAME, track.counter.value)
        if track.counter is CounterUnit.BYTES:
            unit = number_field(proto.CounterField.UNIT, proto.WrittenUnit.BYTES)
        fields.append(bytes_field(proto.TrackField.COUNTER, unit))
    return _packet(bytes_field(proto.PacketField.TRACK_DESCRIPTOR, b"".join(fields)))


# --- events


@dataclass
class _Texts:
    """Texts of a sequence by number, from 1 on."""

    names: Sequence[str]
    categories: Sequence[str]
    arguments: Sequence[str]  # their names
    texts: list[str] = field(default_factory=list)  # of all text arguments

    def write(self, sequence: int) -> bytes:
        """Write the packet that begins the sequence."""
        written = [
            _write_entries(proto.InternedField.EVENT_CATEGORIES, self.categories),
            _write_entries(proto.InternedField.EVENT_NAMES, self.names),
            _write_entries(proto.InternedField.ANNOTATION_NAMES, self.arguments),
            _write_entries(proto.InternedField.ANNOTATION_STRINGS, self.texts),
        ]
        return _packet(
            number_field(proto.PacketField.SEQUENCE_ID, sequence),
            number_field(proto.PacketField.SEQUENCE_FLAGS, proto.INCREMENTAL_STATE_CLEARED),
            bytes_field(proto.PacketField.INTERNED_DATA, b"".join(written)),
        )


def _write_entries(number: int, texts: Sequence[str]) -> bytes:
    """Write texts, numbered from 1 on, as entries of interned data."""
    entries = []
    for iid, text in enumerate(texts, 1):
        entry = number_field(proto.InternedEntryField.IID, iid)
        entry += bytes_field(proto.InternedEntryField.TEXT, text)
        entries.append(bytes_field(number, entry))
    return b"".join(entries)


@dataclass(frozen=True)
class _Moments:
    """Begins and ends of slices, and instants, in the order in which they are written; k of them."""

    time_ns: Integers  # [k]
    slice: Integers  # [k], which of the slices
    type: Integers  # [k], an EventType


def _order_moments(slices: Slices) -> _Moments:
    """Order begins and ends so that a reader who goes by time, then by place in the file, sees slices nest.

    What ends at a moment does so before others begin, the innermost first; an instant stands where it begins.
    """
    is_long = slices.end_ns > slices.start_ns
    long = np.flatnonzero(is_long)
    first_types = np.where(is_long, proto.EventType.SLICE_BEGIN, proto.EventType.INSTANT)
    last_types = np.full(len(long), int(proto.EventType.SLICE_END))
    types = np.concatenate([first_types, last_types])
    all_slices = np.arange(len(slices))
    which = np.concatenate([all_slices, long])
    time_ns = np.concatenate([slices.start_ns, slices.end_ns[long]])
    begins = types != proto.EventType.SLICE_END
    place = np.where(begins, which, -which)
    order = np.lexsort((place, begins, time_ns))
    return _Moments(
        time_ns=time_ns[order],
        slice=which[order],
        type=types[order],
    )


def _write_slices(slices: Slices, sequence: int) -> Iterator[bytes]:
    """Write slices as begins, ends and instants of a sequence of packets."""
    if not len(slices):
        return
    used, name = np.unique(slices.name, return_inverse=True)
    texts = _Texts(
        names=[slices.names[place] for place in used.tolist()],
        categories=slices.categories,
        arguments=[argument.name for argument in slices.arguments],
    )
    first_text: list[int] = []
    for argument in slices.arguments:
        first_text.append(len(texts.texts) + 1)
        if isinstance(argument, TextArgument):
            texts.texts.extend(argument.texts)
    yield texts.write(sequence)
    moments = _order_moments(slices)
    for begin in range(0, len(moments.slice), ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        part = _Moments(
            time_ns=moments.time_ns[rows],
            slice=moments.slice[rows],
            type=moments.type[rows],
        )
        yield _write_moments(slices, part, name, first_text, sequence)


def _write_moments(
    slices: Slices,
    moments: _Moments,
    name: Integers,
    first_text: Sequence[int],
    sequence: int,
) -> bytes:
    """Write some moments as packets.

    Args:
        slices: whose moments they are.
        moments: k of them.
        name: [n], place of each slice's name among those that are used.
        first_text: of each argument, the number of its first text.
        sequence: number of the sequence.
    """
    at = moments.slice
    begins = moments.type != proto.EventType.SLICE_END
    annotations = []
    for place, argument in enumerate(slices.arguments):
        annotation = _make_annotation(argument, at, begins, place + 1, first_text[place])
        annotations.append(annotation)
    flows: list[Column] = []
    if slices.flow is not None:
        flow = slices.flow[at]
        flows.append(Fixed64Column(proto.EventField.FLOW_IDS, flow, begins & (flow > 0)))
    event = (
        VarintColumn(proto.EventField.CATEGORY_IIDS, slices.category[at] + 1, begins),
        *annotations,
        VarintColumn(proto.EventField.TYPE, moments.type),
        VarintColumn(proto.EventField.NAME_IID, name[at] + 1, begins),
        VarintColumn(proto.EventField.TRACK_UUID, np.full(len(at), slices.track.uuid)),
        *flows,
    )
    return _write_packets(moments.time_ns, event, sequence)


def _make_annotation(
    argument: Argument,
    at: Integers,
    begins: Flags,
    name: int,
    first_text: int,
) -> MessageColumn:
    """Make the column of one argument.

    Args:
        argument: of the slices.
        at: [k], which of the slices each event is of.
        begins: [k], which of the events carry arguments.
        name: number of the argument's name.
        first_text: number of its first text, where it has texts.
    """
    if isinstance(argument, TextArgument):
        values = argument.text[at]
        number = proto.AnnotationField.STRING_VALUE_IID
        first = first_text
    else:
        values = argument.values[at]
        number = proto.AnnotationField.INT_VALUE
        first = 0
    present = begins & (values >= 0)
    names = np.full(len(at), name)
    # what is absent is -1, which is not written
    written = np.maximum(values, 0) + first
    fields = (
        VarintColumn(proto.AnnotationField.NAME_IID, names, present),
        VarintColumn(number, written, present),
    )
    return MessageColumn(proto.EventField.DEBUG_ANNOTATIONS, fields, present)


def _write_packets(time_ns: Integers, event: Sequence[Column], sequence: int) -> bytes:
    """Write k track events as packets.

    Args:
        time_ns: [k].
        event: columns of a TrackEvent.
        sequence: number of the sequence.
    """
    count = len(time_ns)
    packet = (
        VarintColumn(proto.PacketField.TIMESTAMP, time_ns),
        VarintColumn(proto.PacketField.SEQUENCE_ID, np.full(count, sequence)),
        MessageColumn(proto.PacketField.TRACK_EVENT, event),
        VarintColumn(proto.PacketField.SEQUENCE_FLAGS, np.full(count, proto.NEEDS_INCREMENTAL_STATE)),
    )
    return write_messages(MessageColumn(proto.TraceField.PACKET, packet)).tobytes()


def _write_counts(counts: Counts, sequence: int) -> Iterator[bytes]:
    """Write the values of a counter."""
    yield _Texts((), (), ()).write(sequence)
    for begin in range(0, len(counts.time_ns), ROWS_AT_ONCE):
        rows = slice(begin, begin + ROWS_AT_ONCE)
        values = counts.values[rows]
        value: Column = VarintColumn(proto.EventField.COUNTER_VALUE, values.astype(np.int64))
        if values.dtype.kind == "f":
            value = Fixed64Column(proto.EventField.DOUBLE_COUNTER_VALUE, values)
        event = (
            VarintColumn(proto.EventField.TYPE, np.full(len(values), int(proto.EventType.COUNTER))),
            VarintColumn(proto.EventField.TRACK_UUID, np.full(len(values), counts.track.uuid)),
            value,
        )
        yield _write_packets(counts.time_ns[rows], event, sequence)
