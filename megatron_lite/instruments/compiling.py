"""Which steps torch.compile slowed down and for how long, and whether it compiled more often than it should."""

import time

from megatron_lite.instruments.base import Instrument
from megatron_lite.instruments.timeline import Timeline


class Compiling(Instrument):
    """Marks steps in the timeline, and tells of each that compiled. `expected`: compilations that need no word at the end.

    A GPU's kernels are tried out and chosen when they first run, which torch does not report: that is not in the seconds.
    """

    def __init__(self, timeline: Timeline, expected: int, tell):
        self._timeline, self._expected, self._tell = timeline, expected, tell
        self.compilations, self.seconds = 0, 0.0
        self._told = (0, 0.0, 0)  # compilations, seconds, cache hits
        self._since: float | None = None

    def open(self):
        from torch._dynamo.callback import callback_handler  # takes a second, and only runs that compile have this
        from torch._dynamo.utils import counters

        self._handler, self._counters = callback_handler, counters
        self._told = (0, 0.0, self._cache_hits())
        self._handler.register_start_callback(self._begins)
        self._handler.register_end_callback(self._ends)

    def end(self, step: int):
        self._tell_of_new()

    def close(self, error: BaseException | None):
        self._handler.remove_start_callback(self._begins)
        self._handler.remove_end_callback(self._ends)
        self._tell_of_new()
        if self.compilations > self._expected:
            self._tell(
                f"--torch-compile compiled {self.compilations} graphs, where {self._expected} were expected: something "
                "about the inputs of layers changes; start with TORCH_LOGS=recompiles to see what"
            )

    def _begins(self, happening):
        self._since = time.perf_counter()
        self._timeline.current.compiling = True
        self.compilations += happening.callback_trigger.name == "DYNAMO"  # others: backward, kernels of the same graph

    def _ends(self, happening):
        if self._since is None:  # it began before this was opened
            return
        seconds, self._since = time.perf_counter() - self._since, None
        self.seconds += seconds
        self._timeline.current.compile_seconds += seconds

    def _tell_of_new(self):
        now = (self.compilations, self.seconds, self._cache_hits())
        graphs, seconds, cached = (value - before for value, before in zip(now, self._told))
        self._told = now
        if graphs:
            self._tell(
                f"   compiled {graphs} graph{'s' if graphs > 1 else ''} in {seconds:.1f} s (from the cache: {cached})"
            )

    def _cache_hits(self) -> int:
        """Graphs whose forward and backward were there from an earlier run, or from another rank."""
        return self._counters["aot_autograd"]["autograd_cache_hit"]
