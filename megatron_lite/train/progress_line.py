"""One line on a terminal that moves while training does; nothing where output goes to a file."""

import sys
import time

from megatron_lite.units import duration

WIDTH = 24
SECONDS_BETWEEN = 0.2


class ProgressLine:
    """Drawn on stderr, wiped before anything else is printed."""

    def __init__(self, first: int, last: int, active: bool):
        self._first, self._last = first, last
        self._active = active and sys.stderr.isatty()
        self._started = time.monotonic()
        self._drawn = 0.0

    def update(self, iteration: int, loss: float | None):
        """Draw, at most every fifth of a second."""
        now = time.monotonic()
        if not self._active or now - self._drawn < SECONDS_BETWEEN:
            return
        self._drawn = now
        done = iteration - self._first
        left = (now - self._started) / max(done, 1) * (self._last - iteration)
        bar = ("#" * (WIDTH * iteration // self._last)).ljust(WIDTH, ".")
        shown = "" if loss is None else f"  loss {loss:.4f}"
        sys.stderr.write(f"\r\033[K[{bar}] {iteration}/{self._last}{shown}  {duration(left)} left")
        sys.stderr.flush()

    def wipe(self):
        """Make room for a line."""
        if self._active and self._drawn:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
