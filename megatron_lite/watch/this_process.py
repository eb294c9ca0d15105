"""A profiler for the whole of a process, whose script knows nothing of it."""

import atexit
import json
import os
import sys

from megatron_lite.variables import WATCH
from megatron_lite.watch.profiler import Profiler


def watch_this_process():
    """Watch this process from now to its end, as its environment variables ask."""
    given = json.loads(os.environ[WATCH])
    profiler = Profiler(given["folder"], range(*given["steps"]), given["memory"], given["command"])
    close_at_exit(profiler.__enter__())


def close_at_exit(profiler: Profiler):
    """Close a profiler when the process ends, with the error that ends it if there is one; a closed profiler stays as
    it is."""
    errors: list[BaseException] = []
    show = sys.excepthook

    def note_error(kind, error, traceback):
        errors.append(error)
        show(kind, error, traceback)

    sys.excepthook = note_error
    atexit.register(lambda: profiler.close(errors[0] if errors else None))
