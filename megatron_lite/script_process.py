"""The process of a script that knows nothing of this package: which ones are none, and how to end one."""

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

FAILED_CODE = 1  # exit code
OF_A_LOADER = "--multiprocessing-fork"  # in the command line of a data loader's worker that was spawned
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def is_loader_worker() -> bool:
    """Tell whether this process is a worker of a data loader, not the script itself."""
    return OF_A_LOADER in sys.argv or OF_A_LOADER in getattr(sys, "orig_argv", ())


def call_on_error(note: Callable[[BaseException, Callable[[], object]], object]) -> None:
    """Have the error that ends the script noted, and end its process at once.

    Args:
        note: Takes the error, and a function that shows it as Python would.
    """
    show: Hook = sys.excepthook

    def note_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        note(error, lambda: show(kind, error, traceback))
        leave(FAILED_CODE)

    sys.excepthook = note_error


def leave(code: int) -> NoReturn:
    """End the process at once: no file is written any more, no library says goodbye.

    Args:
        code: Exit code of the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
