"""The raw snapshot of one device as columns: events of the allocator, blocks at the end, stacks and tags told apart
once.

Form: torch.cuda.memory._snapshot() of torch 1.13 to 2.13 {segments, device_traces, allocator_settings,
external_annotations}, and the bare list of segments of torch.cuda.memory_snapshot().
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.memory.stacks import Stacks
from megatron_lite.analysis.trace.columns import Numbered
from megatron_lite.errors import UserError
from megatron_lite.terminal import make_printable
from megatron_lite.units import size

Ints = NDArray[np.int64]
PoolId = tuple[int, int]  # as the allocator gives it

# --- the record

ACTIONS = (
    "alloc", "free_completed", "free_requested", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom",
)  # fmt: skip
ALLOC, FREE, FREE_REQUESTED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM = range(len(ACTIONS))
MORE_RESERVED = (SEGMENT_ALLOC, SEGMENT_MAP)
LESS_RESERVED = (SEGMENT_FREE, SEGMENT_UNMAP)
UNKNOWN_ACTION = 255
MAX_DEVICES = 1024
AWAITING = ("active_awaiting_free", "active_pending_free")  # torch's Python and C++ call it differently
MAX_DEVICE_BYTES = 2**50  # no device has as much
# size: as the allocator cut it; stack, tag, pool: indices into Record.stacks, Record.tags and Record.pools, 0 for none;
# awaiting: given back, and held until another stream is done with it
BLOCK = np.dtype([
    ("address", "i8"), ("size", "i8"), ("requested", "i8"), ("live", "?"), ("awaiting", "?"),
    ("stack", "i8"), ("tag", "i8"), ("stream", "i8"), ("pool", "i8"),
])  # fmt: skip
DEFAULT_POOL = (0, 0)
NO_OWNER = (0, 0, 0)  # bytes asked for, stack and tag of a free block


@dataclass(frozen=True)
class AllocatorEvents:
    """Events of one device, n in order, and its state after them."""

    action: NDArray[np.uint8]  # [n], one of the constants above
    address: Ints  # [n]
    size: Ints  # [n], as requested
    device_free: Ints  # [n], of OOM events; 0 elsewhere
    time_us: Ints  # [n], since the first event; the event's number in files without times
    stack: NDArray[np.int32]  # [n]
    tag: NDArray[np.int32]  # [n]
    stream: Ints  # [n]
    pool: Ints  # [n], index into pools; 0 is the default pool
    blocks: NDArray[np.void]  # BLOCK [m], those at the end in order of address; free ones too
    reserved_bytes: int  # of all segments
    reserved_of_pool: tuple[int, ...]  # the same, of each pool
    pools: tuple[PoolId, ...]  # the default pool first
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
    """Build the record of what the file at `path` holds. Raises UserError for values that are no snapshot."""
    try:
        return _build(raw)
    except (TypeError, ValueError, OverflowError, KeyError, AttributeError, IndexError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path}: is no memory snapshot ({make_printable(what, 120)}); one is written by "
            "torch.cuda.memory._dump_snapshot or --record-memory-history."
        ) from None


def _build(raw: Any) -> AllocatorEvents:
    """Build the record of the snapshot's most telling device.

    Raises the errors of Python for values that are no snapshot.
    """
    if type(raw) is list:
        raw = {"segments": raw, "device_traces": []}
    segments, traces = _read_parts(raw)
    device, notes = _choose_device(segments, traces)
    own_segments = _take_segments(segments, device)
    events = _take_events(traces, device)
    _check_events(events)
    times_us = _read_column(events, "time_us", -1)
    timed = bool(len(times_us)) and times_us[0] >= 0
    marks = _read_marks(raw, device, int(times_us[0])) if timed else []
    # each gives numbers to what it meets, in the order in which it meets it
    stacks = Stacks()
    tags: Numbered[Any] = Numbered({"": 0, None: 0})
    pools: Numbered[PoolId] = Numbered({DEFAULT_POOL: 0})
    stack = _number(events, "frames", stacks.number)
    blocks = _build_blocks(own_segments, stacks, tags, pools)
    pool = _find_pools(events, own_segments, pools)
    reserved_of_pool = _sum_reserved(own_segments, pools)
    tag = _number(events, "user_metadata", tags.__getitem__)
    sizes = _read_column(events, "size", 0)
    _check_sizes(sizes)
    return AllocatorEvents(
        action=_number_actions(events),
        address=_read_column(events, "addr", 0),
        size=sizes,
        device_free=_read_column(events, "device_free", 0),
        time_us=times_us - times_us[0] if timed else np.arange(len(events)),
        stack=stack,
        tag=tag,
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
        settings=_read_settings(raw),
        timed=timed,
        notes=tuple(notes),
    )


def _read_parts(raw: Any) -> tuple[Any, Any]:
    """Read segments and the traces of each device, which are sequences.

    What these hold is checked by those who read it.
    """
    if type(raw) is not dict:
        raise TypeError(f"it holds a {type(raw).__name__}")
    parts = {"segments": raw["segments"], "device_traces": raw.get("device_traces") or []}
    for name, part in parts.items():
        if type(part) not in (list, tuple):
            raise TypeError(f"{name} is a {type(part).__name__}")
    return parts["segments"], parts["device_traces"]


def _check_events(events: Any) -> None:
    """Raise TypeError for an event that is no dictionary."""
    for event in events:
        if type(event) is not dict:
            raise TypeError("an event is no dictionary")


def _read_settings(raw: Any) -> dict[str, Any]:
    """The settings of the allocator by name; {} where the file holds none."""
    settings = raw.get("allocator_settings")
    return settings if type(settings) is dict else {}


def _read_column(events: Any, key: str, default: int) -> Ints:
    """Read one value of each event: int64 [n]."""
    return np.fromiter((event.get(key, default) for event in events), np.int64)


def _number(
    events: Any,
    key: str,
    number: Callable[[Any], int],  # gives a value its number
) -> NDArray[np.int32]:
    """Number one value of each event: int32 [n]."""
    numbers = [number(event.get(key)) for event in events]
    return np.array(numbers, np.int32)


def _number_actions(events: Any) -> NDArray[np.uint8]:
    """Number the action of each event: uint8 [n], from ALLOC to OOM or UNKNOWN_ACTION."""
    number_of_action = {name: number for number, name in enumerate(ACTIONS)}
    numbers = [number_of_action.get(event["action"], UNKNOWN_ACTION) for event in events]
    return np.array(numbers, np.uint8)


def _read_marks(
    raw: Any,
    device: int,
    start_us: int,  # of the first event
) -> list[tuple[int, str, str]]:
    """Read the annotations that concern the device: time in us since the first event, stage and name."""
    marks = []
    for mark in raw.get("external_annotations") or ():
        if mark.get("device", device) not in (device, -1):
            continue
        time_us = int(mark["time_us"]) - start_us
        stage = str(mark["stage"])
        name = str(mark["name"])
        marks.append((time_us, stage, name))
    return marks


def _sum_reserved(segments: Any, pools: Numbered[PoolId]) -> tuple[int, ...]:
    """Bytes of the segments of each pool."""
    sizes = np.array([segment["total_size"] for segment in segments], np.int64)
    _check_sizes(sizes)
    sums = [0] * len(pools)
    for segment, num_bytes in zip(segments, sizes.tolist()):
        sums[pools[_read_pool(segment)]] += num_bytes
    return tuple(sums)


# --- one device of a file that holds several


def _choose_device(segments: Any, traces: Any) -> tuple[int, list[str]]:
    """The device on which a request failed, else the one with the highest peak; and a note about the others."""
    devices = _find_devices(segments, traces)
    if len(devices) == 1:
        return devices.pop(), []
    peaks = {}
    counts = {}
    failed = set()
    for device in devices:
        events = _take_events(traces, device)
        own_segments = _take_segments(segments, device)
        peaks[device] = _measure_peak(events, own_segments)
        counts[device] = len(events)
        if _ran_out(events):
            failed.add(device)

    def rank(device: int) -> tuple[int, int, int]:
        """Order devices by their peak, then by their events; the first of equal ones is the highest."""
        return peaks[device], counts[device], -device

    best = max(failed or devices, key=rank)
    others = [f"device {device} at {size(peaks[device])}" for device in sorted(devices - {best})]
    note = f"this is device {best}; the file holds others, whose memory peaks: {', '.join(others)}"
    also_failed = [str(device) for device in sorted(failed - {best})]
    if also_failed:
        note += f"; a request failed on device {', '.join(also_failed)}, too"
    return best, [note]


def _find_devices(segments: Any, traces: Any) -> set[int]:
    """Numbers of the devices that have events or segments, at least one."""
    devices = {number for number, trace in enumerate(traces) if len(trace)}
    devices |= {segment.get("device", 0) for segment in segments}
    if not devices:
        raise ValueError("it has neither segments nor events")
    if any(type(number) is not int or not 0 <= number < MAX_DEVICES for number in devices):
        raise ValueError("a device's number is none")
    return devices


def _take_events(traces: Any, device: int) -> Any:
    """The events of a device, a sequence."""
    return traces[device] if device < len(traces) else []


def _take_segments(segments: Any, device: int) -> list[Any]:
    """The segments of a device; files of one device may leave its number out."""
    return [segment for segment in segments if segment.get("device", 0) == device]


def _ran_out(events: Any) -> bool:
    """Whether a request failed and the program did not allocate as much afterwards."""
    allocated = 0
    for event in reversed(events):
        if event.get("action") == ACTIONS[OOM]:
            return bool(allocated < max(event.get("size", 0), 1))
        if event.get("action") == ACTIONS[ALLOC]:
            allocated += event.get("size", 0)
    return False


def _measure_peak(events: Any, segments: Any) -> int:
    """Most bytes that a device's tensors held, backwards from the blocks at the end."""
    held = 0
    for segment in segments:
        live = [block for block in segment["blocks"] if block["state"] != "inactive"]
        held += sum(block["size"] for block in live)
    most = held
    for event in reversed(events):
        if event.get("action") == ACTIONS[FREE]:
            held += event.get("size", 0)
        elif event.get("action") == ACTIONS[ALLOC]:
            held -= event.get("size", 0)
        most = max(most, held)
    return int(most)


# --- pools and blocks


def _read_pool(entry: dict[str, Any], key: str = "segment_pool_id") -> PoolId:
    """A segment's or event's pool; JSON has lists where pickles have tuples, and files before torch 2.1 have none."""
    first, second = entry.get(key) or DEFAULT_POOL
    return int(first), int(second)


def _find_pools(
    events: Any,
    segments: Any,
    pools: Numbered[PoolId],
) -> Ints:
    """Find the pool of each event: int64 [n].

    It is that of the segment that holds its address at the end, else what the event says itself (newer versions of
    torch).
    """
    rows = []
    for segment in segments:
        pool = pools[_read_pool(segment)]
        rows.append((segment["address"], segment["total_size"], pool))
    address = _read_column(events, "addr", 0)
    found = np.zeros(len(address), np.int64)
    if rows:
        start, length, number = np.array(sorted(rows), np.int64).T
        # the last segment that starts before the address, or the first
        before = np.searchsorted(start, address, side="right")
        nearest = np.maximum(before - 1, 0)
        offset = address - start[nearest]
        inside = (offset >= 0) & (offset < length[nearest])
        found[inside] = number[nearest[inside]]
    for index, event in enumerate(events):
        if "pool_id" in event and not found[index]:
            found[index] = pools[_read_pool(event, "pool_id")]
    return found


def _check_sizes(sizes: Ints) -> None:
    """Raise ValueError for a size that no memory can have."""
    for extreme in (sizes.min(initial=0), sizes.max(initial=0)):
        if not 0 <= extreme < MAX_DEVICE_BYTES:
            raise ValueError(f"a size of {extreme} bytes")


def _build_blocks(
    segments: Any,  # of one device
    stacks: Stacks,
    tags: Numbered[Any],
    pools: Numbered[PoolId],
) -> NDArray[np.void]:
    """BLOCK [m]: the blocks of segments in order of address. Numbers what it meets in stacks, tags and pools."""
    rows = []
    for segment in segments:
        address = segment["address"]
        stream = segment.get("stream", 0)
        pool = pools[_read_pool(segment)]
        for block in segment["blocks"]:
            num_bytes = block["size"]
            # blocks of old versions have no address of their own; they lie side by side
            address = block.get("address", address)
            live = block["state"] != "inactive"
            awaiting = block["state"] in AWAITING
            owner = _read_owner(block, stacks, tags) if live else NO_OWNER
            # in the order of BLOCK's fields
            rows.append((address, num_bytes, owner[0], live, awaiting, owner[1], owner[2], stream, pool))
            address += num_bytes
    blocks = np.array(sorted(rows, key=lambda row: row[0]), BLOCK)
    _check_sizes(blocks["size"])
    return blocks


def _read_owner(
    block: Any,
    stacks: Stacks,
    tags: Numbered[Any],
) -> tuple[int, int, int]:
    """Read the owner of a block that is in use: bytes asked for, number of the stack, number of the tag."""
    latest = (block.get("history") or [{}])[0]  # where torch 1.13 and 2.0 kept stacks
    num_bytes = block["size"]
    requested = block.get("requested_size") or latest.get("real_size") or num_bytes
    stack = stacks.number(block.get("frames") or latest.get("frames"))
    tag = tags[block.get("user_metadata")]
    return min(requested, num_bytes), stack, tag
