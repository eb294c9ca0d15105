"""Which steps torch.compile slowed down, and whether it compiled more often than it should."""

from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.timeline import Timeline


class Compiling(Instrument):
    """Marks steps in the timeline. `expected`: compilations that need no word at the end."""

    def __init__(self, timeline: Timeline, expected: int, tell):
        self._timeline, self._expected, self._tell = timeline, expected, tell
        self.compilations = 0

    def open(self):
        from torch._dynamo.callback import callback_handler  # takes a second, and only runs that compile have this

        self._handler = callback_handler
        self._handler.register_start_callback(self._note)

    def close(self, error: BaseException | None):
        self._handler.remove_start_callback(self._note)
        if self.compilations > self._expected:
            self._tell(f"--torch-compile compiled {self.compilations} variants of a layer, where {self._expected} were "
                       "expected: something about its inputs changes; start with TORCH_LOGS=recompiles to see what")

    def _note(self, happening):
        self._timeline.current.compiling = True
        self.compilations += happening.callback_trigger.name == "DYNAMO"  # others: backward, kernels of the same variant
