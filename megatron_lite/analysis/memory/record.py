"""The raw snapshot of one device as columns: events of the allocator, blocks at the end, stacks and tags told apart
once.

Form: torch.cuda.memory._snapshot() of torch 1.13 to 2.13 {segments, device_traces, allocator_settings,
external_annotations}, and the bare list of segments of torch.cuda.memory_snapshot().
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.memory.stacks import Stacks, make_printable
from megatron_lite.analysis.trace.columns import Numbered
from megatron_lite.errors import UserError
from megatron_lite.units import size

# --- the record

ACTIONS = (
    "alloc", "free_completed", "free_requested", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
)  # fmt: skip
ALLOC, FREE, FREE_REQUESTED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = range(len(ACTIONS))
MORE_RESERVED, LESS_RESERVED = (SEGMENT_ALLOC, SEGMENT_MAP), (SEGMENT_FREE, SEGMENT_UNMAP)
UNKNOWN_ACTION = 255
MAX_DEVICES = 1024
AWAITING = ("active_awaiting_free", "active_pending_free")  # torch's Python and C++ call it differently
MAX_BYTES = 2**50  # no device has as much
# size: as the allocator cut it; stack, tag, pool: indices into Record.stacks, Record.tags and Record.pools, 0 for none;
# awaiting: given back, and held until another stream is done with it
BLOCK = np.dtype([
    ("address", "i8"), ("size", "i8"), ("requested", "i8"), ("live", "?"), ("awaiting", "?"),
    ("stack", "i8"), ("tag", "i8"), ("stream", "i8"), ("pool", "i8"),
])  # fmt: skip
DEFAULT_POOL = (0, 0)


@dataclass(frozen=True)
class AllocatorEvents:
    """n events of one device in order, and its state after them."""

    action: NDArray[np.uint8]  # [n], one of the constants above
    address: NDArray[np.int64]  # [n]
    size: NDArray[np.int64]  # [n], as requested
    device_free: NDArray[np.int64]  # [n], of OOM events; 0 elsewhere
    time_us: NDArray[np.int64]  # [n], since the first event; the event's number in files without times
    stack: NDArray[np.int32]  # [n]
    tag: NDArray[np.int32]  # [n]
    stream: NDArray[np.int64]  # [n]
    pool: NDArray[np.int64]  # [n], index into pools; 0 is the default pool
    blocks: NDArray[np.void]  # BLOCK [m], those at the end in order of address; free ones too
    reserved_bytes: int  # of all segments
    reserved_of_pool: tuple[int, ...]  # the same, of each pool
    pools: tuple[tuple[int, int], ...]  # ids as the allocator gives them; the default pool first
    device: int
    stacks: Stacks
    tags: tuple[str, ...]
    marks: tuple[tuple[int, str, str], ...]  # (time_us as above, "START" or "END", name)
    settings: dict[str, Any]
    timed: bool
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.action)


def build_record(raw: Any, path: Path) -> AllocatorEvents:
    """Raises UserError for values that are no snapshot."""
    try:
        return _build(raw)
    except (TypeError, ValueError, OverflowError, KeyError, AttributeError, IndexError) as error:
        reason = make_printable(f"it lacks {error}" if isinstance(error, KeyError) else str(error), 120)
        raise UserError(
            f"{path}: is no memory snapshot ({reason}); one is written by "
            "torch.cuda.memory._dump_snapshot or --record-memory-history."
        ) from None


def _build(raw: Any) -> AllocatorEvents:
    """Build the record of the snapshot's most telling device.

    Raises the errors of Python for values that are no snapshot.
    """
    raw = {"segments": raw, "device_traces": []} if type(raw) is list else raw
    segments, traces = _read_parts(raw)
    device, notes = _choose_device(segments, traces)
    events = traces[device] if device < len(traces) else []
    if any(type(event) is not dict for event in events):
        raise TypeError("an event is no dictionary")
    # each gives numbers to what it meets, in the order in which it meets it
    stacks = Stacks()
    tags: Numbered[Any] = Numbered({"": 0, None: 0})
    pools: Numbered[tuple[int, int]] = Numbered({DEFAULT_POOL: 0})
    times = _read_column(events, "time_us", -1)
    timed = bool(len(times)) and times[0] >= 0
    own_segments = [segment for segment in segments if segment.get("device", 0) == device]
    marks = _read_marks(raw, device, int(times[0])) if timed else []
    stack = np.array([stacks.number(event.get("frames")) for event in events], np.int32)
    blocks = _build_blocks(own_segments, stacks, tags, pools)
    pool = _find_pools(events, own_segments, pools)
    reserved_of_pool = _sum_reserved(own_segments, pools)
    number_of_action = {name: number for number, name in enumerate(ACTIONS)}
    return AllocatorEvents(
        action=np.array([number_of_action.get(event["action"], UNKNOWN_ACTION) for event in events], np.uint8),
        address=_read_column(events, "addr", 0),
        size=_check_sizes(_read_column(events, "size", 0)),
        device_free=_read_column(events, "device_free", 0),
        time_us=times - times[0] if timed else np.arange(len(events)),
        stack=stack,
        tag=np.array([tags[event.get("user_metadata")] for event in events], np.int32),
        stream=_read_column(events, "stream", 0),
        pool=pool,
        blocks=blocks,
        reserved_bytes=sum(reserved_of_pool),
        reserved_of_pool=reserved_of_pool,
        pools=tuple(pools),
        device=device,
        stacks=stacks,
        tags=tuple(map(str, tags)),
        marks=tuple(sorted(marks)),
        settings=raw["allocator_settings"] if type(raw.get("allocator_settings")) is dict else {},
        timed=timed,
        notes=tuple(notes),
    )


def _read_parts(raw: Any) -> tuple[Any, Any]:
    """(segments, traces of each device), which are sequences; what they hold is checked by those who read it."""
    if type(raw) is not dict:
        raise TypeError(f"it holds a {type(raw).__name__}")
    parts = {"segments": raw["segments"], "device_traces": raw.get("device_traces") or []}
    for name, part in parts.items():
        if type(part) not in (list, tuple):
            raise TypeError(f"{name} is a {type(part).__name__}")
    return parts["segments"], parts["device_traces"]


def _read_column(events: Any, key: str, default: int) -> NDArray[np.int64]:
    """int64 [n]: one value of each event."""
    return np.fromiter((event.get(key, default) for event in events), np.int64)


def _read_marks(raw: Any, device: int, start_us: int) -> list[tuple[int, str, str]]:
    """(time_us since the first event, stage, name) of the annotations that concern the device."""
    return [
        (int(mark["time_us"]) - start_us, str(mark["stage"]), str(mark["name"]))
        for mark in raw.get("external_annotations") or ()
        if mark.get("device", device) in (device, -1)
    ]


def _sum_reserved(segments: Any, pools: Numbered[tuple[int, int]]) -> tuple[int, ...]:
    """Bytes of the segments of each pool."""
    sizes = _check_sizes(np.array([segment["total_size"] for segment in segments], np.int64))
    pool_of_segment = np.array([pools[_read_pool(segment)] for segment in segments], np.int64)
    return tuple(int(sizes[pool_of_segment == number].sum()) for number in range(len(pools)))


def _choose_device(segments: Any, traces: Any) -> tuple[int, list[str]]:
    """The device on which a request failed, else the one with the highest peak; and a note about the others."""
    seen = {number for number, trace in enumerate(traces) if len(trace)}
    seen |= {segment.get("device", 0) for segment in segments}
    if not seen:
        raise ValueError("it has neither segments nor events")
    if any(type(number) is not int or not 0 <= number < MAX_DEVICES for number in seen):
        raise ValueError("a device's number is none")
    if len(seen) == 1:
        return seen.pop(), []
    peaks, events = {}, {number: traces[number] if number < len(traces) else [] for number in seen}
    for number in seen:
        peaks[number] = _measure_peak(events[number], [one for one in segments if one.get("device", 0) == number])
    failed = {number for number in seen if _ran_out(events[number])}
    best = max(failed or seen, key=lambda number: (peaks[number], len(events[number]), -number))
    others = ", ".join(f"device {number} at {size(peaks[number])}" for number in sorted(seen - {best}))
    failures = sorted(failed - {best})
    more = f"; a request failed on device {', '.join(map(str, failures))}, too" if failures else ""
    return best, [f"this is device {best}; the file holds others, whose memory peaks: {others}{more}"]


def _ran_out(events: Any) -> bool:
    """Whether a request failed and the program did not allocate as much afterwards."""
    allocated = 0
    for event in reversed(events):
        if event.get("action") == ACTIONS[OOM]:
            return bool(allocated < max(event.get("size", 0), 1))
        allocated += event.get("size", 0) if event.get("action") == ACTIONS[ALLOC] else 0
    return False


def _measure_peak(events: Any, segments: Any) -> int:
    """Most bytes that a device's tensors held, backwards from the blocks at the end."""
    held = sum(block["size"] for segment in segments for block in segment["blocks"] if block["state"] != "inactive")
    most = held
    for event in reversed(events):
        if event.get("action") == ACTIONS[FREE]:
            held += event.get("size", 0)
        elif event.get("action") == ACTIONS[ALLOC]:
            held -= event.get("size", 0)
        most = max(most, held)
    return int(most)


def _read_pool(entry: dict[str, Any], key: str = "segment_pool_id") -> tuple[int, int]:
    """A segment's or event's pool; JSON has lists where pickles have tuples, and files before torch 2.1 have none."""
    first, second = entry.get(key) or DEFAULT_POOL
    return int(first), int(second)


def _find_pools(events: Any, segments: Any, pools: Numbered[tuple[int, int]]) -> NDArray[np.int64]:
    """int64 [n]: the pool of each event: of the segment that holds its address at the end, else what the event says
    itself (newer versions of torch)."""
    edges = sorted((segment["address"], segment["total_size"], pools[_read_pool(segment)]) for segment in segments)
    starts = np.array([start for start, _, _ in edges], np.int64)
    ends = starts + np.array([length for _, length, _ in edges], np.int64)
    numbers = np.array([number for _, _, number in edges], np.int64)
    addresses = np.fromiter((event.get("addr", 0) for event in events), np.int64)
    found = np.zeros(len(addresses), np.int64)
    if len(edges):
        at = np.maximum(np.searchsorted(starts, addresses, side="right") - 1, 0)
        inside = (addresses >= starts[at]) & (addresses < ends[at])
        found[inside] = numbers[at[inside]]
    for index, event in enumerate(events):
        if "pool_id" in event and not found[index]:
            found[index] = pools[_read_pool(event, "pool_id")]
    return found


def _check_sizes(found: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(found) and not 0 <= found.min() <= found.max() < MAX_BYTES:
        raise ValueError(f"a size of {found.min() if found.min() < 0 else found.max()} bytes")
    return found


def _build_blocks(
    segments: Any, stacks: Stacks, tags: Numbered[Any], pools: Numbered[tuple[int, int]]
) -> NDArray[np.void]:
    rows = []
    for segment in segments:
        address, stream, pool = segment["address"], segment.get("stream", 0), pools[_read_pool(segment)]
        for block in segment["blocks"]:
            num_bytes, history = block["size"], block.get("history") or [{}]  # torch 1.13 and 2.0 kept stacks there
            address, live = block.get("address", address), block["state"] != "inactive"
            asked, stack, tag = 0, 0, 0
            if live:
                asked = min(block.get("requested_size") or history[0].get("real_size") or num_bytes, num_bytes)
                stack = stacks.number(block.get("frames") or history[0].get("frames"))
                tag = tags[block.get("user_metadata")]
            awaiting = block["state"] in AWAITING
            rows.append((address, num_bytes, asked, live, awaiting, stack, tag, stream, pool))
            address += num_bytes
    blocks = np.array(sorted(rows, key=lambda row: row[0]), BLOCK)
    _check_sizes(blocks["size"])
    return blocks
