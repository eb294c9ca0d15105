"""Builds and writes memory snapshots in torch's form, for memory that no CUDA allocator handed out.

They hold plain values only, which torch.cuda._memory_viz and pytorch.org/memory_viz read. Equal stacks are one list
object, so that a pickle holds them once.
"""

import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megatron_lite.caching_allocator import Allocation, Segment, SegmentMap
from megatron_lite.errors import UserError
from megatron_lite.formats.memory_snapshot import (
    Annotation,
    DeviceSegment,
    Frame,
    MemoryBlock,
    MemorySnapshot,
    TraceEvent,
)

SETTINGS: dict[str, object] = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "expandable_segments": False,
    "simulated": "tensors of a CPU run; addresses and segments are where CUDA's caching allocator would put them",
}
ALLOC = "alloc"
FREE = "free"
OUT_OF_MEMORY = "oom"


class Event(NamedTuple):
    """An allocation, its free, or a failed allocation."""

    action: str  # ALLOC, FREE or OUT_OF_MEMORY
    allocation: Allocation
    time_us: int
    frames: list[Frame]  # where it was allocated, freed, or failed
    tag: str  # likewise


def apply_events(layout: SegmentMap, events: Iterable[Event]) -> None:
    """Apply events to the layout without recording them in a trace."""
    for event in events:
        if event.action == ALLOC:
            layout.place(event.allocation)
        elif event.action == FREE:
            layout.release(event.allocation)


def build_snapshot(layout: SegmentMap, events: Iterable[Event], annotations: list[Annotation]) -> MemorySnapshot:
    """Build a snapshot of the state after `events`, with the events as its trace.

    Args:
        layout: The state before the events. It is changed to the state after them.
        events: The oldest first.
        annotations: Starts and ends of steps and phases.
    """
    trace: list[TraceEvent] = []
    for event in events:
        if event.action == ALLOC:
            trace += _place(layout, event)
        elif event.action == FREE:
            trace += _release(layout, event)
        else:
            trace.append(_build_failure(event))
    return {
        "segments": [_build_segment(segment) for segment in layout.segments],
        "device_traces": [trace],
        "allocator_settings": dict(SETTINGS),
        "external_annotations": annotations,
    }


def build_annotations(marks: Iterable[tuple[int, str, str]], device: int = 0) -> list[Annotation]:
    """Build the starts and ends of steps and phases, as torch writes its own annotations.

    Args:
        marks: (time in us, START or END, name) of each.
        device: The number of the device in the snapshot.
    """
    return [{"stage": stage, "name": name, "device": device, "time_us": time_us} for time_us, stage, name in marks]


def _place(layout: SegmentMap, event: Event) -> list[TraceEvent]:
    """Place an allocation; returns its events, with that of the segment if a new one had to be made."""
    new_segment = layout.place(event.allocation)
    allocated = _build_event("alloc", layout.address_of[event.allocation], event.allocation.size, event)
    if new_segment is None:
        return [allocated]
    return [_build_event("segment_alloc", new_segment.address, new_segment.size, event), allocated]


def _release(layout: SegmentMap, event: Event) -> list[TraceEvent]:
    """Free an allocation; returns the two events that torch has for it."""
    address = layout.release(event.allocation)
    size = event.allocation.size
    return [_build_event(action, address, size, event) for action in ("free_requested", "free_completed")]


def _build_event(action: str, address: int, size: int, event: Event) -> TraceEvent:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": event.time_us,
        "compile_context": "N/A",
        "user_metadata": event.tag,
        "frames": event.frames,
    }


def _build_failure(event: Event) -> TraceEvent:
    return {
        "action": "oom",
        "device_free": 0,
        "size": event.allocation.size,
        "stream": 0,
        "time_us": event.time_us,
        "compile_context": "N/A",
        "user_metadata": event.tag,
        "frames": event.frames,
    }


def _build_block(address: int, size: int, holder: Allocation | None) -> MemoryBlock:
    if holder is None:
        return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
    return {
        "address": address,
        "size": size,
        "requested_size": holder.size,
        "state": "active_allocated",
        "frames": holder.frames,
        # torch's own blocks have no tag; viewers do not mind it
        "user_metadata": holder.tag,
    }


def _build_segment(segment: Segment) -> DeviceSegment:
    parts = list(zip(segment.starts, segment.sizes, segment.holders))
    used = sum(size for _, size, holder in parts if holder is not None)
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": used,
        "active_size": used,
        "requested_size": sum(holder.size for holder in segment.holders if holder is not None),
        "stream": 0,
        "segment_type": segment.pool,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": segment.frames,
        "blocks": [_build_block(address, size, holder) for address, size, holder in parts],
    }


# --- where snapshots are written, and how

PROTOCOL = 4  # the viewer in the browser reads no newer one; Python 3.14 would write 5


def extend_name(path: Path, addition: str) -> Path:
    """Put `addition` into a path, before its ending."""
    return path.with_name(f"{path.stem}{addition}{path.suffix}")


def name_snapshot(given: str, rank: int, writers: int) -> Path:
    """Name this rank's file, with _rankN before its ending where several ranks write.

    Args:
        given: The value of --memory-snapshot-path.
        rank: This process's rank.
        writers: How many ranks write a file.
    """
    return Path(given) if writers == 1 else extend_name(Path(given), f"_rank{rank}")


def make_snapshot_folder(path: Path, given: str) -> None:
    """Make the folder of this rank's file. Raises UserError where none can be written there."""
    given = f"--memory-snapshot-path {given}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{given}: its folder cannot be made ({error.strerror}); name another file.") from error
    if path.is_dir():
        raise UserError(f"{given} is a folder; name a file in it, such as {path / 'snapshot.pickle'}.")


def write_snapshot(path: Path, snapshot: MemorySnapshot) -> None:
    """Write the snapshot whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            pickle.dump(snapshot, file, protocol=PROTOCOL)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
