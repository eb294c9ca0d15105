"""Lines of long work: one that is drawn anew, with others above it; a line now and then where output goes to a file."""

import sys
import time

from megatron_lite.terminal import escape, print_lines

EVERY_RANK = {"every_rank": True}  # for the `extra` of a log message
SECONDS_BETWEEN_DRAWS = 0.2
# where output goes to a file
SECONDS_BEFORE_LINES = 5
SECONDS_BETWEEN_LINES = 20


class LiveLine:
    """Drawn on stderr, at most every fifth of a second; to be wiped before anything else is printed.

    Where stderr is no terminal, a line now and then of what takes long; none with `lines` off.
    """

    def __init__(self, active: bool = True, lines: bool = True):
        terminal = sys.stderr.isatty()
        self._active = active and terminal
        self._lines = active and lines and not terminal
        self._drawn = 0.0
        self._printed = time.monotonic() + SECONDS_BEFORE_LINES - SECONDS_BETWEEN_LINES if self._lines else 0.0

    @property
    def due(self) -> bool:
        """Whether `draw` would draw now: there is a terminal, and it was not just done."""
        return self._active and time.monotonic() - self._drawn >= SECONDS_BETWEEN_DRAWS

    def draw(self, text: str, lasting: bool = False) -> None:
        """Replace the line, unless that was just done. lasting: print a line that stays, wherever output goes."""
        if lasting:
            self.wipe()
            print_lines([f"  {text}"], sys.stderr)
        elif self.due:
            self._drawn = time.monotonic()
            _write(f"\r\033[K{escape(text)}")
        elif self._lines and time.monotonic() - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            print_lines([f"  {text}"], sys.stderr)

    def wipe(self) -> None:
        """Make room for other lines."""
        if self._active and self._drawn:
            _write("\r\033[K")


def say(text: str) -> None:
    """Print one or several lines to standard output, at once,
    over whatever this rank or another one has drawn on the terminal."""
    if sys.stderr.isatty():
        _write("\r\033[K")
    print_lines(text.split("\n"))


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
