"""The range that `nsys profile --capture-range=cudaProfilerApi` waits for. GPUs only."""

import torch

from megatron_lite.instruments.base import Instrument


class NsysRange(Instrument):
    """cudaProfilerStart before the window's first step, cudaProfilerStop after its last; NVTX ranges inside."""

    def __init__(self, window: range, phases: bool, operators: bool):
        self.window, self.phases, self._operators = window, phases, operators
        self._open = False
        self._emit = None

    def begin(self, step: int):
        if step == self.window.start:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            self._open = True
            if self._operators:
                self._emit = torch.autograd.profiler.emit_nvtx(record_shapes=True)
                self._emit.__enter__()
        if self._open:
            torch.cuda.nvtx.range_push(f"step {step}")

    def end(self, step: int):
        if self._open:
            torch.cuda.nvtx.range_pop()
        if step == self.window.stop - 1:
            self.close(None)

    def close(self, error: BaseException | None):
        if not self._open:
            return
        self._open = False
        torch.cuda.synchronize()
        if self._emit is not None:
            self._emit.__exit__(None, None, None)
        torch.cuda.cudart().cudaProfilerStop()

    def phase(self, name):
        return torch.cuda.nvtx.range(str(name)) if self._open and self.phases else None
