"""Memory snapshots in the form of torch.cuda.memory._snapshot(), for memory that no CUDA allocator handed out.

{segments, device_traces, allocator_settings, external_annotations}, plain values only: what torch.cuda._memory_viz and
pytorch.org/memory_viz read. Equal stacks are one list object, so that a pickle holds them once.
"""

import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from megatron_lite.errors import UserError
from megatron_lite.formats.caching_allocator import Allocation, Segment, SegmentMap

SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "expandable_segments": False,
    "simulated": "tensors of a CPU run; addresses and segments are where CUDA's caching allocator would put them",
}
ALLOC, FREE, OUT_OF_MEMORY = "alloc", "free", "oom"


class Event(NamedTuple):
    """An allocation, its free, or a failed allocation. frames and tag: where it was freed, or failed."""

    action: str  # ALLOC, FREE or OUT_OF_MEMORY
    allocation: Allocation
    time_us: int
    frames: list[dict]
    tag: str


def apply_events(layout: SegmentMap, events: Iterable[Event]):
    """Apply events to the layout without recording them in a trace."""
    for event in events:
        if event.action == ALLOC:
            layout.place(event.allocation)
        elif event.action == FREE:
            layout.release(event.allocation)


def build_snapshot(layout: SegmentMap, events: Iterable[Event], annotations: list[dict]) -> dict:
    """The state after `events` happened to `layout`, and the events as its trace. Changes `layout`."""
    trace = []
    for action, allocation, time_us, frames, tag in events:
        where = {"stream": 0, "time_us": time_us, "compile_context": "N/A", "user_metadata": tag, "frames": frames}
        size = {"size": allocation.size} | where
        if action == ALLOC:
            new = layout.place(allocation)
            if new is not None:
                trace.append({"action": "segment_alloc", "addr": new.address, "size": new.size} | where)
            trace.append({"action": "alloc", "addr": layout.address_of[allocation]} | size)
        elif action == FREE:
            address = layout.release(allocation)
            trace += [{"action": name, "addr": address} | size for name in ("free_requested", "free_completed")]
        else:
            trace.append({"action": "oom", "device_free": 0} | size)
    return {
        "segments": [_build_segment(segment) for segment in layout.segments],
        "device_traces": [trace],
        "allocator_settings": dict(SETTINGS),
        "external_annotations": annotations,
    }


def build_annotations(marks: Iterable[tuple[int, str, str]], device: int = 0) -> list[dict]:
    """Starts and ends of steps and phases, as torch writes its own annotations."""
    return [{"stage": stage, "name": name, "device": device, "time_us": time_us} for time_us, stage, name in marks]


def _build_segment(segment: Segment) -> dict:
    blocks, used, requested = [], 0, 0
    for address, size, holder in zip(segment.starts, segment.sizes, segment.holders):
        block = {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
        if holder is not None:  # torch's own blocks have no tag; viewers do not mind it
            block |= {"requested_size": holder.size, "state": "active_allocated"}
            block |= {"frames": holder.frames, "user_metadata": holder.tag}
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


# --- where snapshots are written, and how

PROTOCOL = 4  # the viewer in the browser reads no newer one; Python 3.14 would write 5


def extend_name(path: Path, addition: str) -> Path:
    """The path with `addition` before its ending."""
    return path.with_name(f"{path.stem}{addition}{path.suffix}")


def name_snapshot(given: str, rank: int, writers: int) -> Path:
    """This rank's file: --memory-snapshot-path, or with _rankN before its ending where several ranks write."""
    return Path(given) if writers == 1 else extend_name(Path(given), f"_rank{rank}")


def make_snapshot_folder(path: Path, given: str):
    """Make the folder of this rank's file. Raises UserError where none can be written there."""
    given = f"--memory-snapshot-path {given}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{given}: its folder cannot be made ({error.strerror}); name another file.") from error
    if path.is_dir():
        raise UserError(f"{given} is a folder; name a file in it, such as {path / 'snapshot.pickle'}.")


def write_snapshot(path: Path, snapshot: dict):
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
