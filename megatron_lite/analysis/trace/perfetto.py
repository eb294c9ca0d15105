"""A Perfetto trace of torch.profiler (.pftrace) -> the entries that its Chrome JSON has.

torch 2.14 writes one where its CUPTI monitor records the device and the file's name holds ".pftrace":
torch/profiler/_cupti/monitor_trace.py shapes it, torch/csrc/profiler/cupti/monitor_pftrace.cpp writes it (main has both
as _cuspy/trace.py and cuspy/cuspy_pftrace.cpp). What the host does is slices with debug annotations; work of the device
is GPU render stages, a lane for each stream; counters are GPU counter events. A header such as the JSON's is not in it.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.trace.kineto_json import Event, FloatEvent, Id, fit_args
from megatron_lite.analysis.trace.perfetto_annotations import (
    Arguments,
    decode_text,
    read_annotations,
    read_extra_data,
)
from megatron_lite.analysis.trace.perfetto_names import (
    ANNOTATION_TABLE,
    CATEGORY_TABLE,
    KERNEL_TABLE,
    MAX_TRACKS,
    NAME_TABLE,
    SPECIFICATION_TABLE,
    TEXT_TABLE,
    SequenceNames,
    ThreadTrack,
    read_track,
)
from megatron_lite.analysis.trace.perfetto_packets import (
    PACKET_BLOCK_BYTES,
    PacketFile,
    Packets,
)
from megatron_lite.analysis.trace.perfetto_slices import SliceRun
from megatron_lite.analysis.trace.protobuf_fields import Fields, WireError, iterate_fields, read_doubles, read_fields
from megatron_lite.formats.perfetto_trace import (
    BOOTTIME_CLOCK,
    INCREMENTAL_STATE_CLEARED,
    REALTIME_CLOCK,
    ClockField,
    CounterEventField,
    CounterSampleField,
    EventField,
    EventType,
    PacketField,
    RenderStageField,
    SnapshotField,
)

# of GpuRenderStageEvent's stages in monitor_trace.py, the categories that the JSON gives to the same work
CATEGORY_OF_STAGE = {
    "Kernel": "kernel",
    "Memcpy": "gpu_memcpy",
    "Memset": "gpu_memset",
    "Annotation": "gpu_user_annotation",
    "EventRecord": "graph_event_node",
    "HostNode": "graph_host_node",
}
_BEGIN = EventType.SLICE_BEGIN
_END = EventType.SLICE_END
# A lane's name is "[0007] stream 7", or that of a lane which torch made up for the work of a CUDA graph
_LANE_NUMBER = re.compile(r"\[0*(\d{1,10})\]")
_SYNC_ARGUMENT = "cuda_sync_kind"  # of a slice without a category that is a wait of CUDA
_OVERHEAD = "Overhead"  # the process of slices without a category that are the profiler's own work
MAX_CLEARED = 1000  # packets of one block that clear the names before them; writers do so every few seconds
_UNIX_NS = 10**18  # larger times count from 1970
_NO_TIME = -1


class PacketChunks:
    """Iterates over lists of events, as kineto_json.Chunks does.

    After it: `header`, `damage`, a sentence or None, and `cut`, whether the file's end is missing.
    """

    def __init__(self, path: Path, max_open: int, block_bytes: int = PACKET_BLOCK_BYTES):
        """Prepare to read.

        Args:
            path: The file.
            max_open: Slices that may be open at a time; of a trace with more only the beginning is read.
            block_bytes: Bytes that are read at a time.
        """
        self.header: dict[str, Any] = {}
        self._file = PacketFile(path, block_bytes)
        self._max_open = max_open
        self._too_much = ""  # of what, where reading was given up
        self._base_ns = _NO_TIME  # the first packet's time
        self._names: dict[int, SequenceNames] = {}  # by sequence
        self._tracks: dict[int, ThreadTrack] = {}
        self._runs: dict[int, SliceRun] = {}  # by sequence

    @property
    def damage(self) -> str | None:
        """A sentence about what is missing; None for nothing."""
        return f"{self._too_much}; what precedes them was read" if self._too_much else self._file.damage

    @property
    def cut(self) -> bool:
        """Whether the record goes on behind what was read."""
        return bool(self._too_much) or self._file.cut

    @property
    def bytes_read(self) -> int:
        """Bytes that were read so far, of the file as it lies on the disk."""
        return self._file.bytes_read

    def __iter__(self) -> Iterator[Sequence[Event]]:
        for packets in self._file:
            cleared = packets.flags & INCREMENTAL_STATE_CLEARED
            if np.count_nonzero(cleared) > MAX_CLEARED:
                self._too_much = f"more than {MAX_CLEARED:,} packets close together that clear the names before them"
                break
            yield self._read_packets(packets)
            if sum(map(len, self._runs.values())) > 2 * self._max_open:
                self._too_much = f"more than {self._max_open:,} slices that are open at a time"
                break
        for run in self._runs.values():
            yield run.pair()

    def _read_packets(self, packets: Packets) -> list[Event]:
        """Read the entries of some packets. Numbers of names hold until their sequence's state is cleared."""
        self._find_base(packets)
        entries: list[Event] = self._read_tracks(packets)
        cleared = np.flatnonzero(packets.flags & INCREMENTAL_STATE_CLEARED).tolist()
        borders = [0, *cleared, len(packets)]
        for first, behind in pairwise(borders):
            if first in cleared:
                self._names[int(packets.sequence[first])] = SequenceNames()
            is_own = np.zeros(len(packets), bool)
            is_own[first:behind] = True
            self._read_names(packets, is_own)
            entries += self._read_slices(packets, is_own)
            entries += self._read_stages(packets, is_own)
            entries += self._read_counters(packets, is_own)
        return entries

    def _find_base(self, packets: Packets) -> None:
        """Find the time from which entries count, and where it lies on the clock that ranks share."""
        times_ns = packets.time_ns[packets.time_ns > 0]
        if self._base_ns == _NO_TIME and len(times_ns):
            self._base_ns = int(times_ns[0])
            if self._base_ns > _UNIX_NS:
                self.header["baseTimeNanoseconds"] = self._base_ns
        starts, ends = packets.messages[PacketField.CLOCK_SNAPSHOT]
        for row in np.flatnonzero(starts >= 0).tolist()[:1]:
            ahead_ns = _read_clocks(packets.text.content, int(starts[row]), int(ends[row]))
            if ahead_ns is not None and self._base_ns != _NO_TIME:
                self.header.setdefault("baseTimeNanoseconds", self._base_ns + ahead_ns)

    def _read_tracks(self, packets: Packets) -> list[Event]:
        """Read what the packets say of tracks: entries that name processes and threads."""
        entries: list[Event] = []
        starts, ends = packets.messages[PacketField.TRACK_DESCRIPTOR]
        for row in np.flatnonzero(starts >= 0).tolist():
            read = read_track(packets.text.content, int(starts[row]), int(ends[row]))
            if read is None or len(self._tracks) >= MAX_TRACKS:
                continue
            uuid, track = read
            self._tracks[uuid] = track
            label = msgspec.Raw(json.dumps(track.name).encode())
            named = "process_name" if track.tid is None else "thread_name"
            entries.append(FloatEvent(ph="M", name=named, pid=track.pid, tid=track.tid, args=fit_args({"name": label})))
        return entries

    def _read_names(self, packets: Packets, is_own: Flags) -> None:
        """Keep the names of some packets."""
        starts, ends = packets.messages[PacketField.INTERNED_DATA]
        for row in np.flatnonzero(is_own & (starts >= 0)).tolist():
            names = self._names_of(int(packets.sequence[row]))
            names.add(packets.text.content, int(starts[row]), int(ends[row]))

    def _names_of(self, sequence: int) -> SequenceNames:
        names = self._names.get(sequence)
        if names is None:
            names = self._names[sequence] = SequenceNames()
        return names

    # --- slices

    def _read_slices(self, packets: Packets, is_own: Flags) -> list[Event]:
        """Read beginnings and ends of slices, and make spans of the runs that are whole."""
        rows, fields = _read_messages(packets, PacketField.TRACK_EVENT, is_own)
        types = fields.values(EventField.TYPE).tolist()
        tracks = fields.values(EventField.TRACK_UUID).tolist()
        times_ns = packets.time_ns[rows].tolist()
        sequences = packets.sequence[rows].tolist()
        begun = self._build_slices(packets, rows, fields)
        spans: list[Event] = []
        for place, sequence in enumerate(sequences):
            run = self._runs.get(sequence)
            if run is None:
                run = self._runs[sequence] = SliceRun()
            if types[place] == _BEGIN:
                run.begin(tracks[place], times_ns[place], begun[place])
            elif types[place] == _END:
                run.end(tracks[place], times_ns[place])
            if len(run) and run.num_open <= 0:
                spans += self._runs.pop(sequence).pair()
        return spans

    def _build_slices(self, packets: Packets, rows: Integers, fields: Fields) -> dict[int, FloatEvent]:
        """Make an event of each beginning, by its place in `rows`."""
        is_begin = fields.values(EventField.TYPE) == _BEGIN
        arguments = self._read_arguments(packets, rows, fields)
        names = self._read_texts(packets, rows, fields, (EventField.NAME_IID, EventField.NAME), NAME_TABLE)
        categories = self._read_texts(
            packets, rows, fields, (EventField.CATEGORY_IIDS, EventField.CATEGORIES), CATEGORY_TABLE
        )
        tracks = fields.values(EventField.TRACK_UUID).tolist()
        times_us = ((packets.time_ns[rows] - self._base_ns) / 1000).tolist()
        built = {}
        for place in np.flatnonzero(is_begin).tolist():
            track = self._tracks.get(tracks[place])
            pid: Id = track.pid if track else None
            tid: Id = track.tid if track else tracks[place]
            own = arguments.get(place, {})
            built[place] = FloatEvent(
                ph="X",
                cat=categories[place] or self._find_category(track, own),
                name=names[place],
                pid=pid,
                tid=tid,
                ts=times_us[place],
                args=fit_args(own),
            )
        return built

    def _find_category(self, track: ThreadTrack | None, arguments: Arguments) -> str:
        """Find the category of a slice without one: torch leaves out those of waits and of its own work."""
        if _SYNC_ARGUMENT in arguments:
            return "cuda_sync"
        return "overhead" if track and track.name == _OVERHEAD else ""

    def _read_arguments(self, packets: Packets, rows: Integers, fields: Fields) -> dict[int, Arguments]:
        """Read the annotations of slices, by their place in `rows`; numbers of names are those of the first one."""
        annotations = fields.choose(EventField.DEBUG_ANNOTATIONS)
        if not len(annotations):
            return {}
        tables = self._names_of(int(packets.sequence[rows[0]])).tables
        return read_annotations(packets.text, annotations, tables[ANNOTATION_TABLE], tables[TEXT_TABLE])

    def _read_texts(
        self, packets: Packets, rows: Integers, fields: Fields, numbers: tuple[int, int], table: int
    ) -> list[str]:
        """Read a text of each slice, which is given by number or as it is; '' where it has none.

        Args:
            packets: What the slices stand in.
            rows: Places of the packets that are slices.
            fields: The slices' fields.
            numbers: The field that holds the text's number, and the field that holds the text.
            table: Number of the names' table, a field of InternedData.
        """
        by_number, as_text = numbers
        given = fields.values(by_number, -1).tolist()
        starts, ends = fields.places(as_text)
        places = zip(packets.sequence[rows].tolist(), given, starts.tolist(), ends.tolist())
        texts = []
        for sequence, number, start, end in places:
            if start >= 0:
                texts.append(decode_text(packets.text[start:end]))
            else:
                texts.append(self._names_of(sequence).tables[table].get(number, "") if number >= 0 else "")
        return texts

    # --- the device's work

    def _read_stages(self, packets: Packets, is_own: Flags) -> list[Event]:
        """Read the work of GPUs."""
        rows, fields = _read_messages(packets, PacketField.GPU_RENDER_STAGE_EVENT, is_own)
        extra = read_extra_data(packets.text, fields.choose(RenderStageField.EXTRA_DATA))
        stages = zip(
            packets.sequence[rows].tolist(),
            ((packets.time_ns[rows] - self._base_ns) / 1000).tolist(),
            (fields.values(RenderStageField.DURATION) / 1000).tolist(),
            fields.values(RenderStageField.GPU_ID).tolist(),
            fields.values(RenderStageField.HW_QUEUE_IID).tolist(),
            fields.values(RenderStageField.STAGE_IID).tolist(),
            fields.values(RenderStageField.NAME_IID).tolist(),
            fields.values(RenderStageField.KERNEL_IID).tolist(),
        )
        entries: list[Event] = []
        for place, (sequence, ts, dur, gpu, lane, stage, name, kernel) in enumerate(stages):
            tables = self._names_of(sequence).tables
            kind = tables[SPECIFICATION_TABLE].get(stage, "")
            own = extra.get(place, {})
            stream = _find_stream(tables[SPECIFICATION_TABLE].get(lane, ""), own)
            entries.append(
                FloatEvent(
                    ph="X",
                    cat=CATEGORY_OF_STAGE.get(kind, kind),
                    name=tables[NAME_TABLE].get(name) or tables[KERNEL_TABLE].get(kernel) or kind,
                    pid=gpu,
                    tid=stream,
                    ts=ts,
                    dur=dur,
                    args=fit_args(own | {"device": gpu, "stream": stream}),
                )
            )
        return entries

    # --- counters

    def _read_counters(self, packets: Packets, is_own: Flags) -> list[Event]:
        """Read samples of GPUs' counters, as the JSON has them: an entry "C" of a process "GPU 0 Counters"."""
        rows, fields = _read_messages(packets, PacketField.GPU_COUNTER_EVENT, is_own)
        samples = fields.choose(CounterEventField.COUNTERS)
        own = read_fields(packets.text, samples.start, samples.end)
        starts, _ = own.places(CounterSampleField.DOUBLE_VALUE)
        is_double = starts >= 0
        values = own.values(CounterSampleField.INT_VALUE).astype(np.float64)
        values[is_double] = read_doubles(packets.text, starts[is_double])
        events = rows[samples.message]
        read = zip(
            packets.sequence[events].tolist(),
            fields.values(CounterEventField.DESCRIPTOR_IID)[samples.message].tolist(),
            own.values(CounterSampleField.COUNTER_ID).tolist(),
            ((packets.time_ns[events] - self._base_ns) / 1000).tolist(),
            values.tolist(),
        )
        entries: list[Event] = []
        for sequence, descriptor, number, ts, value in read:
            counters = self._names_of(sequence).counters.get(descriptor)
            if counters and number in counters.names:
                entries.append(
                    FloatEvent(
                        ph="C",
                        name=counters.names[number],
                        pid=f"GPU {counters.gpu} Counters",
                        ts=ts,
                        args=fit_args({"": value}),
                    )
                )
        return entries


def _read_messages(packets: Packets, number: PacketField, is_own: Flags) -> tuple[Integers, Fields]:
    """Read the messages that are this field of some packets.

    Returns:
        The packets' places, int64 [k], and the fields of the k messages.
    """
    starts, ends = packets.messages[number]
    rows = np.flatnonzero(is_own & (starts >= 0))
    return rows, read_fields(packets.text, starts[rows], ends[rows])


def _read_clocks(content: bytes, start: int, end: int) -> int | None:
    """How many ns the clock of 1970 is ahead of the one since boot, which packets use; None if one is missing."""
    times_ns: dict[int, int] = {}
    try:
        for clock in iterate_fields(content, start, end):
            if clock.number == SnapshotField.CLOCKS:
                parts = {part.number: part.value for part in iterate_fields(content, clock.start, clock.end)}
                times_ns[parts.get(ClockField.CLOCK_ID, 0)] = parts.get(ClockField.TIMESTAMP, 0)
    except WireError:
        return None
    if REALTIME_CLOCK not in times_ns or BOOTTIME_CLOCK not in times_ns:
        return None
    return times_ns[REALTIME_CLOCK] - times_ns[BOOTTIME_CLOCK]


def _find_stream(lane: str, extra: Arguments) -> int:
    """The number of a stream: of its lane, as in the JSON, else CUDA's own; -1 for none."""
    numbered = _LANE_NUMBER.match(lane)
    if numbered:
        return int(numbered[1])
    own = str(extra.get("stream id", ""))
    return int(own) if own.isdecimal() and len(own) < 10 else -1
