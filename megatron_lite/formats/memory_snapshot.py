"""Memory snapshots: the form of torch.cuda.memory._snapshot(), which pytorch.org/memory_viz draws.

A snapshot is the state of memory at its end and the events that led there. Addresses and sizes are bytes, times are
microseconds since 1970. Snapshots of an older torch, and those that were taken without a history, lack some keys.
"""

from typing import TypedDict


class Frame(TypedDict):
    """One call of a stack, which begins with the innermost call."""

    # path of the source file; "??" where there is none
    filename: str
    # 0 where there is none, as of C++
    line: int
    # name of the function
    name: str


class TraceEvent(TypedDict, total=False):
    """One event of the trace of a device."""

    # alloc, free_requested, free_completed, segment_alloc, segment_free, segment_map, segment_unmap, snapshot or oom
    action: str
    # address of the block or segment; absent of an allocation that failed
    addr: int
    # bytes that were asked for
    size: int
    # bytes that the device still had when an allocation failed
    device_free: int
    # number of the stream
    stream: int
    # when it happened
    time_us: int
    # the compiled graph that ran; "N/A" for none
    compile_context: str
    # where in the run it happened: "step 10/forward/decoder.layers.0.mlp"
    user_metadata: str
    # the stack of the code that asked for it
    frames: list[Frame]


class MemoryBlock(TypedDict, total=False):
    """A part of a segment that one tensor holds, or that is free."""

    # absent in older snapshots, where blocks follow each other from the segment's address on
    address: int
    # bytes that the allocator handed out
    size: int
    # bytes that were asked for
    requested_size: int
    # active_allocated, active_awaiting_free, active_pending_free or inactive
    state: str
    # the stack of the code that allocated it
    frames: list[Frame]
    # where in the run it was allocated; absent where nobody said so
    user_metadata: str


class DeviceSegment(TypedDict):
    """Memory that the allocator got from the device in one piece."""

    # number of the device
    device: int
    address: int
    # bytes of all blocks
    total_size: int
    # bytes of the blocks that tensors hold
    allocated_size: int
    # the same, and those that a stream may still use
    active_size: int
    # bytes that were asked for
    requested_size: int
    # number of the stream
    stream: int
    # small or large
    segment_type: str
    # identity of a private pool, as CUDA graphs have; (0, 0) for none
    segment_pool_id: tuple[int, int]
    # whether it can grow
    is_expandable: bool
    # the stack of the code for which it was made
    frames: list[Frame]
    # side by side, without gaps
    blocks: list[MemoryBlock]


class Annotation(TypedDict):
    """The start or the end of a step or a phase."""

    # START or END
    stage: str
    name: str
    # number of the device
    device: int
    time_us: int


class MemorySnapshot(TypedDict):
    """What torch.cuda.memory._snapshot() returns, and a snapshot's file holds."""

    # the state of memory when the snapshot was taken
    segments: list[DeviceSegment]
    # the events of each device, the oldest first
    device_traces: list[list[TraceEvent]]
    # settings of the allocator by name
    allocator_settings: dict[str, object]
    # steps and phases, the oldest first
    external_annotations: list[Annotation]
