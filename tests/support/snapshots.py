"""Reading memory snapshots in tests, without trusting them."""

import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path

PLAIN = (dict, list, tuple, str, int, float, bool, type(None))


class _NothingButValues(pickle.Unpickler):
    def find_class(self, module, name):
        raise AssertionError(f"{module}.{name} in a snapshot")


def read_snapshot(path: Path) -> dict:
    with open(path, "rb") as file:
        return _NothingButValues(file).load()


def protocol(path: Path) -> int:
    """Which one the file says it is in."""
    name, argument, _ = next(
        (opcode.name, argument, at) for opcode, argument, at in pickletools.genops(path.read_bytes())
    )
    assert name == "PROTO"
    return argument


def types_in(value) -> set[type]:
    """Of everything inside, each shared part looked at once."""
    found, seen, waiting = set(), set(), [value]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        found.add(type(part))
        if isinstance(part, dict):
            waiting += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple)):
            waiting += part
    return found


def trace(snapshot: dict) -> list[dict]:
    [events] = snapshot["device_traces"]
    return events


def live_blocks(snapshot: dict) -> dict[int, int]:
    """{address: requested bytes} at the end; blocks must fill their segments without gaps."""
    found = {}
    for segment in snapshot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
            if block["state"] == "active_allocated":
                assert 0 < block["requested_size"] <= block["size"] and block["size"] % 512 == 0
                found[block["address"]] = block["requested_size"]
        assert at == segment["address"] + segment["total_size"]
        used = [block["size"] for block in segment["blocks"] if block["state"] != "inactive"]
        assert segment["allocated_size"] == segment["active_size"] == sum(used)
    return found


def live_at_each_moment(snapshot: dict) -> Iterator[tuple[dict, int]]:
    """(event, bytes that are alive after it). Asserts what the viewer relies on: memory that is handed out is free at that
    moment and lies in a segment, what is freed was held, and the end is what the segments show."""
    live, end = _at_the_start(snapshot), live_blocks(snapshot)
    segments = sorted((s["address"], s["address"] + s["total_size"]) for s in snapshot["segments"])
    total = sum(live.values())
    for event in trace(snapshot):
        address, size = event.get("addr"), event["size"]
        if event["action"] == "alloc":
            assert any(start <= address and address + size <= stop for start, stop in segments)
            assert not any(other < address + size and address < other + held for other, held in live.items())
            live[address] = size
            total += size
        elif event["action"] == "free_completed":
            assert live.pop(address) == size
            total -= size
        yield event, total
    assert live == end


def _at_the_start(snapshot: dict) -> dict[int, int]:
    start, allocated = {}, set()
    for event in trace(snapshot):
        if event["action"] == "alloc":
            allocated.add(event["addr"])
        elif event["action"] == "free_completed" and event["addr"] not in allocated:
            start[event["addr"]] = event["size"]
    return start | {address: size for address, size in live_blocks(snapshot).items() if address not in allocated}


def steps_in_snapshot(path: Path) -> list[int]:
    """Steps between whose annotations something was allocated or freed; tags must name the same ones."""
    snapshot = read_snapshot(path)
    marks = [
        (mark["time_us"], mark["stage"], int(mark["name"].removeprefix("step ")))
        for mark in snapshot["external_annotations"]
        if mark["name"].startswith("step ")
    ]
    ends = {step: time_us for time_us, stage, step in marks if stage == "END"}
    begins = {step: time_us for time_us, stage, step in marks if stage == "START"}
    times = [event["time_us"] for event in trace(snapshot)]
    held = [step for step, began in begins.items() if any(began <= time <= ends.get(step, time) for time in times)]
    tagged = {event["user_metadata"].partition("/")[0] for event in trace(snapshot) if event["action"] == "alloc"}
    assert tagged == {f"step {step}" for step in held}
    return held
