"""Snapshots in the form of torch.cuda.memory._snapshot(), of memory that no CUDA allocator handed out.

{segments, device_traces, allocator_settings, external_annotations}, plain values only: what torch.cuda._memory_viz and
pytorch.org/memory_viz read. Equal stacks are one list object, so that a pickle holds them once.
"""

from collections.abc import Iterable
from typing import NamedTuple

from megatron_lite.estimate.caching_allocator import Allocation, Layout, Segment

SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "expandable_segments": False,
    "simulated": "tensors of a CPU run; addresses and segments are where CUDA's caching allocator would put them",
}
ALLOC, FREE, OUT_OF_MEMORY = "alloc", "free", "oom"


class Event(NamedTuple):
    """Something that happened to an allocation. frames and tag: where, for a free; an allocation knows its own."""

    action: str  # ALLOC, FREE or OUT_OF_MEMORY
    allocation: Allocation
    time_us: int
    frames: list[dict]
    tag: str


def settle(layout: Layout, events: Iterable[Event]):
    """Let events happen that no trace is to show."""
    for event in events:
        if event.action == ALLOC:
            layout.place(event.allocation)
        elif event.action == FREE:
            layout.release(event.allocation)


def snapshot(layout: Layout, events: Iterable[Event], annotations: list[dict]) -> dict:
    """The state after `events` happened to `layout`, and the events as its trace. Changes `layout`."""
    trace = []
    for event in events:
        trace.extend(_entries(layout, event))
    return {
        "segments": [_segment(segment) for segment in layout.segments],
        "device_traces": [trace],
        "allocator_settings": dict(SETTINGS),
        "external_annotations": annotations,
    }


def annotations(marks: Iterable[tuple[int, str, str]], device: int = 0) -> list[dict]:
    """Starts and ends of steps and phases, as torch writes its own annotations."""
    return [{"stage": stage, "name": name, "device": device, "time_us": time_us} for time_us, stage, name in marks]


def _entries(layout: Layout, event: Event) -> list[dict]:
    size = event.allocation.size
    if event.action == ALLOC:
        new = layout.place(event.allocation)
        entries = [_entry("alloc", layout.address_of[event.allocation], size, event)]
        return [_entry("segment_alloc", new.address, new.size, event), *entries] if new is not None else entries
    if event.action == FREE:
        address = layout.release(event.allocation)
        return [_entry(action, address, size, event) for action in ("free_requested", "free_completed")]
    entry = _entry("oom", 0, size, event)
    del entry["addr"]
    return [entry | {"device_free": 0}]


def _entry(action: str, address: int, size: int, event: Event) -> dict:
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


def _segment(segment: Segment) -> dict:
    blocks, used, requested = [], 0, 0
    for address, size, holder in zip(segment.starts, segment.sizes, segment.holders):
        block = {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
        if holder is not None:
            block |= {
                "requested_size": holder.size,
                "state": "active_allocated",
                "frames": holder.frames,
                "user_metadata": holder.tag,
            }  # torch's own blocks have no tag; viewers do not mind it
            used, requested = used + size, requested + holder.size
        blocks.append(block)
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": used,
        "active_size": used,
        "requested_size": requested,
        "stream": 0,
        "segment_type": segment.pool,
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": segment.frames,
        "blocks": blocks,
    }
