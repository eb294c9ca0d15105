"""The CUDA allocator's history, as a snapshot for pytorch.org/memory_viz. GPUs only."""

import pickle
from pathlib import Path

import torch

from megatron_lite.instruments.base import Instrument

MAX_ENTRIES = 100_000  # allocations and frees that are kept, the newest ones


class MemoryHistory(Instrument):
    """Records from before the model is built; writes at the window's end, at the run's end, or when memory runs out."""

    def __init__(self, window: range, path: Path, tell):
        self.window, self.path, self._tell = window, path, tell
        self._recording = False

    def open(self):
        torch.cuda.memory._record_memory_history(
            enabled="all", context="all", stacks="python", max_entries=MAX_ENTRIES
        )
        self._recording = True

    def end(self, step: int):
        if step == self.window.stop - 1:
            self._write()

    def close(self, error: BaseException | None):
        self._write()

    def _write(self):
        if not self._recording:
            return
        self._recording = False
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "wb") as file:
            pickle.dump(snapshot, file, protocol=4)  # the viewer in the browser reads no newer protocol
        self._tell(f"memory snapshot: {self.path}")
