"""A Chakra execution trace of the window: operators as a graph, for simulators and replay."""

import contextlib
import os
from pathlib import Path

from torch.profiler import ExecutionTraceObserver

from megatron_lite.instruments.quiet import without_notes
from megatron_lite.instruments.trace_file import write_whole


class ChakraTrace:
    """torch writes it while it records, so it is recorded under a hidden name.

    It lies in a folder of its own: readers of Kineto's traces take every .json beside them for one.
    """

    def __init__(self, folder: Path, worker: str):
        self._path = folder / "chakra" / f"{worker}.et.json"
        self._recording = self._path.with_name(f".{worker}.recording.json")
        self._recording.parent.mkdir(parents=True, exist_ok=True)
        self.observer = ExecutionTraceObserver().register_callback(str(self._recording))  # the profiler starts it

    def write(self, compress: bool | None) -> str:
        """Give the trace its name; returns what to say of it. LostFile if the disk is full, or the like."""
        self._end()
        path, _ = write_whole(self._path, lambda hidden: os.replace(self._recording, hidden), compress)
        return f"Chakra execution trace: {path}"

    def drop(self):
        """Leave nothing behind."""
        self._end()
        with contextlib.suppress(OSError):
            self._recording.unlink()

    def _end(self):
        with without_notes():
            self.observer.unregister_callback()
