"""One line on a terminal that says how far a command is; nothing where output goes to a file."""

import sys
import time

from megatron_lite.units import count, size

SECONDS_BETWEEN = 0.2


class DocumentProgress:
    """Fed documents and bytes of text, as data.preprocess reports them."""

    def __init__(self):
        self._active = sys.stderr.isatty()
        self._drawn = 0.0

    def __call__(self, documents: int, text_bytes: int):
        self.say(f"{count(documents)} documents, {size(text_bytes)}")

    def say(self, text: str):
        """Replace the line, at most every fifth of a second."""
        now = time.monotonic()
        if self._active and now - self._drawn >= SECONDS_BETWEEN:
            self._drawn = now
            sys.stderr.write(f"\r\033[K{text}")
            sys.stderr.flush()

    def wipe(self):
        """Make room for a line."""
        if self._active and self._drawn:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
