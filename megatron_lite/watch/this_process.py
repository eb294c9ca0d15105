"""A profiler and a recorder for the whole of a process, whose script knows nothing of them."""

import atexit
import contextlib
import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed

from megatron_lite.formats.watch_request import decode_request
from megatron_lite.variables import WATCH
from megatron_lite.watch.profiler import Profiler
from megatron_lite.watch.stand_ins import add_calls

if TYPE_CHECKING:
    from megatron_lite.watch.rank_recorder import RankRecorder

INIT_GROUP = "init_process_group"


def watch_this_process() -> None:
    """Watch this process from now to its end, as its environment variables ask."""
    request = decode_request(os.environ[WATCH])
    profiler = Profiler(request.folder, range(*request.steps), request.memory, request.command)
    recorder = record_failures(Path(request.folder), profiler)
    close_at_exit(profiler.__enter__(), recorder)


def close_at_exit(profiler: Profiler, recorder: "RankRecorder | None" = None) -> None:
    """Close a profiler and a recorder when the process ends, with the error that ends it if there is one; a closed
    profiler stays as it is."""
    errors: list[BaseException] = []
    show = sys.excepthook

    def note_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        errors.append(error)
        if recorder is not None:
            with contextlib.suppress(Exception):
                recorder.note_error(error)
        show(kind, error, traceback)

    def close() -> None:
        profiler.close(errors[0] if errors else None)
        if recorder is not None:
            recorder.end()

    sys.excepthook = note_error
    atexit.register(close)


def record_failures(folder: Path, profiler: Profiler) -> "RankRecorder | None":
    """Record from now on what tells why this process fails, if it is one that trains; None where torch has no ranks.

    Args:
        folder: Folder of the recording.
        profiler: Knows step and phase.
    """
    if not torch.distributed.is_available():
        return None
    from megatron_lite.watch.rank_recorder import RankRecorder, has_own_rank

    recorder = RankRecorder(folder, profiler)
    profiler.when_training = recorder.start
    _see_groups(recorder)
    _see_exits(recorder)
    _see_clock(recorder)
    if has_own_rank():
        recorder.start()
    return recorder


def _see_groups(recorder: "RankRecorder") -> None:
    """Have the recorder begin before ranks meet: they may wait for each other there."""

    def start(*arguments: object, **named: object) -> None:
        with contextlib.suppress(Exception):
            recorder.start()

    initialize: Callable[..., object] = getattr(torch.distributed, INIT_GROUP)
    followed = add_calls(initialize, start, _do_nothing)
    for module in (torch.distributed, torch.distributed.distributed_c10d):
        setattr(module, INIT_GROUP, followed)


def _see_clock(recorder: "RankRecorder") -> None:
    """Have the recorder leave faulthandler's clock to a script that uses it."""
    arm = faulthandler.dump_traceback_later

    def arm_for_script(*arguments: Any, **named: Any) -> None:
        recorder.leave_clock()
        arm(*arguments, **named)

    faulthandler.dump_traceback_later = arm_for_script


def _see_exits(recorder: "RankRecorder") -> None:
    """Have the recorder know with which code this process ends, as far as it is told in Python."""
    leave = sys.exit
    leave_at_once = os._exit

    def exit(status: object = None, /) -> NoReturn:
        with contextlib.suppress(Exception):
            recorder.note_exit(status, sys.exc_info()[1])
        leave(status)  # type: ignore[arg-type]

    def _exit(status: int) -> NoReturn:
        with contextlib.suppress(Exception):
            recorder.note_exit(status, sys.exc_info()[1])
            recorder.end()
        leave_at_once(status)

    sys.exit = exit
    os._exit = _exit


def _do_nothing() -> None:
    """Stand where nothing is to be called."""
