"""--record-memory-history: every allocation with its Python stack, drawn by pytorch.org/memory_viz."""

from megatron_lite.config.plan import Plan
from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.memory_cpu import CpuRecorder
from megatron_lite.instruments.memory_cuda import CudaRecorder
from megatron_lite.instruments.memory_file import SnapshotFiles, write_snapshot
from megatron_lite.instruments.memory_oom import OutOfMemory, is_out_of_memory
from megatron_lite.instruments.memory_place import SETUP
from megatron_lite.instruments.memory_summary import operation, peak, place_words, site
from megatron_lite.instruments.window import Window
from megatron_lite.units import count, size


def memory_instruments(plan: Plan, window: Window, tell) -> list[Instrument]:
    """What watches this rank's memory, outermost first. Raises UserError where snapshots could not be written.

    On a GPU every rank waits for memory to run out; the profiled ones record.
    """
    p, world = plan.args.profile, plan.world
    recording = p.record_memory_history and world.rank in plan.profile_ranks
    if plan.device == "cpu" and not recording:
        return []
    files = SnapshotFiles(p.memory_snapshot_path, world.rank, alone=len(plan.profile_ranks) == 1)
    if p.record_memory_history:
        files.prepare()
    recorder = (CudaRecorder if plan.device == "cuda" else CpuRecorder)(p.memory_history_events)
    dump = files.out_of_memory if p.record_memory_history else None
    watching = OutOfMemory(plan, recorder.place, dump, recorder, tell)
    history = MemoryHistory(window, files, recorder, lambda: plan.train_iters - window.started_at, tell)
    # a shortage is explained before recording is switched off; steps begin and end inside of what is recorded
    return [watching, *([history] if recording else []), recorder.place]


class MemoryHistory(Instrument):
    """Records from before the model is built; writes at the window's end, or what there is when the run ends."""

    def __init__(self, window: Window, files: SnapshotFiles, recorder, last_step, tell):
        self.window, self._files, self._recorder, self._tell = window, files, recorder, tell
        self._last_step = last_step  # last_step(): of this run, as far as the flags say
        self._inside = False
        self._planned = True  # the window in hand; one on demand has a file of its own, whichever comes first
        self._last = 0  # step that was recorded
        self._written = 0

    def open(self):
        self._recorder.open()

    def begin(self, step: int):
        self._recorder.begin_step()
        if self._inside and step not in self.window:  # it was moved away
            self._leave_window()
        if self.window.opens(step):
            self._recorder.open_window()
            self._inside, self._first, self._planned = True, step, not self.window.on_demand
        elif not self._inside:
            self._recorder.pause()
        if self._inside:
            self._last = step

    def end(self, step: int):
        self._recorder.end_step()
        if self._inside and (self.window.closes(step) or step == self._last_step()):
            self._leave_window()

    def close(self, error: BaseException | None):
        try:
            # when memory ran out, the same was written under the name for that, while it all still stood
            if (self._inside or not self._written) and not is_out_of_memory(error):
                self._write(ended=error is None)
        finally:
            self._inside = False
            self._recorder.close()

    def _leave_window(self):
        self._write()
        self._recorder.close_window()
        self._inside = False

    def _write(self, ended: bool = False):
        """Tells what was written, or why not: a full disk costs the file, not the instrument."""
        snapshot, dropped = self._recorder.snapshot(of_last_step=ended)
        path = self._files.history if self._planned else self._files.on_demand(self._first, self._last)
        self._written += 1
        try:
            write_snapshot(path, snapshot)
        except OSError as error:
            self._tell(
                f"--memory-snapshot-path: {path} could not be written ({error.strerror}) and is lost; training goes on."
            )
            return
        self._tell(
            f"memory snapshot: {path} holds {self._contents(snapshot, dropped)}; draw it at pytorch.org/memory_viz"
        )

    def _contents(self, snapshot: dict, dropped: bool) -> str:
        device = self._recorder.number
        events = snapshot["device_traces"][device]
        highest = peak(snapshot, device)
        words = f"{count(len(events))} events of {self._steps(events, dropped)}, peak {size(highest.size)}"
        if highest.frames:
            words += f", {place_words(highest.tag)}: {operation(highest.frames)}{site(highest.frames)}"
        if dropped:
            words += "; earlier ones were dropped, raise --memory-history-events to keep them"
        if self._recorder.failure is not None:
            words += f"; recording stopped early: {self._recorder.failure}"
        return words

    def _steps(self, events: list[dict], dropped: bool) -> str:
        """'steps 10-11 of this run', those whose beginning is among the events."""
        if not self._inside:
            return f"{SETUP}, since the run ended before step {self.window.first}"
        if not dropped or not events:
            return self.window.words(self._last)
        began = [step for step, time_us in self._recorder.place.begun.items() if time_us >= events[0]["time_us"]]
        if not began:
            return f"the end of step {self._last}"
        return f"steps {min(began)}-{self._last}" if min(began) < self._last else f"step {self._last}"
