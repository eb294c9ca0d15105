"""Texts that packets of a Perfetto trace refer to by number, and the tracks that slices stand on."""

from dataclasses import dataclass, field

from megatron_lite.analysis.trace.perfetto_annotations import decode_text
from megatron_lite.analysis.trace.protobuf_fields import Field, WireError, iterate_fields
from megatron_lite.formats.perfetto_trace import (
    CounterDescriptorField,
    CounterSpecField,
    InternedCounterField,
    InternedEntryField,
    InternedField,
    ProcessField,
    ThreadField,
    TrackField,
)

# tables of names, by the fields of InternedData that fill them
CATEGORY_TABLE = InternedField.EVENT_CATEGORIES
NAME_TABLE = InternedField.EVENT_NAMES
ANNOTATION_TABLE = InternedField.ANNOTATION_NAMES
SPECIFICATION_TABLE = InternedField.GPU_SPECIFICATIONS
TEXT_TABLE = InternedField.ANNOTATION_STRINGS
KERNEL_TABLE = InternedField.KERNELS
_NAMED = (CATEGORY_TABLE, NAME_TABLE, ANNOTATION_TABLE, SPECIFICATION_TABLE, TEXT_TABLE, KERNEL_TABLE)
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
                elif entry.number == InternedField.GPU_COUNTER_DESCRIPTORS:
                    self._add_counters(content, entry)
        except WireError:
            return

    def _add_name(self, content: bytes, entry: Field) -> None:
        table = self.tables[entry.number]
        # of a kernel, which has two names, the last one counts
        texts = [InternedEntryField.TEXT]
        if entry.number == KERNEL_TABLE:
            texts.append(InternedEntryField.DEMANGLED_NAME)
        number = 0
        name = ""
        for part in iterate_fields(content, entry.start, entry.end):
            if part.number == InternedEntryField.IID:
                number = part.value
            elif part.number in texts:
                name = decode_text(content[part.start : part.end])
        if len(table) < MAX_TABLE_NAMES:
            table[number] = name

    def _add_counters(self, content: bytes, entry: Field) -> None:
        number = 0
        gpu = 0
        names: dict[int, str] = {}
        for part in iterate_fields(content, entry.start, entry.end):
            if part.number == InternedCounterField.IID:
                number = part.value
            elif part.number == InternedCounterField.GPU_ID:
                gpu = part.value
            elif part.number == InternedCounterField.DESCRIPTOR:
                names = read_counter_names(content, part)
        self.counters[number] = GpuCounters(gpu, names)


def read_counter_names(content: bytes, descriptor: Field) -> dict[int, str]:
    """Read a GpuCounterDescriptor: names of counters by number."""
    names: dict[int, str] = {}
    for spec in iterate_fields(content, descriptor.start, descriptor.end):
        if spec.number == CounterDescriptorField.SPECS:
            parts = {part.number: part for part in iterate_fields(content, spec.start, spec.end)}
            number = parts[CounterSpecField.COUNTER_ID].value if CounterSpecField.COUNTER_ID in parts else 0
            name = parts.get(CounterSpecField.NAME)
            names[number] = decode_text(content[name.start : name.end]) if name else ""
    return names


# --- tracks


@dataclass(frozen=True)
class ThreadTrack:
    """A process, or a thread of it."""

    pid: int
    tid: int | None  # None: a process
    name: str


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
        uuid = parts[TrackField.UUID].value if TrackField.UUID in parts else 0
        if TrackField.THREAD in parts:
            return uuid, _read_thread(content, parts[TrackField.THREAD])
        if TrackField.PROCESS in parts:
            return uuid, _read_process(content, parts[TrackField.PROCESS])
    except WireError:
        return None
    return None


def _read_thread(content: bytes, descriptor: Field) -> ThreadTrack:
    pid = 0
    tid = 0
    name = ""
    for part in iterate_fields(content, descriptor.start, descriptor.end):
        if part.number == ThreadField.PID:
            pid = part.value
        elif part.number == ThreadField.TID:
            tid = part.value
        elif part.number == ThreadField.NAME:
            name = decode_text(content[part.start : part.end])
    return ThreadTrack(pid, tid, name)


def _read_process(content: bytes, descriptor: Field) -> ThreadTrack:
    pid = 0
    name = ""
    for part in iterate_fields(content, descriptor.start, descriptor.end):
        if part.number == ProcessField.PID:
            pid = part.value
        elif part.number == ProcessField.NAME:
            name = decode_text(content[part.start : part.end])
    return ThreadTrack(pid, None, name)
