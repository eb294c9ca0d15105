"""Walks any model and training step with tensors that have shapes but no data, and writes down every allocation."""

from collections.abc import Callable

from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_lite.estimate.cublas import CUBLAS_WORKSPACE, THREADS_WITH_CUBLAS
from megatron_lite.instruments.memory_place import ModuleHooks, Place
from megatron_lite.instruments.memory_tracker import StorageTracker
from megatron_lite.rehearsal.kernels import InPlaceGradients, kernels_of

MOST_EVENTS = 10_000_000
SIMULATED = "rehearsed without data; addresses and segments are where CUDA's caching allocator would put them"


def _no_data() -> FakeTensorMode:
    """Operations that torch has no rule for fail; it would run them on real memory of the same size."""
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


def walk(prepare: Callable[[], Callable], steps: int, device: str, workspace: int = CUBLAS_WORKSPACE) -> dict:
    """A snapshot in the form of torch.cuda.memory._snapshot() of `steps` training steps as on `device`, cuda or cpu.

    prepare() makes model and optimizer, and returns the step: step(phase), where `with phase(Phase.FORWARD):` marks its
    parts. Both must take "cpu" for the device. workspace: bytes of each cuBLAS workspace, on cuda.
    """
    place = Place()
    tracker, hooks = StorageTracker(place, MOST_EVENTS), ModuleHooks(place, in_backward=False)
    with kernels_of(device), _no_data(), InPlaceGradients(device):
        tracker.start()
        hooks.attach()
        try:
            step = prepare()
            for _ in range(THREADS_WITH_CUBLAS if device == "cuda" else 0):
                tracker.add_unseen("cublasWorkspace", workspace)
            for number in range(1, steps + 1):
                place.begin(number)
                tracker.begin_step()
                step(place.phase)
                place.end(number)
        finally:
            hooks.detach()
            tracker.stop()
        snapshot = tracker.snapshot()  # before the model is let go of
    if tracker.failure is not None:
        raise tracker.failure
    snapshot["allocator_settings"]["simulated"] = SIMULATED
    return snapshot
