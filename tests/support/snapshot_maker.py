"""Makes small memory snapshots in the form of torch.cuda.memory._snapshot(), with known answers. Sizes: bytes.

made = MadeSnapshot()
weight = made.alloc(2**30, "setup")
made.step(1); kept = made.alloc(2**20, "step 1/forward/decoder.layers.0")
made.free(kept)
read_snapshot(made.write(tmp_path))
"""

import pickle
from pathlib import Path

BASE = 0x7F0000000000


def frames(*names: str) -> list[dict]:
    """'gpt.py:81 forward' -> a frame; innermost first. One without a line is a C++ frame."""
    found = []
    for name in names:
        place, _, function = name.partition(" ")
        file, _, line = place.rpartition(":") if function else ("??", "", "0")
        found.append({"filename": file, "line": int(line), "name": function or place})
    return found


LOSS = frames("/site-packages/torch/nn/functional.py:3500 cross_entropy", "model.py:90 forward")
TRAIN = "/home/me/train.py:40 main"
CALL = "/venv/site-packages/torch/nn/modules/module.py:1776 _call_impl"
BACKWARD = frames("torch::autograd::Engine::evaluate_function(...)")
STEP = frames("/venv/site-packages/torch/optim/adamw.py:200 step", TRAIN)
INIT = frames("/home/me/model.py:1 __init__", TRAIN)


def forward_stack(line: int, name: str = "forward") -> list[dict]:
    return frames(f"/home/me/model.py:{line} {name}", CALL, "/home/me/model.py:90 forward", TRAIN)


def round_up(size: int) -> int:
    return -(-size // 512) * 512


class MadeSnapshot:
    """Events 10 us apart. Each allocation has a segment of its own, which goes when it is freed, unless it is put into one
    (`at`). With `reserved` all share a segment of that size, which was there before."""

    def __init__(self, reserved: int = 0, **settings):
        self.events, self.marks, self.settings, self.reserved = [], [], settings, reserved
        self._live, self._segments, self._next, self._time, self._open = {}, {}, BASE, 1_000_000, None
        self._pools, self._awaiting = {}, set()

    def now(self) -> int:
        self._time += 10
        return self._time

    def add(self, action: str, **fields):
        """An event."""
        self.events.append({"action": action, "stream": 0, "time_us": self.now(), "frames": [], **fields})

    def segment(self, size: int, pool: tuple[int, int] = (0, 0)) -> int:
        """Memory taken from the driver; returns its address."""
        address, self._next = self._next, self._next + 2 * size
        self._segments[address] = size
        self._pools[address] = pool
        self.add("segment_alloc", addr=address, size=size)
        return address

    def there_before(self, size: int, tag: str = "", frames=()) -> int:
        """Memory from before the record, where all is `reserved`; returns its address."""
        address, self._next = self._next, self._next + round_up(size)
        self._live[address] = size, tag, list(frames or ()), False
        return address

    def alloc(self, size: int, tag: str = "", frames=(), at: int | None = None) -> int:
        if self.reserved:
            address = self.there_before(size, tag, frames)
        else:
            address = self.segment(size) if at is None else at
            self._live[address] = size, tag, list(frames or ()), at is None
        self.add("alloc", addr=address, size=size, user_metadata=tag, frames=list(frames or ()))
        return address

    def free(self, *addresses: int, frames=()):
        for address in addresses:
            size, _, _, own = self._live.pop(address)
            for action in ("free_requested", "free_completed"):
                self.add(action, addr=address, size=size, frames=list(frames or ()))
            if own:
                del self._segments[address]
                self.add("segment_free", addr=address, size=size)

    def give_back(self, *addresses: int):
        """The program drops what another stream may still use: its free is requested, and does not happen yet."""
        for address in addresses:
            self._awaiting.add(address)
            self.add("free_requested", addr=address, size=self._live[address][0])

    def complete(self, *addresses: int):
        """The free of what was given back."""
        for address in addresses:
            size, _, _, own = self._live.pop(address)
            self._awaiting.discard(address)
            self.add("free_completed", addr=address, size=size)
            if own:
                del self._segments[address]
                self.add("segment_free", addr=address, size=size)

    def out_of_memory(self, size: int, free: int, frames=()):
        self.add("oom", size=size, device_free=free, frames=list(frames or ()))

    def mark(self, stage: str, name: str):
        self.marks.append({"stage": stage, "name": name, "device": 0, "time_us": self.now()})

    def step(self, number: int):
        """The step before ends, this one begins."""
        self.end_of_steps()
        self._open = f"ProfilerStep#{number}"
        self.mark("START", self._open)

    def end_of_steps(self):
        if self._open:
            self.mark("END", self._open)
        self._open = None

    def data(self) -> dict:
        self.end_of_steps()
        segments = self._segments | ({BASE: self.reserved} if self.reserved else {})
        return {
            "segments": [self._segment(address, size) for address, size in sorted(segments.items())],
            "device_traces": [self.events], "allocator_settings": self.settings, "external_annotations": self.marks,
        }  # fmt: skip

    def write(self, folder: Path, rank: int = 0) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        return write(self.data(), folder / f"snapshot_rank{rank}.pickle")

    def _segment(self, address: int, size: int) -> dict:
        """Its blocks fill it: live ones, and what lies between them."""
        blocks, at = [], address
        for start, (held, tag, stack, _) in [*sorted(self._live.items()), (address + size, (0, "", [], False))]:
            if address <= start <= address + size:
                free = {"address": at, "size": start - at, "requested_size": 0, "state": "inactive", "frames": []}
                state = "active_awaiting_free" if start in self._awaiting else "active_allocated"
                live = {"address": start, "size": round_up(held), "requested_size": held, "state": state}
                blocks += [
                    block for block in (free, live | {"frames": stack, "user_metadata": tag}) if block["size"] > 0
                ]
                at = start + round_up(held)
        used = sum(block["size"] for block in blocks if block["state"] != "inactive")
        return {
            "device": 0, "address": address, "total_size": size, "allocated_size": used, "active_size": used, "stream": 0,
            "segment_type": "large", "is_expandable": False, "frames": [], "blocks": blocks,
            "segment_pool_id": self._pools.get(address, (0, 0)),
        }  # fmt: skip


def write(data, path: Path) -> Path:
    path.write_bytes(pickle.dumps(data, protocol=4))
    return path


def training(steps: int = 1, leak: int = 0, layers: int = 3) -> MadeSnapshot:
    """A model of `layers` weights of 1 MiB, made before the record without stacks, trained with Adam, whose state is there
    too; activations of 4 MiB and a temporary per layer, logits of 8 MiB. `leak`: bytes kept by each step."""
    mib, made = 2**20, MadeSnapshot(2**30)
    for _ in range(layers * 3):
        made.there_before(mib)
    for _ in range(steps):
        kept = []
        for _ in range(layers):
            temporary = made.alloc(2 * mib, frames=forward_stack(12))
            kept.append(made.alloc(4 * mib, frames=forward_stack(13)))
            made.free(temporary, frames=forward_stack(13))
        if leak:
            made.alloc(leak, frames=forward_stack(77))
        kept.append(made.alloc(8 * mib, frames=forward_stack(60, "cross_entropy")))
        gradients = []
        for activation in reversed(kept):
            made.free(activation, frames=BACKWARD)
            if len(gradients) < layers:
                gradients.append(made.alloc(mib, frames=BACKWARD))
        made.free(made.alloc(3 * mib, frames=STEP), frames=STEP)
        made.free(*gradients, frames=frames("/venv/site-packages/torch/optim/optimizer.py:900 zero_grad", TRAIN))
    return made
