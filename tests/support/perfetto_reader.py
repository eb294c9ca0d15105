"""Reads what `report --perfetto` writes, by a small decoder of its own: tracks, slices, counters, arguments, flows."""

import gzip
import struct
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path


def fields(content: bytes) -> list[tuple[int, int | bytes]]:
    """(number, value) of each field of a message: an int, or bytes for what has a length or 8 bytes."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = content[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(content):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            found.append((number, varint()))
            continue
        length = 8 if wire == 1 else varint()
        assert wire in (1, 2) and at + length <= len(content)
        found.append((number, content[at : at + length]))
        at += length
    return found


def first(content: bytes) -> dict[int, int | bytes]:
    """The fields of a message that has each once."""
    return dict(fields(content))


@dataclass
class ReadTrack:
    name: str
    process: str = ""
    thread: tuple[int, int] | None = None
    unit: str = ""


@dataclass
class ReadSlice:
    track: ReadTrack
    name: str
    category: str
    start: int
    end: int
    depth: int
    arguments: dict[str, object] = field(default_factory=dict)
    flows: tuple[int, ...] = ()

    @property
    def process(self) -> str:
        return self.track.process

    @property
    def ns(self) -> int:
        return self.end - self.start


@dataclass
class ReadTrace:
    slices: list[ReadSlice]
    counters: dict[tuple[str, str], list[tuple[int, float]]]  # (process, track): (time, value)
    metadata: dict[str, str]
    clocks: dict[int, int]
    tracks: dict[int, ReadTrack]
    processes: dict[str, int]  # name: pid

    def having(self, **wanted) -> list[ReadSlice]:
        """Slices with these attributes, in the order of their starts."""
        found = [one for one in self.slices if all(getattr(one, key) == value for key, value in wanted.items())]
        return sorted(found, key=lambda one: (one.start, -one.end))

    def on(self, process: str, track: str) -> list[ReadSlice]:
        return [one for one in self.having(process=process) if one.track.name == track]


def read_perfetto(path: Path) -> ReadTrace:
    """Read a file as the trace processor does: by time, and where times are equal by place in the file."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    packets = [fields(packet) for _, packet in fields(content)]
    read = ReadTrace([], defaultdict(list), {}, {}, {}, {})
    texts: dict[int, dict[int, dict[int, str]]] = {}
    events, names = [], {}
    for packet in packets:
        told = dict(packet)
        sequence = told.get(10, 0)
        if 6 in told:
            for number, clock in fields(told[6]):
                if number == 1:
                    read.clocks[first(clock)[1]] = first(clock)[2]
        if 5 in told:
            for _, entry in fields(told[5]):
                read.metadata[first(entry)[1].decode()] = first(entry)[2].decode()
        if 60 in told:
            _read_track(first(told[60]), read, names)
        if 12 in told:
            assert told[13] == 1, "a sequence begins with its texts"
            texts[sequence] = {29: {}, 1: {}, 2: {}, 3: {}}
            for number, entry in fields(told[12]):
                texts[sequence][number][first(entry)[1]] = first(entry)[2].decode()
        if 11 in told:
            assert told[13] == 2 and sequence in texts
            events.append((told[8], fields(told[11]), texts[sequence]))
    events.sort(key=lambda event: event[0])
    open_slices = defaultdict(list)
    for time, event, known in events:
        _read_event(time, event, known, read, open_slices)
    assert not any(open_slices.values()), "every slice ends"
    return read


def _read_track(told, read, names):
    if not told[1]:
        assert told == {1: 0, 19: 1, 20: 1}, "the order of processes and threads"
        return
    if 3 in told:
        process = first(told[3])
        name = process[6].decode()
        assert process[1] not in read.processes.values(), "a number of its own for each process"
        names[told[1]] = names["pid", process[1]] = name
        read.processes[name] = process[1]
        return
    if 4 in told:
        thread = first(told[4])
        track = ReadTrack(thread[5].decode(), names["pid", thread[1]], (thread[1], thread[2]))
    else:
        track = ReadTrack(told[2].decode(), names[told[5]])
    if 8 in told:
        unit = first(told[8])
        track.unit = unit[6].decode() if 6 in unit else {3: "bytes"}[unit[3]]
    assert told[1] not in read.tracks
    read.tracks[told[1]] = track


def _read_event(time, event, known, read, open_slices):
    told = dict(event)
    track = read.tracks[told[11]]
    if told[9] == 4:
        value = struct.unpack("<d", told[44])[0] if 44 in told else told[30]
        read.counters[track.process, track.name].append((time, value))
        return
    stack = open_slices[told[11]]
    if told[9] == 2:
        stack.pop().end = time
        return
    arguments = {}
    for number, content in event:
        if number == 4:
            argument = first(content)
            arguments[known[3][argument[1]]] = known[29][argument[17]] if 17 in argument else argument[4]
    flows = tuple(struct.unpack("<q", content)[0] for number, content in event if number == 47)
    one = ReadSlice(track, known[2][told[10]], known[1][told[3]], time, time, len(stack), arguments, flows)
    read.slices.append(one)
    if told[9] == 1:
        stack.append(one)
