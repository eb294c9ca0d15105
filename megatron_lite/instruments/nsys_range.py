"""Marks the profiled window for Nsight Systems: where its collection starts and ends,
and the steps and phases inside."""

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import distributed as dist

from megatron_lite.config.args import ProfileArgs
from megatron_lite.config.world import World
from megatron_lite.instruments.base import Instrument, Tell, Window

CAPTURE = "profile"  # what `nsys profile --capture-range=nvtx --nvtx-capture=profile` waits for
SECONDS_FOR_NEIGHBORS = 5


class Nvtx(Protocol):
    """NVTX ranges and marks in the default domain, which a tool around this process records."""

    def push(self, text: str, /) -> object:
        """Called where a range begins."""

    def pop(self) -> object:
        """Called where the innermost range ends."""

    def mark(self, text: str, /) -> object:
        """Called at a moment that is to be found in the record."""


class TorchNvtx:
    """NVTX ranges and marks of torch's CUDA build, in the default domain."""

    push = staticmethod(torch.cuda.nvtx.range_push)
    pop = staticmethod(torch.cuda.nvtx.range_pop)
    mark = staticmethod(torch.cuda.nvtx.mark)


class PackageNvtx:
    """NVTX ranges and marks of NVIDIA's package `nvtx`, for processes without CUDA.

    Its texts are registered strings.
    """

    push: Callable[[str], object]
    mark: Callable[[str], object]
    pop: Callable[[], object]

    def __init__(self) -> None:
        import nvtx

        domain = nvtx.get_domain(None)
        if type(domain).__name__ != "DummyDomain":
            self.push = nvtx.push_range
            self.mark = nvtx.mark
            self.pop = nvtx.pop_range
            return
        # nvtx >= 0.2.12 asks the tool by a function that nsys of 2022 to 2024 does not serve, takes the domain for
        # switched off and drops every range silently, although the ranges themselves would be recorded
        from nvtx._lib.lib import DomainHandle

        domain = object.__new__(nvtx.Domain)
        domain.handle = DomainHandle(None)
        domain.__init__(None)
        self.push = lambda text: domain.push_range(domain.get_event_attributes(message=text))
        self.mark = lambda text: domain.mark(domain.get_event_attributes(message=text))
        self.pop = domain.pop_range


def choose_nvtx(on_gpu: bool) -> Nvtx:
    """Choose the implementation of NVTX that works in this process.

    Raises RuntimeError, with the remedy, if there is none.
    """
    if on_gpu:
        return TorchNvtx()
    try:
        return PackageNvtx()
    except ImportError:
        if hasattr(torch._C, "_nvtx"):  # a CUDA build that trains on the CPU
            return TorchNvtx()
        remedy = "the package nvtx is missing, without which a CPU run has no ranges; pip install nvtx"
        raise RuntimeError(remedy) from None


class NsysRange(Instrument):
    """Marks the window by the NVTX range CAPTURE and, on a GPU, cudaProfilerStart and cudaProfilerStop.

    Inside it each step and phase is a range, and with --record-shapes each operator with its input shapes. Windows on
    demand are not marked: torch.profiler records those.

    Args:
        window: The profiled steps.
        profile: The flags of profiling.
        world: The job's processes, one per rank, and this one's place among them.
        tell: Called with each line for the console.
    """

    def __init__(self, window: Window, profile: ProfileArgs, world: World, tell: Tell) -> None:
        self.window = window
        self._world = world
        self._tell = tell
        self._on_gpu = world.gpus > 0
        self._all_steps = profile.nvtx_ranges
        self._operators = profile.record_shapes
        first = world.rank - world.local_rank
        of_this_node = {*range(first, first + world.local_size)}
        self._neighbors = world.select_ranks(profile.profile_ranks) & of_this_node - {world.rank}
        self._capture: contextlib.ExitStack | None = None
        self._step = 0
        self._in_step = False

    def open(self) -> None:
        self._nvtx = choose_nvtx(self._on_gpu)
        if self._operators and not self._on_gpu:
            self._tell("note: --record-shapes: torch names operators for Nsight Systems on GPUs only; left out here")
            self._operators = False

    def begin(self, step: int) -> None:
        if self.window.opens(step) and not self.window.on_demand:  # nsys was told to collect once, the planned window
            self._start()
        if self._all_steps or self._capture is not None:
            self._nvtx.push(f"step {step}")
            self._step = step
            self._in_step = True

    def begin_phase(self, name: str) -> None:
        if self._in_step:
            self._nvtx.push(name)

    def end_phase(self, name: str, failed: bool) -> None:
        if self._in_step:
            self._nvtx.pop()

    def end(self, step: int) -> None:
        self._leave_step()
        if self._capture is not None and self.window.closes(step):
            if self._neighbors and dist.is_initialized():
                self._wait_for_neighbors()
            self._stop()

    def close(self, error: BaseException | None) -> None:
        self._leave_step()
        self._stop()

    def _start(self) -> None:
        with contextlib.ExitStack() as capture:  # undone from its end, and also if its beginning fails halfway
            if self._on_gpu:
                torch.cuda.synchronize()  # kernels of earlier steps are not the window's
                torch.cuda.profiler.start()
                capture.callback(torch.cuda.profiler.stop)
            self._nvtx.push(CAPTURE)
            capture.callback(self._nvtx.pop)
            if self._on_gpu:
                capture.callback(torch.cuda.synchronize)  # the window's kernels must have run before it ends
            # nothing else in a report names the rank
            self._nvtx.mark(f"rank {self._world.rank} of {self._world.size}, window: {self.window.words()}")
            if self._operators:
                capture.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))
            self._capture = capture.pop_all()

    def _leave_step(self) -> None:
        if self._in_step:
            self._in_step = False
            self._nvtx.pop()

    def _stop(self) -> None:
        if self._capture is None:
            return
        capture = self._capture
        self._capture = None
        capture.close()
        lost = "" if self._world.under_nsys else "; this run is not under nsys, which would have recorded them"
        self._tell(f"marked for Nsight Systems: {self.window.words(self._step)}, rank {self._world.rank}{lost}")

    def _wait_for_neighbors(self) -> None:
        """Wait until the other profiled ranks of this node have left the window, too.

        nsys ends its collection on a node when the first rank leaves the range: the last phases of the others would be
        lost. No collective: who does not come is not waited for long.
        """
        if self._on_gpu:
            torch.cuda.synchronize()  # a rank has left when its own kernels have run
        store = dist.distributed_c10d._get_default_store()
        left = f"left the nsys range after step {self._step}/"
        store.set(f"{left}{self._world.rank}", "")
        deadline = time.monotonic() + SECONDS_FOR_NEIGHBORS
        while not store.check([f"{left}{rank}" for rank in self._neighbors]) and time.monotonic() < deadline:
            time.sleep(0.005)
