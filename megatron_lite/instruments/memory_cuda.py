"""What torch's CUDA allocator records by itself, and how it is asked for it. GPUs only."""

import torch

from megatron_lite.instruments.memory_form import annotations
from megatron_lite.instruments.memory_oom import Shortage
from megatron_lite.instruments.memory_place import ModuleHooks, Place

OUTSIDE = 100_000  # events kept before and after the window, for the story of an out-of-memory there


class CudaRecorder:
    """Records from before the first parameter to the end of the run. In the window the ring holds `most` events.

    The history is cleared when the window opens, so that the snapshot shows it and nothing else; blocks allocated before
    carry their stacks all the same. Allocations of the window are tagged with step, phase and module.
    """

    def __init__(self, most: int):
        self._most = most
        # per thread, and without effect on allocators other than torch's own
        tell = getattr(torch.cuda.memory, "_set_memory_metadata", None)
        self.place = Place(tell)
        self._hooks = ModuleHooks(self.place, in_backward=tell is not None)
        self._full_at = OUTSIDE

    def open(self):
        self._record(min(OUTSIDE, self._most))

    def begin_step(self):
        """Nothing to do: the allocator records by itself."""

    def pause(self):
        """Recording goes on: memory may run out in any step."""

    def open_window(self):
        self._record(self._most, stacks_of="all")
        self._hooks.attach()

    def close_window(self):
        self._hooks.detach()
        self._record(min(OUTSIDE, self._most))

    def close(self):
        self._hooks.detach()
        torch.cuda.memory._record_memory_history(enabled=None)

    def end_step(self):
        """Nothing to do: what the run's end frees is recorded too."""

    def snapshot(self, of_last_step: bool = False) -> tuple[dict, bool]:
        """(the snapshot, whether the ring had to drop events that belong to it). Always of now."""
        taken = torch.cuda.memory._snapshot()
        device = torch.cuda.current_device()
        taken["external_annotations"] = [
            *taken.get("external_annotations", ()),
            *annotations(self.place.marks, device),
        ]
        return taken, len(taken["device_traces"][device]) >= self._full_at

    @property
    def failure(self) -> Exception | None:
        """None: what the allocator records does not fail."""
        return None

    def watch_for_shortage(self, observe):
        """Call `observe` with a Shortage at every allocation that fails, on whatever thread that is."""

        def failed(device: int, asked: int, total: int, free: int):
            observe(Shortage(asked, free, total, torch.cuda.memory_reserved(device)))

        torch.cuda.init()  # older allocators crash on an observer that comes before
        torch._C._cuda_attach_out_of_memory_observer(failed)

    def shortage(self, asked: int | None) -> Shortage:
        """Now."""
        free, total = torch.cuda.mem_get_info()
        return Shortage(asked, free, total, torch.cuda.memory_reserved())

    @property
    def number(self) -> int:
        """Of the device in the snapshot."""
        return torch.cuda.current_device()

    def _record(self, most: int, stacks_of: str = "alloc"):
        """stacks_of: "alloc", or with those of frees, which nobody reads outside of the window, "all"."""
        # C++ frames would make a snapshot take minutes instead of seconds
        torch.cuda.memory._record_memory_history(
            enabled="all", context=stacks_of, stacks="python", max_entries=most, clear_history=True
        )
        self._full_at = most
