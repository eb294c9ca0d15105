"""torch.profiler over the profiled window: one trace per profiled rank, where TensorBoard looks for it."""

import socket
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_lite.instruments.base import Instrument


class TorchProfiler(Instrument):
    """Records the steps of `window`. What was recorded is written also when the run ends inside it."""

    def __init__(self, window: range, folder: Path, rank: int, shapes: bool, stacks: bool, tell):
        self.window, self.folder, self.rank, self._tell = window, folder, rank, tell
        self._options = {"record_shapes": shapes, "with_stack": stacks}
        self._profiler: profile | None = None
        self._last = 0

    def begin(self, step: int):
        if step == self.window.start:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
                torch.cuda.synchronize()  # kernels of earlier steps are not the window's
            self._profiler = profile(activities=activities, **self._options)
            self._profiler.start()
        if self._profiler is not None:
            self._last = step
            self._step_span = record_function(f"ProfilerStep#{step}")
            self._step_span.__enter__()

    def end(self, step: int):
        if self._profiler is None:
            return
        self._step_span.__exit__(None, None, None)
        if step == self.window.stop - 1:
            self._write()

    def close(self, error: BaseException | None):
        # a profiler that is still on at interpreter exit crashes the process
        if self._profiler is not None:
            self._write()

    def phase(self, name):
        return record_function(str(name)) if self._profiler is not None else None

    def _write(self):
        profiler, self._profiler = self._profiler, None
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the window's kernels must have run before recording ends
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"{socket.gethostname()}_rank{self.rank}.{time.time_ns()}.pt.trace.json"
        profiler.export_chrome_trace(str(self.folder / name))
        steps = f"{self.window.start}-{self._last}" if self._last > self.window.start else str(self._last)
        self._tell(f"profiled steps {steps} of rank {self.rank}: {self.folder / name}")
