"""Makes small memory snapshots in the form of torch.cuda.memory._snapshot(), with known answers. Sizes: bytes.

made = MadeSnapshot()
weight = made.alloc(2**30, "setup")
made.step(1); kept = made.alloc(2**20, "step 1/forward/decoder.layers.0")
made.free(kept)
read_snapshot(made.write(tmp_path))
"""

import pickle
from pathlib import Path

LOSS = [
    {"filename": "/site-packages/torch/nn/functional.py", "line": 3500, "name": "cross_entropy"},
    {"filename": "model.py", "line": 90, "name": "forward"},
]


class MadeSnapshot:
    """Each allocation has a segment of its own, which goes when it is freed, unless it is put into one (`at`)."""

    def __init__(self, simulated: bool = False):
        self.events, self.marks, self._live, self._segments = [], [], {}, {}
        self._next, self._time, self._open = 2**40, 1_000_000, None
        self.settings = {"simulated": True} if simulated else {}

    def _event(self, action: str, **fields):
        self._time += 10
        self.events.append({"action": action, "stream": 0, "time_us": self._time, "frames": [], **fields})

    def segment(self, size: int) -> int:
        """Memory taken from the driver; returns its address."""
        address, self._next = self._next, self._next + 2 * size
        self._segments[address] = size
        self._event("segment_alloc", addr=address, size=size)
        return address

    def alloc(self, size: int, tag: str = "", frames=None, at: int | None = None) -> int:
        own = at is None
        address = self.segment(size) if own else at
        self._live[address] = (size, tag, frames or [], own)
        self._event("alloc", addr=address, size=size, user_metadata=tag, frames=frames or [])
        return address

    def free(self, *addresses: int):
        for address in addresses:
            size, _, _, own = self._live.pop(address)
            self._event("free_requested", addr=address, size=size)
            self._event("free_completed", addr=address, size=size)
            if own:
                del self._segments[address]
                self._event("segment_free", addr=address, size=size)

    def out_of_memory(self, size: int, free: int):
        self._event("oom", size=size, device_free=free)

    def step(self, number: int):
        """The step before ends, this one begins."""
        self.end_of_steps()
        self._open = f"ProfilerStep#{number}"
        self._mark("START")

    def end_of_steps(self):
        if self._open:
            self._mark("END")
        self._open = None

    def _mark(self, stage: str):
        self._time += 10
        self.marks.append({"stage": stage, "name": self._open, "time_us": self._time, "device": 0})

    def write(self, folder: Path, rank: int = 0) -> Path:
        self.end_of_steps()
        data = {
            "segments": [self._segment(address, size) for address, size in sorted(self._segments.items())],
            "device_traces": [self.events],
            "allocator_settings": self.settings,
            "external_annotations": self.marks,
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"snapshot_rank{rank}.pickle"
        path.write_bytes(pickle.dumps(data, protocol=4))
        return path

    def _segment(self, address: int, size: int) -> dict:
        """Its blocks fill it: live ones, and what lies between them."""
        blocks, at = [], address
        for start, (held, tag, frames, _) in sorted(self._live.items()):
            if address <= start < address + size:
                block = {"address": start, "size": held, "requested_size": held, "state": "active_allocated"}
                blocks += [*_free(at, start), block | {"frames": frames, "user_metadata": tag}]
                at = start + held
        blocks += _free(at, address + size)
        used = sum(block["size"] for block in blocks if block["state"] != "inactive")
        return {
            "device": 0, "address": address, "total_size": size, "allocated_size": used, "active_size": used, "stream": 0,
            "segment_type": "large", "is_expandable": False, "frames": [], "blocks": blocks,
        }  # fmt: skip


def _free(start: int, end: int) -> list[dict]:
    if start >= end:
        return []
    return [{"address": start, "size": end - start, "requested_size": 0, "state": "inactive", "frames": []}]
