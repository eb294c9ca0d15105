"""Field numbers of Perfetto's trace format (protobuf), as far as torch's traces are read and reports written in it.

Source: protos/perfetto/trace/perfetto_trace.proto of Perfetto v59.1, 2026-10. A field never changes its number. Those
of its GPU extensions, which torch writes by number: torch/csrc/profiler/cupti/monitor_pftrace.cpp of torch 2.14.
"""

import enum

ENDINGS = (".pftrace", ".perfetto-trace")  # of files' names
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
    COMPRESSED_PACKETS = 50
    GPU_COUNTER_EVENT = 52
    GPU_RENDER_STAGE_EVENT = 53
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
    CATEGORIES = 22
    NAME = 23
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
    BOOL_VALUE = 2
    UINT_VALUE = 3
    INT_VALUE = 4
    DOUBLE_VALUE = 5
    STRING_VALUE = 6
    POINTER_VALUE = 7
    LEGACY_JSON_VALUE = 9
    NAME = 10
    DICT_ENTRIES = 11
    ARRAY_VALUES = 12
    STRING_VALUE_IID = 17


class InternedField(enum.IntEnum):
    """Fields of InternedData: texts of a sequence, which events name by number."""

    EVENT_CATEGORIES = 1
    EVENT_NAMES = 2
    ANNOTATION_NAMES = 3
    GPU_SPECIFICATIONS = 24  # stages of a GPU's work (Kernel, Memcpy, ...) and its lanes
    ANNOTATION_STRINGS = 29
    GPU_COUNTER_DESCRIPTORS = 47
    KERNELS = 1000


class InternedEntryField(enum.IntEnum):
    """Fields of every entry of InternedData that is a text."""

    IID = 1
    TEXT = 2
    DEMANGLED_NAME = 3  # of a kernel


class InternedCounterField(enum.IntEnum):
    """Fields of an InternedGpuCounterDescriptor: the counters of a GPU."""

    IID = 1
    DESCRIPTOR = 2
    GPU_ID = 3


class CounterDescriptorField(enum.IntEnum):
    """Fields of a GpuCounterDescriptor."""

    SPECS = 1


class CounterSpecField(enum.IntEnum):
    """Fields of a GpuCounterSpec: one counter."""

    COUNTER_ID = 1
    NAME = 2


class CounterEventField(enum.IntEnum):
    """Fields of a GpuCounterEvent."""

    COUNTERS = 2
    DESCRIPTOR_IID = 4


class CounterSampleField(enum.IntEnum):
    """Fields of a GpuCounter: the value of one counter."""

    COUNTER_ID = 1
    INT_VALUE = 2
    DOUBLE_VALUE = 3


class RenderStageField(enum.IntEnum):
    """Fields of a GpuRenderStageEvent: work of a GPU."""

    DURATION = 2
    EXTRA_DATA = 6
    GPU_ID = 11
    HW_QUEUE_IID = 13
    STAGE_IID = 14
    KERNEL_IID = 19
    NAME_IID = 20


class ExtraDataField(enum.IntEnum):
    """Fields of a GpuRenderStageEvent's ExtraData."""

    NAME = 1
    VALUE = 2
