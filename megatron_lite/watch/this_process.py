"""A profiler for the whole of a process, whose script knows nothing of it."""

import atexit
import json
import os
import sys

from megatron_lite.variables import WATCH
from megatron_lite.watch.profiler import Profiler


def watch_this_process():
    """As the environment says, to the end of the process."""
    given = json.loads(os.environ[WATCH])
    profiler = Profiler(given["folder"], range(*given["steps"]), given["memory"], given["command"])
    close_at_exit(profiler.__enter__())


def close_at_exit(profiler: Profiler):
    """With the error that ends the process, if one does; nothing where it was closed before."""
    errors: list[BaseException] = []
    show = sys.excepthook

    def note_error(kind, error, traceback):
        errors.append(error)
        show(kind, error, traceback)

    sys.excepthook = note_error
    atexit.register(lambda: profiler.close(errors[0] if errors else None))
