"""Records every allocation with its Python stack (--record-memory-history), for pytorch.org/memory_viz to draw."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from megatron_lite.formats.memory_snapshot import MemorySnapshot, TraceEvent
from megatron_lite.instruments.base import Instrument, Tell, Window
from megatron_lite.instruments.memory_oom import Shortage, ShortageRecorder, is_out_of_memory, read_host_memory
from megatron_lite.instruments.memory_summary import describe_place, operation, peak, site
from megatron_lite.instruments.memory_tags import ModuleHooks, StepMarks
from megatron_lite.instruments.memory_tracker import StorageTracker
from megatron_lite.instruments.snapshot_format import build_annotations, extend_name, write_snapshot
from megatron_lite.phases import SETUP
from megatron_lite.units import counted, size

MAX_EVENTS_OUTSIDE = 100_000  # events kept outside of the window, to explain an out-of-memory error there
# of torch._C, in builds with CUDA only
ATTACH_OBSERVER = "_cuda_attach_out_of_memory_observer"


class MemoryRecorder(ShortageRecorder, Protocol):
    """A recorder of a device's allocations, as a MemoryHistory needs it."""

    @property
    def failure(self) -> Exception | None:
        """Read when a snapshot was written: the error that stopped recording."""

    def open(self) -> None:
        """Called once, before the model is built."""

    def begin_step(self, pause: bool) -> None:
        """Called before a step's data is fetched. `pause` says that the step is outside of the window."""

    def end_step(self) -> None:
        """Called after a step was logged."""

    def open_window(self) -> None:
        """Called before the window's first step, after `begin_step`."""

    def close_window(self) -> None:
        """Called after the window's last step, when its snapshot was taken."""

    def close(self) -> None:
        """Called once, at the end of the run, also when it failed."""

    def snapshot(self, of_last_step: bool = False) -> tuple[MemorySnapshot, bool]:
        """Called when the window ends, or the run does: returns a snapshot, and whether it lacks dropped events.

        Args:
            of_last_step: The run has ended without an error, and has freed what its last step held.
        """


class CudaRecorder:
    """Records GPU memory from before the first parameter to the end of the run.

    The history is cleared when the window opens, so that the snapshot shows the window only; blocks that were allocated
    before keep their stacks. Allocations in the window are tagged with step, phase and module.

    Args:
        most: Events that the history holds in the window.
    """

    failure: Exception | None = None  # torch's allocator records without fail

    def __init__(self, most: int) -> None:
        self._most = most
        # per thread, and without effect on allocators other than torch's own
        tell: Callable[[str], object] | None = getattr(torch.cuda.memory, "_set_memory_metadata", None)
        self.place = StepMarks(tell)
        self._hooks = ModuleHooks(self.place, in_backward=tell is not None)
        self._full_at = MAX_EVENTS_OUTSIDE
        self._is_open = False

    def open(self) -> None:
        if not self._is_open:  # it may have been opened earlier, to record more
            self._is_open = True
            self._record(min(MAX_EVENTS_OUTSIDE, self._most))

    def begin_step(self, pause: bool) -> None:
        """Do nothing: the allocator records all the time."""

    def end_step(self) -> None:
        """Do nothing: the snapshot of a GPU shows what the run's end frees, too."""

    def open_window(self) -> None:
        self._record(self._most, stacks_of="all")
        self._hooks.attach()

    def close_window(self) -> None:
        self._hooks.detach()
        self._record(min(MAX_EVENTS_OUTSIDE, self._most))

    def close(self) -> None:
        self._hooks.detach()
        torch.cuda.memory._record_memory_history(enabled=None)

    def snapshot(self, of_last_step: bool = False) -> tuple[MemorySnapshot, bool]:
        """Take a snapshot of this moment; returns it, and whether it lacks events that the ring dropped.

        What the run's end frees is recorded too, so that the last step can be seen in it.
        """
        taken: MemorySnapshot = torch.cuda.memory._snapshot()
        device = torch.cuda.current_device()
        taken["external_annotations"] = [
            *taken.get("external_annotations", ()),
            *build_annotations(self.place.marks, device),
        ]
        return taken, len(taken["device_traces"][device]) >= self._full_at

    def watch_for_shortage(self, observe: Callable[[Shortage], None]) -> None:
        """Call `observe` at every allocation that fails, on the thread where it fails."""

        def report_failure(device: int, asked: int, total: int, free: int) -> None:
            observe(Shortage(asked, free, total, torch.cuda.memory_reserved(device)))

        torch.cuda.init()  # older allocators crash on an observer that comes before
        attach: Callable[[Callable[[int, int, int, int], None]], object] = getattr(torch._C, ATTACH_OBSERVER)
        attach(report_failure)

    def measure_shortage(self, asked: int | None) -> Shortage:
        free, total = torch.cuda.mem_get_info()
        return Shortage(asked, free, total, torch.cuda.memory_reserved())

    @property
    def number(self) -> int:
        """Number of the device in the snapshot."""
        return torch.cuda.current_device()

    def _record(self, most: int, stacks_of: str = "alloc") -> None:
        """Start recording anew, without what was recorded before.

        Args:
            most: Events that the history holds.
            stacks_of: "alloc"; or "all", with those of frees, which nobody reads outside of the window.
        """
        # C++ frames would make a snapshot take minutes instead of seconds
        torch.cuda.memory._record_memory_history(
            enabled="all", context=stacks_of, stacks="python", max_entries=most, clear_history=True
        )
        self._full_at = most


class CpuRecorder:
    """Records CPU memory while the model is built and inside the window, so that other steps are not slowed down.

    Memory that was allocated in between is found when an operation in the window first uses it.

    Args:
        most: Events that the history holds.
    """

    number = 0  # of the device in the snapshot

    def __init__(self, most: int) -> None:
        self.place = StepMarks()
        self._tracker = StorageTracker(self.place, most)
        self._hooks = ModuleHooks(self.place, in_backward=False)

    def open(self) -> None:
        self._tracker.start()

    def begin_step(self, pause: bool) -> None:
        self._tracker.begin_step()
        if pause:
            self.end_step()
            self._tracker.stop()

    def end_step(self) -> None:
        """Remember this moment: if this was the last step, all memory is freed before the snapshot is written."""
        if self._tracker.seeing:
            self._tracker.remember()

    def open_window(self) -> None:
        self._tracker.forget_history()
        self._hooks.attach()
        self._tracker.start()

    def close_window(self) -> None:
        self._hooks.detach()
        self._tracker.stop()

    close = close_window

    def snapshot(self, of_last_step: bool = False) -> tuple[MemorySnapshot, bool]:
        taken = self._tracker.snapshot(remembered=of_last_step)
        return taken, self._tracker.dropped

    @property
    def failure(self) -> Exception | None:
        """The error that stopped recording."""
        return self._tracker.failure

    def watch_for_shortage(self, observe: Callable[[Shortage], None]) -> None:
        self._tracker.out_of_memory = lambda asked: observe(self.measure_shortage(asked))

    def measure_shortage(self, asked: int | None) -> Shortage:
        host = read_host_memory()
        return Shortage(asked, free=host.free, total=host.total, reserved=host.mine, all_known=self._tracker.seeing)


class MemoryHistory(Instrument):
    """Records memory from before the model is built, and writes a snapshot when the window ends or the run does.

    Args:
        window: The profiled steps.
        path: Where the snapshot of the planned window is written.
        recorder: Records the device's memory.
        tell: Called with each line for the console.
    """

    def __init__(self, window: Window, path: Path, recorder: MemoryRecorder, tell: Tell) -> None:
        self.window = window
        self._path = path
        self._recorder = recorder
        self._tell = tell
        self._inside = False
        self._first = 0  # step of the window in hand
        self._planned = True  # the window in hand; one on demand has a file of its own, whichever comes first
        self._last = 0  # step that was recorded
        self._written = False

    def open(self) -> None:
        self._recorder.open()

    def begin(self, step: int) -> None:
        if self._inside and step not in self.window.steps:  # the window was moved
            self._leave_window()
        opens = self.window.opens(step)
        self._recorder.begin_step(pause=not opens and not self._inside)
        if opens:
            self._recorder.open_window()
            self._inside = True
            self._first = step
            self._planned = not self.window.on_demand
        if self._inside:
            self._last = step

    def end(self, step: int) -> None:
        self._recorder.end_step()
        if self._inside and (self.window.closes(step) or step == self.window.last_step):
            self._leave_window()

    def close(self, error: BaseException | None) -> None:
        try:
            # when memory ran out, the same was written under the name for that, while it all still stood
            if (self._inside or not self._written) and not is_out_of_memory(error):
                self._write(ended=error is None)
        finally:
            self._inside = False
            self._recorder.close()

    def _leave_window(self) -> None:
        self._write()
        self._recorder.close_window()
        self._inside = False

    def _write(self, ended: bool = False) -> None:
        """Write the snapshot and report it, or why it could not be written; the instrument goes on either way."""
        snapshot, dropped = self._recorder.snapshot(of_last_step=ended)
        path = self._path if self._planned else extend_name(self._path, f"_steps{self._first}-{self._last}")
        self._written = True
        try:
            write_snapshot(path, snapshot)
        except OSError as error:
            self._tell(
                f"--memory-snapshot-path: {path} could not be written ({error.strerror}) and is lost; training goes on."
            )
            return
        words = self._describe(snapshot, dropped)
        self._tell(f"memory snapshot: {path} holds {words}; draw it at pytorch.org/memory_viz")

    def _describe(self, snapshot: MemorySnapshot, dropped: bool) -> str:
        """Describe what a snapshot holds: its events, their steps, and the peak."""
        events = snapshot["device_traces"][self._recorder.number]
        highest = peak(snapshot, self._recorder.number)
        words = f"{counted(len(events), 'event')} of {self._name_steps(events, dropped)}, peak {size(highest.size)}"
        if highest.frames:
            words += f", {describe_place(highest.tag)}: {operation(highest.frames)}{site(highest.frames)}"
        if dropped:
            words += "; earlier ones were dropped, raise --memory-history-events to keep them"
        if self._recorder.failure is not None:
            words += f"; recording stopped early: {self._recorder.failure}"
        return words

    def _name_steps(self, events: list[TraceEvent], dropped: bool) -> str:
        """Name the steps whose beginning is among the events, as in 'steps 10-11 of this run'."""
        if not self._inside:
            return f"{SETUP}, since the run ended before step {self.window.steps.start}"
        if not dropped or not events:
            return self.window.words(self._last)
        since_us = events[0]["time_us"]
        began = [step for step, time_us in self._recorder.place.begun.items() if time_us >= since_us]
        if not began:
            return f"the end of step {self._last}"
        first = min(began)
        return f"steps {first}-{self._last}" if first < self._last else f"step {self._last}"
