"""The raw snapshot of one device as columns: events of the allocator, blocks at the end, stacks and tags told apart once.

Form: torch.cuda.memory._snapshot() of torch 1.13 to 2.13 {segments, device_traces, allocator_settings,
external_annotations}, and the bare list of segments of torch.cuda.memory_snapshot().
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lite.analysis.memory.stacks import Stacks
from megatron_lite.errors import UserError

ACTIONS = (
    "alloc",
    "free_completed",
    "free_requested",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
ALLOC, FREE, FREE_REQUESTED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM, SNAPSHOT = range(
    len(ACTIONS)
)
UNKNOWN_ACTION = 255
LARGEST = 2**50  # bytes; no device has as much


@dataclass(frozen=True)
class Blocks:
    """m blocks at the end of the record, in order of address; free ones too."""

    address: np.ndarray  # int64 [m]
    size: np.ndarray  # int64 [m], as the allocator cut it
    requested: np.ndarray  # int64 [m]
    live: np.ndarray  # bool [m]
    stack: np.ndarray  # int32 [m], index into Record.stacks; 0: none
    tag: np.ndarray  # int32 [m], index into Record.tags; 0: none
    stream: np.ndarray  # int64 [m]
    segment: np.ndarray  # int32 [m], index into the segments' columns


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
    segment_address: np.ndarray  # int64 [k]
    segment_bytes: np.ndarray  # int64 [k]
    stacks: Stacks
    tags: tuple[str, ...]
    marks: tuple[tuple[int, str, str], ...]  # (time_us as above, "START" or "END", name)
    settings: dict
    device: int
    timed: bool
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.action)


def build_record(raw, path: Path) -> Record:
    """Raises UserError for values that are no snapshot."""
    try:
        return _record(raw)
    except (TypeError, ValueError, OverflowError, KeyError, AttributeError, IndexError) as error:
        raise UserError(
            f"{path}: is no memory snapshot ({_reason(error)}); one is written by "
            "torch.cuda.memory._dump_snapshot or --record-memory-history."
        ) from None


def _reason(error: Exception) -> str:
    text = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return "".join(letter if letter.isprintable() else "?" for letter in text[:120])


def _record(raw) -> Record:
    raw = {"segments": raw, "device_traces": []} if type(raw) is list else raw
    if type(raw) is not dict:
        raise TypeError(f"it holds a {type(raw).__name__}")
    segments, traces = raw["segments"], raw.get("device_traces") or []
    for part, name in ((segments, "segments"), (traces, "device_traces")):
        if type(part) not in (list, tuple):
            raise TypeError(f"{name} is a {type(part).__name__}")
    device, notes = _device(segments, traces)
    events = traces[device] if device < len(traces) else []
    if any(type(event) is not dict for event in events):
        raise TypeError("an event is no dictionary")
    numbers = {name: number for number, name in enumerate(ACTIONS)}
    stacks, tags = Stacks(), _Numbers()
    times = _integers(event.get("time_us", -1) for event in events)
    timed = bool(len(times)) and times[0] >= 0
    start = times[0] if timed else 0
    mine = [segment for segment in segments if segment.get("device", 0) == device]
    return Record(
        action=np.array([numbers.get(event["action"], UNKNOWN_ACTION) for event in events], np.uint8),
        address=_integers(event.get("addr", 0) for event in events),
        size=_sizes(event.get("size", 0) for event in events),
        device_free=_integers(event.get("device_free", 0) for event in events),
        time_us=times - start if timed else np.arange(len(events)),
        stack=np.array([stacks.number(event.get("frames")) for event in events], np.int32),
        tag=np.array([tags.number(event.get("user_metadata")) for event in events], np.int32),
        stream=_integers(event.get("stream", 0) for event in events),
        blocks=_blocks(mine, stacks, tags),
        segment_address=_integers(segment["address"] for segment in mine),
        segment_bytes=_sizes(segment["total_size"] for segment in mine),
        stacks=stacks,
        tags=tuple(tags.values),
        marks=_marks(raw, device, int(start)) if timed else (),
        settings=raw["allocator_settings"] if type(raw.get("allocator_settings")) is dict else {},
        device=device,
        timed=timed,
        notes=tuple(notes),
    )


def _device(segments, traces) -> tuple[int, list[str]]:
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


class _Numbers:
    """Distinct texts, numbered; 0 stands for none."""

    def __init__(self):
        self.values, self._numbers = [""], {"": 0, None: 0}

    def number(self, text) -> int:
        found = self._numbers.get(text)
        if found is None:
            found = self._numbers[text] = len(self.values)
            self.values.append(str(text))
        return found


def _integers(values) -> np.ndarray:
    return np.fromiter(values, np.int64)


def _sizes(values) -> np.ndarray:
    found = _integers(values)
    if len(found) and not 0 <= found.min() <= found.max() < LARGEST:
        raise ValueError(f"a size of {found.min() if found.min() < 0 else found.max()} bytes")
    return found


def _blocks(segments, stacks: Stacks, tags: _Numbers) -> Blocks:
    rows = []
    for number, segment in enumerate(segments):
        address, stream = segment["address"], segment.get("stream", 0)
        for block in segment["blocks"]:
            size, history = block["size"], block.get("history") or [{}]  # torch 1.13 and 2.0 kept stacks there
            address = block.get("address", address)
            asked = block.get("requested_size") or history[0].get("real_size") or size
            frames = block.get("frames") or history[0].get("frames")
            live = block["state"] != "inactive"
            rows.append(
                (
                    address,
                    size,
                    min(asked, size) if live else 0,
                    live,
                    stacks.number(frames) if live else 0,
                    tags.number(block.get("user_metadata")) if live else 0,
                    stream,
                    number,
                )
            )
            address += size
    columns = list(zip(*rows)) or [()] * 8
    address, size, asked, live, stack, tag, stream, number = (np.array(column, np.int64) for column in columns)
    _sizes(iter(size))
    order = np.argsort(address, kind="stable")
    return Blocks(
        address[order],
        size[order],
        asked[order],
        live[order].astype(bool),
        stack[order],
        tag[order],
        stream[order],
        number[order],
    )


def _marks(raw: dict, device: int, start_us: int) -> tuple[tuple[int, str, str], ...]:
    found = raw.get("external_annotations") or ()
    return tuple(
        sorted(
            (int(mark["time_us"]) - start_us, str(mark["stage"]), str(mark["name"]))
            for mark in found
            if mark.get("device", device) in (device, -1)
        )
    )
