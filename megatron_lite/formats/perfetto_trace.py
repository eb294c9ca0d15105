"""Field numbers of Perfetto's trace format (protobuf), as far as `report --perfetto` writes it.

Source: protos/perfetto/trace/perfetto_trace.proto of Perfetto v59.1, 2026-10. A field never changes its number.
"""

import enum

# the first note of a file that `report --perfetto` wrote: readers know by it that it is no rank's own trace
WRITER_NOTE = "written by"
MERGED_BY = "megatron-lite report --perfetto"
MAX_BEFORE_WRITER = 64  # bytes from the file's beginning on, among which the note stands
BOOTTIME_CLOCK = 6  # the clock of a trace whose packets name no other
REALTIME_CLOCK = 1  # since 1970
INCREMENTAL_STATE_CLEARED = 1  # sequence_flags of the packet that begins a sequence: numbers of names begin anew
NEEDS_INCREMENTAL_STATE = 2  # sequence_flags of packets that use such numbers
EXPLICIT_ORDER = 3  # child_ordering: by sibling_order_rank
# process_ordering and thread_ordering of the track 0, which has no events: as above. Readers of 2025 ignore them.
EXPLICIT_ROOT_ORDER = 1
ROOT_UUID = 0
MAX_TID = (1 << 31) - 1


class TraceField(enum.IntEnum):
    """Fields of a Trace, the whole file."""

    PACKET = 1


class PacketField(enum.IntEnum):
    """Fields of a TracePacket."""

    CHROME_EVENTS = 5
    CLOCK_SNAPSHOT = 6
    TIMESTAMP = 8
    SEQUENCE_ID = 10
    TRACK_EVENT = 11
    INTERNED_DATA = 12
    SEQUENCE_FLAGS = 13
    TRACK_DESCRIPTOR = 60


class ChromeEventsField(enum.IntEnum):
    """Fields of a ChromeEventBundle, whose metadata stand in the trace processor's table as "cr-NAME"."""

    METADATA = 2


class MetadataField(enum.IntEnum):
    """Fields of a ChromeMetadata."""

    NAME = 1
    STRING_VALUE = 2


class SnapshotField(enum.IntEnum):
    """Fields of a ClockSnapshot: several clocks at one moment."""

    CLOCKS = 1
    PRIMARY_CLOCK = 2


class ClockField(enum.IntEnum):
    """Fields of a Clock in a snapshot."""

    CLOCK_ID = 1
    TIMESTAMP = 2


class TrackField(enum.IntEnum):
    """Fields of a TrackDescriptor."""

    UUID = 1
    NAME = 2
    PROCESS = 3
    THREAD = 4
    PARENT_UUID = 5
    COUNTER = 8
    CHILD_ORDERING = 11
    SIBLING_ORDER_RANK = 12
    DESCRIPTION = 14
    PROCESS_ORDERING = 19
    THREAD_ORDERING = 20


class ProcessField(enum.IntEnum):
    """Fields of a ProcessDescriptor."""

    PID = 1
    SORT_INDEX = 3
    NAME = 6


class ThreadField(enum.IntEnum):
    """Fields of a ThreadDescriptor."""

    PID = 1
    TID = 2
    SORT_INDEX = 3
    NAME = 5


class CounterField(enum.IntEnum):
    """Fields of a CounterDescriptor."""

    UNIT = 3
    UNIT_NAME = 6


class WrittenUnit(enum.IntEnum):
    """Units of a counter that Perfetto knows, as far as they are used."""

    BYTES = 3


class EventField(enum.IntEnum):
    """Fields of a TrackEvent."""

    CATEGORY_IIDS = 3
    DEBUG_ANNOTATIONS = 4
    TYPE = 9
    NAME_IID = 10
    TRACK_UUID = 11
    COUNTER_VALUE = 30
    DOUBLE_COUNTER_VALUE = 44
    FLOW_IDS = 47


class EventType(enum.IntEnum):
    """Types of a TrackEvent."""

    SLICE_BEGIN = 1
    SLICE_END = 2
    INSTANT = 3
    COUNTER = 4


class AnnotationField(enum.IntEnum):
    """Fields of a DebugAnnotation: an argument of an event."""

    NAME_IID = 1
    INT_VALUE = 4
    DOUBLE_VALUE = 5
    STRING_VALUE_IID = 17


class InternedField(enum.IntEnum):
    """Fields of InternedData: texts of a sequence, which events name by number."""

    EVENT_CATEGORIES = 1
    EVENT_NAMES = 2
    ANNOTATION_NAMES = 3
    ANNOTATION_STRINGS = 29


class InternedEntryField(enum.IntEnum):
    """Fields of every entry of InternedData."""

    IID = 1
    TEXT = 2
