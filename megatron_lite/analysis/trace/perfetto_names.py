"""Texts that packets of a Perfetto trace refer to by number, and the tracks that slices stand on."""

from dataclasses import dataclass, field

from megatron_lite.analysis.trace.perfetto_annotations import decode_text
from megatron_lite.analysis.trace.protobuf_fields import Field, WireError, iterate_fields

# fields of InternedData whose entries have a number and a name
CATEGORY_TABLE = 1
NAME_TABLE = 2
ANNOTATION_TABLE = 3
SPECIFICATION_TABLE = 24  # stages of a GPU's work (Kernel, Memcpy, ...) and its lanes
TEXT_TABLE = 29  # of annotations
KERNEL_TABLE = 1000
_NAMED = (CATEGORY_TABLE, NAME_TABLE, ANNOTATION_TABLE, SPECIFICATION_TABLE, TEXT_TABLE, KERNEL_TABLE)
_COUNTERS = 47
_ENTRY_NUMBER = 1
_ENTRY_NAME = 2
_DEMANGLED_NAME = 3  # of KERNEL_TABLE
# fields of InternedGpuCounterDescriptor, GpuCounterDescriptor and GpuCounterSpec
_DESCRIPTOR = 2
_DESCRIPTOR_GPU = 3
_SPECS = 1
MAX_TABLE_NAMES = 1 << 22  # of one sequence of packets
MAX_TRACKS = 1 << 20


@dataclass(frozen=True)
class GpuCounters:
    """Counters of a GPU by number."""

    gpu: int
    names: dict[int, str]


@dataclass
class SequenceNames:
    """SequenceNames that one sequence of packets has given so far."""

    tables: dict[int, dict[int, str]] = field(default_factory=lambda: {number: {} for number in _NAMED})
    counters: dict[int, GpuCounters] = field(default_factory=dict)

    def add(self, content: bytes, start: int, end: int) -> None:
        """Add the names of a packet's InternedData, up to a place where it is damaged.

        Args:
            content: The bytes that hold it.
            start: Place of the message's first byte.
            end: Place behind the message's last byte.
        """
        try:
            for entry in iterate_fields(content, start, end):
                if entry.number in _NAMED:
                    self._add_name(content, entry)
                elif entry.number == _COUNTERS:
                    self._add_counters(content, entry)
        except WireError:
            return

    def _add_name(self, content: bytes, entry: Field) -> None:
        table = self.tables[entry.number]
        number = 0
        name = ""
        for part in iterate_fields(content, entry.start, entry.end):
            if part.number == _ENTRY_NUMBER:
                number = part.value
            elif part.number == _ENTRY_NAME or (part.number == _DEMANGLED_NAME and entry.number == KERNEL_TABLE):
                name = decode_text(content[part.start : part.end])
        if len(table) < MAX_TABLE_NAMES:
            table[number] = name

    def _add_counters(self, content: bytes, entry: Field) -> None:
        number = 0
        gpu = 0
        names: dict[int, str] = {}
        for part in iterate_fields(content, entry.start, entry.end):
            if part.number == _ENTRY_NUMBER:
                number = part.value
            elif part.number == _DESCRIPTOR_GPU:
                gpu = part.value
            elif part.number == _DESCRIPTOR:
                names = read_counter_names(content, part)
        self.counters[number] = GpuCounters(gpu, names)


def read_counter_names(content: bytes, descriptor: Field) -> dict[int, str]:
    """Read a GpuCounterDescriptor: names of counters by number."""
    names: dict[int, str] = {}
    for spec in iterate_fields(content, descriptor.start, descriptor.end):
        if spec.number == _SPECS:
            parts = {part.number: part for part in iterate_fields(content, spec.start, spec.end)}
            number = parts[_ENTRY_NUMBER].value if _ENTRY_NUMBER in parts else 0
            name = parts.get(_ENTRY_NAME)
            names[number] = decode_text(content[name.start : name.end]) if name else ""
    return names


# --- tracks


@dataclass(frozen=True)
class ThreadTrack:
    """A process, or a thread of it."""

    pid: int
    tid: int | None  # None: a process
    name: str


# fields of TrackDescriptor, ProcessDescriptor and ThreadDescriptor
_UUID = 1
_PROCESS = 3
_THREAD = 4
_PID = 1
_TID = 2
_THREAD_NAME = 5
_PROCESS_NAME = 6


def read_track(content: bytes, start: int, end: int) -> tuple[int, ThreadTrack] | None:
    """Read a TrackDescriptor.

    Args:
        content: The bytes that hold it.
        start: Place of the message's first byte.
        end: Place behind the message's last byte.

    Returns:
        Its number, and the thread or process that it describes; None for a damaged one, or one of neither.
    """
    try:
        parts = {part.number: part for part in iterate_fields(content, start, end)}
        uuid = parts[_UUID].value if _UUID in parts else 0
        if _THREAD in parts:
            return uuid, _read_thread(content, parts[_THREAD])
        if _PROCESS in parts:
            return uuid, _read_process(content, parts[_PROCESS])
    except WireError:
        return None
    return None


def _read_thread(content: bytes, descriptor: Field) -> ThreadTrack:
    pid = 0
    tid = 0
    name = ""
    for part in iterate_fields(content, descriptor.start, descriptor.end):
        if part.number == _PID:
            pid = part.value
        elif part.number == _TID:
            tid = part.value
        elif part.number == _THREAD_NAME:
            name = decode_text(content[part.start : part.end])
    return ThreadTrack(pid, tid, name)


def _read_process(content: bytes, descriptor: Field) -> ThreadTrack:
    pid = 0
    name = ""
    for part in iterate_fields(content, descriptor.start, descriptor.end):
        if part.number == _PID:
            pid = part.value
        elif part.number == _PROCESS_NAME:
            name = decode_text(content[part.start : part.end])
    return ThreadTrack(pid, None, name)
