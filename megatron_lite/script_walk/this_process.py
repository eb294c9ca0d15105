"""Walks the script of this process, which knows nothing of it, and writes what was found."""

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from megatron_lite.errors import UserError
from megatron_lite.formats.fit_record import ENDED_EARLY, NOT_ON_GPU, FitRecord, FitRequest
from megatron_lite.formats.memory_snapshot import MemorySnapshot
from megatron_lite.instruments.replacing import put_in_place
from megatron_lite.instruments.snapshot_format import write_snapshot
from megatron_lite.planner.walk.walk_steps import Walked
from megatron_lite.rehearsal import summarize_walk
from megatron_lite.script_process import FAILED_CODE, call_on_error, is_loader_worker, leave
from megatron_lite.script_walk.changes import CHANGES
from megatron_lite.script_walk.device_tensors import MovedBatch
from megatron_lite.script_walk.unknown_values import describe_error
from megatron_lite.script_walk.walk import PretendedGpu, ScriptWalk
from megatron_lite.variables import FIT_REQUEST

WORKSPACE = "workspace"  # the category of what cuBLAS holds
SAVED = "torch.save wrote no file: weights have no values"


def walk_this_process() -> None:
    """Walk this process' script from now on, as its environment variable asks."""
    if is_loader_worker():
        return
    request = msgspec.json.decode(os.environ[FIT_REQUEST], type=FitRequest)
    FittedScript(request).start()


class FittedScript:
    """The script of this process, which ends when enough was seen of it.

    Args:
        request: What is to be found out.
    """

    def __init__(self, request: FitRequest) -> None:
        self._request = request
        self._notes: list[str] = []
        gpu = None
        if request.gpu:
            gpu = PretendedGpu(request.gpu, request.capability, request.total_bytes, request.workspace_bytes)
        self._walk = ScriptWalk(gpu, MovedBatch(request.batch, request.wanted_batch), self._end)

    def start(self) -> None:
        """Start, for the rest of the process."""
        call_on_error(self._note_error)
        atexit.register(self._note_early_end)
        if self._request.with_data:
            self._walk.record()
            return
        self._keep_files()
        if self._request.change:
            CHANGES[self._request.change]()
        try:
            self._walk.start()
        except UserError as error:
            self.fail(error)

    def _keep_files(self) -> None:
        """Keep the script from writing weights that have no values over those of a run."""

        def save(*arguments: object, **named: object) -> None:
            if SAVED not in self._notes:
                self._notes.append(SAVED)

        put_in_place(torch, "save", save)

    def _note_error(self, error: BaseException, show: Callable[[], object]) -> None:
        if not isinstance(error, UserError):
            show()
        self.fail(error)

    def fail(self, error: BaseException) -> NoReturn:
        """Write what went wrong in the script, and leave."""
        if isinstance(error, UserError):
            self._write(FitRecord(failure="\n".join(error.lines)))
        else:
            self._write(FitRecord(failure=describe_error(error)))
        leave(FAILED_CODE)

    def end_early(self) -> NoReturn:
        """Write that the script ended before it had trained two steps, and leave."""
        self._note_early_end()
        leave(FAILED_CODE)

    def _note_early_end(self) -> None:
        self._write(FitRecord(failure=ENDED_EARLY))

    def _end(self, walk: ScriptWalk) -> NoReturn:
        """Write what was found and leave, so that the script does nothing with what it has computed."""
        try:
            snapshot = walk.take_snapshot()
            self._write(self._summarize(walk, snapshot))
            if self._request.snapshot:
                write_snapshot(Path(self._request.snapshot), snapshot)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the script must not go on
            self._write(FitRecord(failure=f"the walk itself failed: {type(error).__name__}: {error}"))
            leave(FAILED_CODE)
        leave(0)

    def _summarize(self, walk: ScriptWalk, snapshot: MemorySnapshot) -> FitRecord:
        found = summarize_walk(Walked(snapshot))
        if self._request.gpu and found.categories.get(WORKSPACE) == found.allocated_peak_bytes:
            return FitRecord(failure=NOT_ON_GPU)
        return FitRecord(
            allocated_peak_bytes=found.allocated_peak_bytes,
            reserved_peak_bytes=found.reserved_peak_bytes,
            phase=found.phase,
            where=found.where,
            categories=found.categories,
            branches=walk.branches.lines,
            copies=walk.branches.copies,
            notes=(*walk.notes, *self._notes),
            batch=walk.batch.size,
        )

    def _write(self, record: FitRecord) -> None:
        Path(self._request.answer).write_bytes(msgspec.json.encode(record))
