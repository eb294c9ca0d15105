"""Makes small memory snapshots in torch's form, with known answers."""

import pickle
from pathlib import Path

BASE = 0x7F0000000000
SEGMENT = 2**40  # one, large enough for every made snapshot; `reserved` says how much of it counts


def frames(*names: str) -> list[dict]:
    """'gpt.py:81 forward' -> a frame; innermost first. One without a line is a C++ frame."""
    found = []
    for name in names:
        place, _, function = name.partition(" ")
        file, _, line = place.rpartition(":") if function else ("??", "", "0")
        found.append({"filename": file, "line": int(line), "name": function or place})
    return found


TRAIN = "/home/me/train.py:40 main"
CALL = "/venv/site-packages/torch/nn/modules/module.py:1776 _call_impl"
BACKWARD = frames("torch::autograd::Engine::evaluate_function(...)")
STEP = ("/venv/site-packages/torch/optim/adamw.py:200 step", TRAIN)


def forward_stack(line: int, name: str = "forward") -> list[dict]:
    return frames(f"/home/me/model.py:{line} {name}", CALL, "/home/me/model.py:90 forward", TRAIN)


class MadeSnapshot:
    """Allocations and frees of one device, one after another, 10 us apart."""

    def __init__(self, reserved: int = 2**30, **settings):
        self.events, self.annotations, self.before, self.live = [], [], [], {}
        self.reserved, self.settings, self._next, self._clock = reserved, settings, BASE, 1_000_000

    def now(self) -> int:
        self._clock += 10
        return self._clock

    def there_before(self, size: int, stack=(), tag: str = "") -> int:
        """Memory from before the record; returns its address."""
        self._next += -(-size // 512) * 512
        self.live[self._next] = (size, list(stack), tag)
        return self._next

    def alloc(self, size: int, stack=(), tag: str = "") -> int:
        address = self.there_before(size, stack, tag)
        self._event("alloc", addr=address, size=size, frames=list(stack), user_metadata=tag)
        return address

    def free(self, address: int, stack=(), tag: str = ""):
        size, *_ = self.live.pop(address)
        for action in ("free_requested", "free_completed"):
            self._event(action, addr=address, size=size, frames=list(stack), user_metadata=tag)

    def out_of_memory(self, size: int, device_free: int, stack=()):
        self._event("oom", size=size, device_free=device_free, frames=list(stack))

    def mark(self, stage: str, name: str):
        self.annotations.append({"stage": stage, "name": name, "device": 0, "time_us": self.now()})

    def data(self) -> dict:
        blocks = [
            {
                "address": address, "size": -(-size // 512) * 512, "requested_size": size, "state": "active_allocated",
                "frames": stack, "user_metadata": tag,
            }
            for address, (size, stack, tag) in self.live.items()
        ]  # fmt: skip
        segment = {"device": 0, "address": BASE, "total_size": self.reserved, "stream": 0, "segment_type": "large"}
        return {
            "segments": [segment | {"blocks": blocks}], "device_traces": [self.events],
            "allocator_settings": self.settings, "external_annotations": self.annotations,
        }  # fmt: skip

    def write(self, path: Path) -> Path:
        return write(self.data(), path)

    def _event(self, action: str, **fields):
        self.events.append({"action": action, "stream": 0, "time_us": self.now(), **fields})


def write(data, path: Path) -> Path:
    path.write_bytes(pickle.dumps(data, protocol=4))
    return path


def training(steps: int = 1, leak: int = 0, layers: int = 3) -> MadeSnapshot:
    """A model of `layers` weights of 1 MiB, made before the record without stacks, trained with Adam, whose state is there
    too; activations of 4 MiB and a temporary per layer, logits of 8 MiB. `leak`: bytes kept by each step."""
    mib, made = 2**20, MadeSnapshot()
    for _ in range(layers * 3):
        made.there_before(mib)
    for _ in range(steps):
        kept = []
        for _ in range(layers):
            temporary = made.alloc(2 * mib, forward_stack(12))
            kept.append(made.alloc(4 * mib, forward_stack(13)))
            made.free(temporary, forward_stack(13))
        if leak:
            made.alloc(leak, forward_stack(77))
        kept.append(made.alloc(8 * mib, forward_stack(60, "cross_entropy")))
        gradients = []
        for activation in reversed(kept):
            made.free(activation, BACKWARD)
            if len(gradients) < layers:
                gradients.append(made.alloc(mib, BACKWARD))
        temporary = made.alloc(3 * mib, frames(*STEP))
        made.free(temporary, frames(*STEP))
        for gradient in gradients:
            made.free(gradient, frames("/venv/site-packages/torch/optim/optimizer.py:900 zero_grad", TRAIN))
    return made
