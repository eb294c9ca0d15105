"""What a script asks of torch.cuda, answered as the named GPU would answer.

Memory is that of the walk: what torch.cuda.memory_allocated() returns is what the script holds at that moment.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.instruments.replacing import put_in_place

GPU = torch.device("cuda", 0)
LOCAL_RANKS = "LOCAL_WORLD_SIZE"  # torchrun's variable
HAS_BF16 = (8, 0)  # compute capability of the first GPUs with bf16 and TF32
SETTERS_OF_RANDOM_STATES = (
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
)
RANDOM_STATE_BYTES = 16  # of torch's generator on a GPU


class MemoryMeter(Protocol):
    """Knows the memory of the device at this moment, in bytes."""

    def count_allocated(self) -> int:
        """Called when a script asks for what its tensors hold."""

    def count_peak(self) -> int:
        """Called when a script asks for the most that its tensors held."""


@dataclass(frozen=True)
class GpuProperties:
    """What torch.cuda.get_device_properties returns, under torch's names."""

    name: str
    major: int  # of the compute capability, as is minor
    minor: int
    total_memory: int  # bytes
    # of an H100; scripts choose sizes of blocks by these, and no tensor of a step
    multi_processor_count: int = 132
    max_threads_per_multi_processor: int = 2048
    L2_cache_size: int = 50 * 2**20
    warp_size: int = 32
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    gcnArchName: str = ""
    uuid: str = "GPU-0"


class FakeStream:
    """A stream of the device, on which nothing runs."""

    cuda_stream = 0
    device = GPU

    def __init__(self, *arguments: object, **named: object) -> None:
        """Take any arguments of torch.cuda.Stream."""

    def __enter__(self) -> "FakeStream":  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *error: object) -> None:
        """Change nothing back."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait_stream(self, stream: object) -> None:
        """Wait for nothing."""

    def wait_event(self, event: object) -> None:
        """Wait for nothing."""

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        return event or FakeEvent()

    def query(self) -> bool:
        return True


class FakeEvent:
    """An event of the device, which has always happened."""

    def __init__(self, *arguments: object, **named: object) -> None:
        """Take any arguments of torch.cuda.Event."""

    def record(self, stream: object = None) -> None:
        """Mark nothing."""

    def wait(self, stream: object = None) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "FakeEvent") -> float:
        """Return 1 ms: nothing was measured, and scripts divide by it."""
        return 1.0


class FakeDevices:
    """The GPUs of a machine, all alike, of which each rank uses one.

    Args:
        count: How many there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.current = 0
        self.is_used = False  # torch's meshes choose this rank's GPU where none was used before

    def set_current(self, device: object) -> None:
        """Let another be the current one.

        Args:
            device: As torch.cuda.set_device takes it: a number, a torch.device or its name; below 0, nothing changes.
        """
        index = device if isinstance(device, int) else torch.device(str(device)).index
        if index is not None and index >= 0:
            self.current = index
        self.begin_use()

    def begin_use(self) -> None:
        """Note the first use of a GPU. Called by torch wherever it uses one."""
        self.is_used = True

    @contextlib.contextmanager
    def use(self, device: object) -> Iterator[None]:
        """Inside the block, another is the current one."""
        before = self.current
        self.set_current(device)
        try:
            yield
        finally:
            self.current = before


def answer_as(name: str, capability: tuple[int, int], total_bytes: int, meter: MemoryMeter) -> None:
    """Let torch.cuda answer as on a machine with such GPUs, for the rest of the process.

    There are as many as torchrun has started ranks on the machine, or one.

    Args:
        name: As torch.cuda.get_device_name gives it.
        capability: The GPU's compute capability.
        total_bytes: Its memory.
        meter: Knows how much of it is used.
    """
    properties = GpuProperties(name, *capability, total_bytes)
    devices = FakeDevices(int(os.environ.get(LOCAL_RANKS, "1")))
    answers = {
        **_describe_device(properties),
        **_describe_devices(devices),
        **_make_random_answers(),
        **_make_memory_answers(total_bytes, meter),
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": lambda stream=None: contextlib.nullcontext(stream),
        "current_stream": lambda device=None: FakeStream(),
        "default_stream": lambda device=None: FakeStream(),
        "device": devices.use,
        "device_of": lambda tensor: devices.use(tensor.get_device()),
    }
    for attribute, value in answers.items():
        put_in_place(torch.cuda, attribute, value)
    # torch's own code calls them where they are defined
    for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        for attribute in set(answers) & set(vars(module)):
            put_in_place(module, attribute, answers[attribute])
    # memory of the host that a GPU reads directly is memory of the host
    put_in_place(Tensor, "pin_memory", lambda tensor, *arguments, **named: tensor)
    put_in_place(Tensor, "is_pinned", lambda tensor, *arguments: False)
    put_in_place(Tensor, "record_stream", lambda tensor, stream: None)


def _answer(value: object) -> Callable[..., object]:
    """Make a function that takes anything and returns the value: one for each name, as torch.compile's tables want."""
    return lambda *arguments, **named: value


def _describe_device(properties: GpuProperties) -> dict[str, object]:
    """Answer what the device is, and that it is ready."""
    capability = (properties.major, properties.minor)
    return {
        "is_available": _answer(True),
        "_is_in_bad_fork": _answer(False),
        "get_device_name": _answer(properties.name),
        "get_device_capability": _answer(capability),
        "get_device_properties": _answer(properties),
        "get_arch_list": _answer([f"sm_{properties.major}{properties.minor}"]),
        "is_bf16_supported": _answer(capability >= HAS_BF16),
        "is_tf32_supported": _answer(capability >= HAS_BF16),
        "can_device_access_peer": _answer(False),
        "is_current_stream_capturing": _answer(False),
        "synchronize": _answer(None),
        "utilization": _answer(0),
    }


def _describe_devices(devices: FakeDevices) -> dict[str, object]:
    """Answer how many devices there are, and which is the current one."""
    return {
        "device_count": lambda: devices.count,
        "current_device": lambda: devices.current,
        "set_device": devices.set_current,
        "is_initialized": lambda: devices.is_used,
        "_lazy_init": devices.begin_use,
        "init": devices.begin_use,
    }


def _make_random_answers() -> dict[str, object]:
    """Answer about random states: nothing is drawn on the device."""
    state = torch.zeros(RANDOM_STATE_BYTES, dtype=torch.uint8)
    answers: dict[str, object] = {name: _answer(None) for name in SETTERS_OF_RANDOM_STATES}
    answers["initial_seed"] = _answer(0)
    answers["get_rng_state"] = _answer(state)
    answers["get_rng_state_all"] = _answer([state])
    return answers


def _make_memory_answers(total_bytes: int, meter: MemoryMeter) -> dict[str, object]:
    """Answer about memory, of which the allocator is said to reserve what tensors hold."""

    def count_allocated(device: object = None) -> int:
        return meter.count_allocated()

    def count_peak(device: object = None) -> int:
        return meter.count_peak()

    def mem_get_info(device: object = None) -> tuple[int, int]:
        return total_bytes - meter.count_allocated(), total_bytes

    def memory_stats(device: object = None) -> dict[str, int]:
        stats = {}
        for kind in ("allocated", "reserved"):
            stats[f"{kind}_bytes.all.current"] = meter.count_allocated()
            stats[f"{kind}_bytes.all.peak"] = meter.count_peak()
        return stats

    return {
        "memory_allocated": count_allocated,
        "memory_reserved": count_allocated,
        "max_memory_allocated": count_peak,
        "max_memory_reserved": count_peak,
        "mem_get_info": mem_get_info,
        "memory_stats": memory_stats,
        "memory_summary": _answer(""),
        "reset_peak_memory_stats": _answer(None),
        "reset_max_memory_allocated": _answer(None),
        "reset_accumulated_memory_stats": _answer(None),
        "set_per_process_memory_fraction": _answer(None),
        "empty_cache": _answer(None),
        "ipc_collect": _answer(None),
    }
