"""The memory history of a CPU run, in the form that a GPU's allocator gives it."""

from megatron_lite.instruments.memory_oom import Shortage, host_memory
from megatron_lite.instruments.memory_place import ModuleHooks, Place
from megatron_lite.instruments.memory_tracker import StorageTracker


class CpuRecorder:
    """Records while the model is built and inside the window; between them steps run at their own speed.

    What appears in between and lives on is found when the window first touches it.
    """

    number = 0  # of the device in the snapshot

    def __init__(self, most: int):
        self.place = Place()
        self._tracker = StorageTracker(self.place, most)
        self._hooks = ModuleHooks(self.place, in_backward=False)

    def open(self):
        self._tracker.start()

    def begin_step(self):
        self._tracker.begin_step()

    def pause(self):
        if self._tracker.seeing:
            self._tracker.remember()
        self._tracker.stop()

    def end_step(self):
        """A run that ends now frees all before anybody can look: a snapshot of its last step is one of this moment."""
        if self._tracker.seeing:
            self._tracker.remember()

    def open_window(self):
        self._tracker.forget_history()
        self._hooks.attach()
        self._tracker.start()

    def close_window(self):
        self._hooks.detach()
        self._tracker.stop()

    def close(self):
        self.close_window()

    def snapshot(self, of_last_step: bool = False) -> tuple[dict, bool]:
        """(the snapshot, whether events that belong to it were dropped). Of now, or of the last step's end."""
        return self._tracker.snapshot(remembered=of_last_step), self._tracker.dropped

    @property
    def failure(self) -> Exception | None:
        """Why recording stopped, if it did."""
        return self._tracker.failure

    def watch_for_shortage(self, observe):
        self._tracker.out_of_memory = lambda asked: observe(self.shortage(asked))

    def shortage(self, asked: int | None) -> Shortage:
        """Now."""
        host = host_memory()
        return Shortage(
            asked, free=host["free"], total=host["total"], reserved=host["mine"], all_known=self._tracker.seeing
        )
