"""How far training is, and how long it will take."""

import time

from megatron_lite.live_line import LiveLine
from megatron_lite.units import duration

WIDTH = 24


class ProgressLine(LiveLine):
    """From iteration `first`, where this run began, to `last`."""

    def __init__(self, first: int, last: int, active: bool):
        super().__init__(active, lines=False)  # the log has lines of its own
        self._first, self._last = first, last
        self._started = time.monotonic()

    def update(self, iteration: int, loss: float | None):
        """Show `iteration`, the newest loss that has arrived, and the time left at the pace so far."""
        if not self.due:
            return
        done = iteration - self._first
        left = (time.monotonic() - self._started) / max(done, 1) * (self._last - iteration)
        bar = ("#" * (WIDTH * iteration // self._last)).ljust(WIDTH, ".")
        shown = "" if loss is None else f"  loss {loss:.4f}"
        self.draw(f"[{bar}] {iteration}/{self._last}{shown}  {duration(left)} left")
