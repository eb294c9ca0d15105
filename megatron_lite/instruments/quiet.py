"""torch's C++ writes notes of its profilers to stderr, past all settings; they are no news to a user."""

import contextlib
import os
import re
import sys
import tempfile

NOISE = re.compile(rb"execution_trace_observer\.cpp|CPUAllocator\.cpp|output_json\.cpp|USDT:|kineto", re.IGNORECASE)


@contextlib.contextmanager
def without_notes():
    """Hold back what is written to stderr inside, and pass on at the end what is no noise."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        real = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(real, 2)
            os.close(real)
            held.seek(0)
            for line in held:
                if not NOISE.search(line):
                    os.write(2, line)
