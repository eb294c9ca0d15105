"""Snapshots in the form of torch.cuda.memory._snapshot(), of memory that no CUDA allocator handed out.

{segments, device_traces, allocator_settings, external_annotations}, plain values only: what torch.cuda._memory_viz and
pytorch.org/memory_viz read. Equal stacks are one list object, so that a pickle holds them once.
"""

import os
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from megatron_lite.errors import UserError
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


def apply_events(layout: Layout, events: Iterable[Event]):
    """Let events happen that no trace is to show."""
    for event in events:
        if event.action == ALLOC:
            layout.place(event.allocation)
        elif event.action == FREE:
            layout.release(event.allocation)


def build_snapshot(layout: Layout, events: Iterable[Event], annotations: list[dict]) -> dict:
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


def build_annotations(marks: Iterable[tuple[int, str, str]], device: int = 0) -> list[dict]:
    """Starts and ends of steps and phases, as torch writes its own annotations."""
    return [{"stage": stage, "name": name, "device": device, "time_us": time_us} for time_us, stage, name in marks]


def _entries(layout: Layout, event: Event) -> list[dict]:
    def entry(action: str, address: int, size: int) -> dict:
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

    size = event.allocation.size
    if event.action == ALLOC:
        new = layout.place(event.allocation)
        entries = [entry("alloc", layout.address_of[event.allocation], size)]
        return [entry("segment_alloc", new.address, new.size), *entries] if new is not None else entries
    if event.action == FREE:
        address = layout.release(event.allocation)
        return [entry(action, address, size) for action in ("free_requested", "free_completed")]
    failed = entry("oom", 0, size) | {"device_free": 0}
    del failed["addr"]
    return [failed]


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


# --- Python stacks, captured in microseconds and spelt out once each

# what records, or calls what records: no part of the stack that is recorded
RECORDERS = (
    "megatron_lite/instruments/",
    "/torch/utils/_python_dispatch.py",
    "/torch/_compile.py",
    "/torch/_dynamo/eval_frame.py",
)
MAX_DEPTH = 100


class Stacks:
    """Gives the calling stack as a list of {filename, line, name}, innermost first; equal stacks are one list."""

    def __init__(self):
        self._known: dict[tuple, list[dict]] = {}
        self._frames: dict[tuple[int, int], dict] = {}
        self._codes: dict[int, CodeType] = {}  # keeps them alive: a code's id must stay its own

    def capture(self, operation: str = "") -> list[dict]:
        """The calling stack without those who record; `operation` stands before it like a C++ frame.

        Empty on a thread of torch's own, where Python has no frames but the recorders'.
        """
        frame, key = sys._getframe(1), [operation]
        add = key.append  # this loop is most of what recording costs
        while frame is not None:
            add(id(frame.f_code))
            add(frame.f_lasti)
            frame = frame.f_back
        key = tuple(key)
        if key not in self._known:
            self._known[key] = self._spell(operation, sys._getframe(1))
        return self._known[key]

    def _spell(self, operation: str, frame) -> list[dict]:
        frames, began = [{"filename": "??", "line": 0, "name": operation}] if operation else [], False
        for _ in range(MAX_DEPTH):
            if frame is None:
                break
            code = frame.f_code
            self._codes[id(code)] = code
            began = began or not any(part in code.co_filename for part in RECORDERS)
            if began:
                found = {"filename": code.co_filename, "line": frame.f_lineno or 0, "name": code.co_name}
                frames.append(self._frames.setdefault((id(code), frame.f_lasti), found))
            frame = frame.f_back
        return frames


# --- where snapshots are written, and how

PROTOCOL = 4  # the viewer in the browser reads no newer one; Python 3.14 would write 5


class SnapshotFiles:
    """The files of one rank: PATH, or PATH with _rankN before its ending where several ranks write."""

    def __init__(self, path: str, rank: int, alone: bool):
        self._path, self._rank = Path(path), rank
        self.history = self._path if alone else self._named(f"_rank{rank}")

    @property
    def out_of_memory(self) -> Path:
        """What is written when memory runs out."""
        return self._named(f"_oom_rank{self._rank}")

    def on_demand(self, first: int, last: int) -> Path:
        """For a window that was asked for while the run went on."""
        return self.history.with_name(f"{self.history.stem}_steps{first}-{last}{self.history.suffix}")

    def prepare(self):
        """Make the folder. Raises UserError where no file can be written there."""
        given = f"--memory-snapshot-path {self._path}"
        try:
            self.history.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{given}: its folder cannot be made ({error.strerror}); name another file.") from error
        if self.history.is_dir():
            raise UserError(f"{given} is a folder; name a file in it, such as {self._path / 'snapshot.pickle'}.")

    def _named(self, addition: str) -> Path:
        return self._path.with_name(f"{self._path.stem}{addition}{self._path.suffix}")


def write_snapshot(path: Path, snapshot: dict):
    """All of it or nothing. Raises OSError."""
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
