"""Stands for a device in a walk without data, of a plan as of a script, and records its memory."""

import contextlib
from collections.abc import Iterator

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.formats.hardware import CUBLAS_THREADS
from megatron_lite.formats.memory_snapshot import MemorySnapshot
from megatron_lite.instruments.memory_tags import ModuleHooks, StepMarks
from megatron_lite.instruments.memory_tracker import StorageTracker
from megatron_lite.planner.walk.kernels import InPlaceGradients, replace_kernels

MAX_WALK_EVENTS = 10_000_000
SIMULATED = "rehearsed without data; addresses and segments are where CUDA's caching allocator would put them"


class WithoutData(FakeTensorMode):
    """FakeTensorMode in which operations fail that torch has no rule for.

    torch would run them on real memory of the same size.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)

    def __deepcopy__(self, memo: dict[int, object]) -> "WithoutData":
        # copies of a tensor belong to its mode, too
        return self


@contextlib.contextmanager
def stand_for_device(device: str, key: str, mode: TorchDispatchMode) -> Iterator[None]:
    """Inside the block, operations have no data, and are those of a device.

    Args:
        device: cuda or cpu.
        key: Where torch takes operations of its tensors apart: that of autograd.
        mode: Drops the data.
    """
    with replace_kernels(device, key), mode, InPlaceGradients(device):
        yield


class WalkRecording:
    """Records what a walk allocates.

    Args:
        place: Where the walk is.
        tracker: Sees allocations of the device.
    """

    def __init__(self, place: StepMarks, tracker: StorageTracker) -> None:
        self._tracker = tracker
        self._hooks = ModuleHooks(place, in_backward=False)

    def start(self) -> None:
        """Start, inside of all modes that change what is allocated."""
        self._tracker.start()
        self._hooks.attach()

    def add_workspaces(self, workspace_bytes: int, cublaslt_bytes: int = 0) -> None:
        """Record what cuBLAS takes for itself and keeps.

        Args:
            workspace_bytes: Size of one of its workspaces.
            cublaslt_bytes: What cuBLASLt takes beside them.
        """
        for _ in range(CUBLAS_THREADS):
            self._tracker.add_unseen("cublasWorkspace", workspace_bytes)
        if cublaslt_bytes:
            self._tracker.add_unseen("cublasLtWorkspace", cublaslt_bytes)

    def stop(self) -> None:
        """Stop recording allocations. Frees of recorded ones are still noticed."""
        self._hooks.detach()
        self._tracker.stop()

    def take_snapshot(self) -> MemorySnapshot:
        """Take the snapshot of all that was recorded.

        Raises:
            Exception: What went wrong while recording.
        """
        snapshot = self._tracker.snapshot()
        if self._tracker.failure is not None:
            raise self._tracker.failure
        snapshot["allocator_settings"]["simulated"] = SIMULATED
        return snapshot
