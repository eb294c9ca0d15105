"""Records the script of this process, which knows nothing of it, and writes what was recorded."""

import atexit
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from megatron_lite.formats.prove_record import RANK_FILE, ProveRecord, ProveRequest
from megatron_lite.script_process import call_on_error, is_loader_worker, leave
from megatron_lite.script_record.engines import SeenEngines
from megatron_lite.script_record.script_recorder import ScriptRecorder
from megatron_lite.variables import PROVE_REQUEST

MAX_WAIT_S = 20.0  # for the other ranks' answers: one that leaves early breaks their last exchange
WAIT_S = 0.05
ENDED_EARLY = "the script ended before its optimizers had stepped {} times"


def prove_this_process() -> None:
    """Record this process' script from now on, as its environment variable asks."""
    if is_loader_worker():
        return
    request = msgspec.json.decode(os.environ[PROVE_REQUEST], type=ProveRequest)
    ProvedScript(request).start()


class ProvedScript:
    """The script of this process, which ends when enough was seen of it.

    Args:
        request: Says what is to be recorded.
    """

    def __init__(self, request: ProveRequest) -> None:
        self._request = request
        self._rank = int(os.environ.get("RANK", "0"))
        self._ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._engines = SeenEngines()
        self._recorder = ScriptRecorder(request, self._end)
        self._process = os.getpid()  # children that are forked write nothing

    def start(self) -> None:
        """Start, for the rest of the process."""
        call_on_error(self._note_error)
        atexit.register(self._end_early)
        self._engines.attach()
        self._recorder.attach()
        if self._request.is_own_trainer:
            # imports the trainer, which a script of others has no use for
            importlib.import_module("megatron_lite.script_record.own_trainer").follow_trainer(self._recorder)

    def _note_error(self, error: BaseException, show: Callable[[], object]) -> None:
        show()
        why = f"{type(error).__name__}: {error}"
        if self._recorder.has_gradients and self._has_finished_peer():
            # it was left alone: a rank that never steps goes on until its peers have gone
            self._write(lost=why)
        else:
            self._write(why)

    def _has_finished_peer(self) -> bool:
        """Whether another rank has a whole record."""
        folder = Path(self._request.folder)
        for rank in range(self._ranks):
            path = folder / RANK_FILE.format(rank)
            if rank == self._rank or not path.exists():
                continue
            if not msgspec.json.decode(path.read_bytes(), type=ProveRecord).failure:
                return True
        return False

    def _end_early(self) -> None:
        if os.getpid() == self._process:
            self._write(ENDED_EARLY.format(self._request.steps))

    def _end(self) -> NoReturn:
        """Write what was recorded and leave, when all ranks have."""
        self._write()
        deadline = time.monotonic() + MAX_WAIT_S
        folder = Path(self._request.folder)
        while time.monotonic() < deadline:
            if all((folder / RANK_FILE.format(rank)).exists() for rank in range(self._ranks)):
                break
            time.sleep(WAIT_S)
        leave(0)

    def _write(self, failure: str = "", lost: str = "") -> None:
        engines = self._engines.describe()
        record: ProveRecord = self._recorder.write(self._rank, self._ranks, engines, failure, lost)
        path = Path(self._request.folder) / RANK_FILE.format(self._rank)
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(record))
        partial.replace(path)
