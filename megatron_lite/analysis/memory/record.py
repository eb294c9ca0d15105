"""The raw snapshot of one device as columns: events of the allocator, blocks at the end, stacks and tags told apart once.

Form: torch.cuda.memory._snapshot() of torch 1.13 to 2.13 {segments, device_traces, allocator_settings,
external_annotations}, and the bare list of segments of torch.cuda.memory_snapshot().
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lite.analysis.memory.stacks import Stacks
from megatron_lite.analysis.trace.columns import Numbered
from megatron_lite.errors import UserError

ACTIONS = (
    "alloc", "free_completed", "free_requested", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
)  # fmt: skip
ALLOC, FREE, FREE_REQUESTED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = range(len(ACTIONS))
UNKNOWN_ACTION = 255
MAX_BYTES = 2**50  # no device has as much


@dataclass(frozen=True)
class Blocks:
    """m blocks at the end of the record, in order of address; free ones too."""

    address: np.ndarray  # int64 [m]
    size: np.ndarray  # int64 [m], as the allocator cut it
    requested: np.ndarray  # int64 [m]
    live: np.ndarray  # bool [m]
    stack: np.ndarray  # int64 [m], index into Record.stacks; 0: none
    tag: np.ndarray  # int64 [m], index into Record.tags; 0: none
    stream: np.ndarray  # int64 [m]


@dataclass(frozen=True)
class Record:
    """n events of one device in order, and its state after them."""

    action: np.ndarray  # uint8 [n], one of the constants above
    address: np.ndarray  # int64 [n]
    size: np.ndarray  # int64 [n], as requested
    device_free: np.ndarray  # int64 [n], of OOM events; 0 elsewhere
    time_us: np.ndarray  # int64 [n], since the first event; the event's number in files without times
    stack: np.ndarray  # int32 [n]
    tag: np.ndarray  # int32 [n]
    stream: np.ndarray  # int64 [n]
    blocks: Blocks
    reserved_bytes: int  # of all segments
    stacks: Stacks
    tags: tuple[str, ...]
    marks: tuple[tuple[int, str, str], ...]  # (time_us as above, "START" or "END", name)
    settings: dict
    timed: bool
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.action)


def build_record(raw, path: Path) -> Record:
    """Raises UserError for values that are no snapshot."""
    try:
        return _build(raw)
    except (TypeError, ValueError, OverflowError, KeyError, AttributeError, IndexError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        reason = "".join(letter if letter.isprintable() else "?" for letter in reason[:120])
        raise UserError(
            f"{path}: is no memory snapshot ({reason}); one is written by "
            "torch.cuda.memory._dump_snapshot or --record-memory-history."
        ) from None


def _build(raw) -> Record:
    raw = {"segments": raw, "device_traces": []} if type(raw) is list else raw
    if type(raw) is not dict:
        raise TypeError(f"it holds a {type(raw).__name__}")
    segments, traces = raw["segments"], raw.get("device_traces") or []
    for part, name in ((segments, "segments"), (traces, "device_traces")):
        if type(part) not in (list, tuple):
            raise TypeError(f"{name} is a {type(part).__name__}")
    device, notes = _choose_device(segments, traces)
    events = traces[device] if device < len(traces) else []
    if any(type(event) is not dict for event in events):
        raise TypeError("an event is no dictionary")
    numbers = {name: number for number, name in enumerate(ACTIONS)}
    stacks, tags = Stacks(), Numbered({"": 0, None: 0})
    times = _integers(event.get("time_us", -1) for event in events)
    timed = bool(len(times)) and times[0] >= 0
    mine = [segment for segment in segments if segment.get("device", 0) == device]
    marks = [
        (int(mark["time_us"]) - int(times[0]), str(mark["stage"]), str(mark["name"]))
        for mark in (raw.get("external_annotations") or () if timed else ())
        if mark.get("device", device) in (device, -1)
    ]
    return Record(
        action=np.array([numbers.get(event["action"], UNKNOWN_ACTION) for event in events], np.uint8),
        address=_integers(event.get("addr", 0) for event in events),
        size=_sizes(event.get("size", 0) for event in events),
        device_free=_integers(event.get("device_free", 0) for event in events),
        time_us=times - times[0] if timed else np.arange(len(events)),
        stack=np.array([stacks.number(event.get("frames")) for event in events], np.int32),
        tag=np.array([tags[event.get("user_metadata")] for event in events], np.int32),
        stream=_integers(event.get("stream", 0) for event in events),
        blocks=_build_blocks(mine, stacks, tags),
        reserved_bytes=int(_sizes(segment["total_size"] for segment in mine).sum()),
        stacks=stacks,
        tags=tuple(map(str, tags)),
        marks=tuple(sorted(marks)),
        settings=raw["allocator_settings"] if type(raw.get("allocator_settings")) is dict else {},
        timed=timed,
        notes=tuple(notes),
    )


def _choose_device(segments, traces) -> tuple[int, list[str]]:
    """The device with the most events, else with the most memory, and a note about the others."""
    sizes = Counter()
    for segment in segments:
        sizes[segment.get("device", 0)] += segment["total_size"]
    seen = {number for number, trace in enumerate(traces) if len(trace)} | set(sizes)
    if not seen:
        raise ValueError("it has neither segments nor events")
    if any(type(number) is not int or not 0 <= number < 1024 for number in seen):
        raise ValueError("a device's number is none")
    best = max(seen, key=lambda number: (len(traces[number]) if number < len(traces) else 0, sizes[number], -number))
    others = ", ".join(map(str, sorted(seen - {best})))
    return best, [f"only device {best} is looked at; the file holds {others} too"] if others else []


def _integers(values) -> np.ndarray:
    return np.fromiter(values, np.int64)


def _sizes(values) -> np.ndarray:
    found = _integers(values)
    if len(found) and not 0 <= found.min() <= found.max() < MAX_BYTES:
        raise ValueError(f"a size of {found.min() if found.min() < 0 else found.max()} bytes")
    return found


def _build_blocks(segments, stacks: Stacks, tags: Numbered) -> Blocks:
    rows = []
    for segment in segments:
        address, stream = segment["address"], segment.get("stream", 0)
        for block in segment["blocks"]:
            size, history = block["size"], block.get("history") or [{}]  # torch 1.13 and 2.0 kept stacks there
            address, live = block.get("address", address), block["state"] != "inactive"
            asked, stack, tag = 0, 0, 0
            if live:
                asked = min(block.get("requested_size") or history[0].get("real_size") or size, size)
                stack = stacks.number(block.get("frames") or history[0].get("frames"))
                tag = tags[block.get("user_metadata")]
            rows.append((address, size, asked, live, stack, tag, stream))
            address += size
    columns = np.array(sorted(rows, key=lambda row: row[0]), np.int64).reshape(-1, 7).T
    _sizes(iter(columns[1]))
    address, size, requested, live, stack, tag, stream = columns
    return Blocks(address, size, requested, live.astype(bool), stack, tag, stream)
