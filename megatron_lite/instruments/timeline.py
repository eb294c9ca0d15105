"""Measures every step and its phases, on the host and on the GPU, and memory.

Always on; takes a few microseconds per phase.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

from megatron_lite.instruments.base import Instrument, Window
from megatron_lite.instruments.step_time import StepTime
from megatron_lite.phases import NOT_TRAINING, Phase
from megatron_lite.process_state import CoreTime

STATM = "/proc/self/statm"  # Linux only; pages: total, resident, of which backed by files, ...
PEAKS = ("allocated_bytes", "reserved_bytes")
REDUCE_WAIT = "reduce_wait"
ON_HOST_ONLY = (Phase.DATA.value, Phase.LOG.value, Phase.SAVE.value)  # the GPU gets no work in them

Key = TypeVar("Key")
Span = tuple[str, torch.cuda.Event, torch.cuda.Event]  # name of a phase, its first and its last event


class MemoryNow:
    """Host memory, and on a GPU the allocator's peak of each step, cheap enough for every step.

    Peaks are reset at every step; `stats` returns the allocator's counters as if they were not.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._statm = os.open(STATM, os.O_RDONLY) if os.path.exists(STATM) else None
        self._peaks = dict.fromkeys(PEAKS, 0)  # of the whole run

    def host_bytes(self) -> int | None:
        """Read the memory that this process holds itself; None where the system does not say.

        Pages of mapped files, such as the data's, are the page cache's.
        """
        if self._statm is None:
            return None
        resident, backed_by_files = os.pread(self._statm, 128, 0).split()[1:3]
        return (int(resident) - int(backed_by_files)) * self._page_bytes

    def peak_bytes(self) -> int | None:
        """Read the most bytes that tensors took at once since the last call; None without a GPU."""
        if not self._cuda:
            return None
        found: dict[str, dict[str, dict[str, int]]]
        found = torch.cuda.memory_stats_as_nested_dict()  # the flat form takes ten times as long
        peaks = {name: found[name]["all"]["peak"] for name in PEAKS}
        torch.cuda.reset_peak_memory_stats()
        self._peaks = {name: max(peak, peaks[name]) for name, peak in self._peaks.items()}
        return peaks["allocated_bytes"]

    def stats(self) -> dict[str, int]:
        """Read torch.cuda.memory_stats(), with the peaks of the whole run."""
        found: dict[str, int] = torch.cuda.memory_stats()
        for name, peak in self._peaks.items():
            found[f"{name}.all.peak"] = max(peak, found[f"{name}.all.peak"])
        return found

    def close(self) -> None:
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None


def _make_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _get_stream() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


class GpuTimes(Generic[Key]):
    """Measures phases on the GPU by timing events at their edges, which are read once they have passed.

    A span is the time from the GPU reaching a phase's first work on the current stream to its finishing the last; where
    the stream is idle in between, because the host is slower, that counts too. Work on other streams counts as far as
    the current one waits for it: gradients are reduced beside backward, and what of that is not hidden is part of
    backward's time.

    The host waits for nothing unless told to. Events are reused, so that there are those of a few steps only.

    Args:
        event: Makes an event; tests replace it.
        stream: Returns the stream that a step computes on; tests replace it.
    """

    def __init__(
        self,
        event: Callable[[], torch.cuda.Event] = _make_event,
        stream: Callable[[], torch.cuda.Stream] = _get_stream,
    ) -> None:
        self._make = event
        self._current_stream = stream
        self._free: list[torch.cuda.Event] = []
        self._spans: list[Span] = []  # of the running step
        # of each step that has ended: key, first and last event, spans
        self._waiting: deque[tuple[Key, torch.cuda.Event, torch.cuda.Event, list[Span]]] = deque()

    def begin(self, key: Key) -> None:
        """Begin a step.

        Args:
            key: What `arrived` yields with the step's times.
        """
        self._stream = self._current_stream()  # once: asking for it costs as much as recording
        self._key = key
        self._first = self.edge()
        self._spans = []

    def edge(self) -> torch.cuda.Event:
        """Record an event at this point of the step's stream."""
        event = self._free.pop() if self._free else self._make()
        event.record(self._stream)
        return event

    def span(self, name: str, first: torch.cuda.Event) -> None:
        """End the phase that began at the event `first`."""
        self._spans.append((name, first, self.edge()))

    def end(self) -> None:
        """End the step that `begin` began."""
        self._waiting.append((self._key, self._first, self.edge(), self._spans))

    def arrived(self, wait: bool = False) -> Iterator[tuple[Key, float, dict[str, float]]]:
        """Yield (key, seconds, {phase: seconds}) of every step that the GPU has finished, the oldest first.

        Args:
            wait: Whether to wait until the GPU has finished all that have ended. Not to be used while training.
        """
        if wait and self._waiting:
            _, _, newest, _ = self._waiting[-1]
            newest.synchronize()
        while self._waiting:
            key, began, ended, spans = self._waiting[0]
            if not ended.query():  # once it has passed, so has all before it on the same stream
                return
            self._waiting.popleft()
            phases: dict[str, float] = {}
            for name, first, last in spans:
                phases[name] = phases.get(name, 0.0) + first.elapsed_time(last) / 1000
                self._free += [first, last]
            self._free += [began, ended]
            yield key, began.elapsed_time(ended) / 1000, phases


class Timeline(Instrument):
    """Times of the steps since the last `take`.

    Host times of a GPU run are those of launching work; `gpu_seconds` and `gpu_phases` are those of the kernels.
    """

    def __init__(self) -> None:
        self.window = Window()  # replaced where a window is profiled
        self.detailed = True
        self.gpu: GpuTimes[StepTime] | None = None
        self.memory = MemoryNow(cuda=False)
        self.cores = CoreTime()
        self.current = StepTime(0)
        self._trained_seconds = 0.0  # by the finished steps, taken or not
        self._running = False
        self._cores_at_start: tuple[float, int, float | None] | None = None
        # when this rank had its gradients, on the host and on the GPU
        self._computed: tuple[float, torch.cuda.Event | None] | None = None
        self._finished: list[StepTime] = []
        self._phases_began: dict[str, float] = {}
        self._phases_began_on_gpu: dict[str, torch.cuda.Event] = {}
        self._began = time.perf_counter()

    def set_up(self, detailed: bool, cuda: bool) -> None:
        """Choose what is measured. To be called before the run.

        Args:
            detailed: Measure phases too, not only steps and what is not training.
            cuda: Whether the run computes on a GPU.
        """
        on_gpu = cuda and detailed
        self.memory.close()
        self.detailed = detailed
        self.memory = MemoryNow(on_gpu)
        self.gpu = GpuTimes() if on_gpu else None

    def resume(self, iteration: int) -> None:
        self.window.started_at = iteration

    def begin(self, step: int) -> None:
        profiled = step in self.window.steps
        self.current = StepTime(step, profiled=profiled, beside_profile=self.window.disturbs(step) and not profiled)
        if self.gpu is not None:
            self._note_gpu_times(self.gpu)
            self.gpu.begin(self.current)
        # a thread often loses its core while it asks the kernel:
        # what it waits for one there is a part of the step's time, too
        self._began = time.perf_counter()
        self._running = True
        self._cores_at_start = self.cores.read() if self.detailed else None

    def begin_earlier(self, moment: float) -> None:
        """Move the beginning of the running step to an earlier moment, where it was noticed only now.

        Args:
            moment: Seconds by time.perf_counter(); 0 leaves the beginning as it is.
        """
        self._began = moment or self._began

    def begin_phase(self, name: str) -> None:
        if self.gpu is not None and name not in ON_HOST_ONLY:
            self._phases_began_on_gpu[name] = self.gpu.edge()
        self._phases_began[name] = time.perf_counter()

    def end_phase(self, name: str, failed: bool) -> None:
        now = time.perf_counter()
        phases = self.current.phases
        if self.detailed or name in NOT_TRAINING:
            phases[name] = phases.get(name, 0.0) + now - self._phases_began[name]
        if failed:  # the GPU may have failed
            return
        if self._computed is not None:  # this rank waited for others in it, until now
            since, edge = self._computed
            self._computed = None
            self.current.reduce_wait = now - since
            if self.gpu is not None and edge is not None:
                self.gpu.span(REDUCE_WAIT, edge)
        if self.gpu is not None and name not in ON_HOST_ONLY:
            self.gpu.span(name, self._phases_began_on_gpu[name])

    @property
    def step_began(self) -> float:
        """When the running step began, or the last one, by time.perf_counter()."""
        return self._began

    @property
    def phases_began(self) -> dict[str, float]:
        """When each phase began last, by time.perf_counter(). Another thread may ask."""
        return self._phases_began.copy()

    def gradients_computed(self) -> None:
        if not self.detailed:
            return
        with contextlib.suppress(RuntimeError):  # a GPU after a fatal error, which the step itself raises
            now = time.perf_counter()
            edge = None if self.gpu is None else self.gpu.edge()
            self._computed = (now, edge)

    def end(self, step: int) -> None:
        now = self.current
        cores = None if self._cores_at_start is None else self.cores.read()
        now.seconds = time.perf_counter() - self._began
        self._running = False
        self._trained_seconds += now.training_seconds
        self._finished.append(now)
        if self.gpu is not None:
            self.gpu.end()
        if self._cores_at_start is not None and cores is not None:
            cpu_seconds, switches, core_wait = self._cores_at_start
            cpu_seconds_now, switches_now, core_wait_now = cores
            now.cpu_seconds = cpu_seconds_now - cpu_seconds
            now.involuntary_switches = switches_now - switches
            if core_wait is not None and core_wait_now is not None:
                now.core_wait_seconds = core_wait_now - core_wait
        if self.detailed:
            now.host_bytes = self.memory.host_bytes()
            now.peak_bytes = self.memory.peak_bytes()

    def close(self, error: BaseException | None) -> None:
        self.memory.close()
        self.cores.close()

    def take(self, wait: bool = False) -> list[StepTime]:
        """Return the finished steps since the last call, with the GPU times that have arrived.

        Args:
            wait: Whether to wait until all GPU times have arrived.
        """
        if self.gpu is not None:
            with contextlib.suppress(RuntimeError):  # a GPU after a fatal error, which the step itself has raised
                self._note_gpu_times(self.gpu, wait)
        finished = self._finished
        self._finished = []
        return finished

    def so_far(self) -> list[StepTime]:
        """Return the finished steps since the last `take`, which stay to be taken; GPU times may be missing."""
        return list(self._finished)

    def training_seconds(self) -> float:
        """Sum the seconds inside steps since the run began, the running one included; evaluating, saving and what
        instruments do between steps are left out."""
        if not self._running:
            return self._trained_seconds
        self.current.seconds = time.perf_counter() - self._began
        return self._trained_seconds + self.current.training_seconds

    def _note_gpu_times(self, gpu: GpuTimes[StepTime], wait: bool = False) -> None:
        for step_time, seconds, phases in gpu.arrived(wait):
            step_time.gpu_reduce_wait = phases.pop(REDUCE_WAIT, None)
            step_time.gpu_seconds = seconds
            step_time.gpu_phases = phases
