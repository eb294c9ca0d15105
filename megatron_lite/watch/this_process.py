"""A profiler for the whole of a process, whose script knows nothing of it."""

import atexit
import os
import sys
from types import TracebackType

from megatron_lite.formats.watch_request import decode_request
from megatron_lite.variables import WATCH
from megatron_lite.watch.profiler import Profiler


def watch_this_process() -> None:
    """Watch this process from now to its end, as its environment variables ask."""
    request = decode_request(os.environ[WATCH])
    profiler = Profiler(request.folder, range(*request.steps), request.memory, request.command)
    close_at_exit(profiler.__enter__())


def close_at_exit(profiler: Profiler) -> None:
    """Close a profiler when the process ends, with the error that ends it if there is one; a closed profiler stays as
    it is."""
    errors: list[BaseException] = []
    show = sys.excepthook

    def note_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        errors.append(error)
        show(kind, error, traceback)

    sys.excepthook = note_error
    atexit.register(lambda: profiler.close(errors[0] if errors else None))
