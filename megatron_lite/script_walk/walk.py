"""Walks a training script that knows nothing of it, and records the memory of its device.

The script runs unchanged in this process: on a GPU that is not there, or on the CPU, with tensors that have no data.
For comparison it can run with data, on the CPU.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from megatron_lite.caching_allocator import Allocation, rounded
from megatron_lite.errors import UserError
from megatron_lite.formats.memory_snapshot import Frame, MemorySnapshot
from megatron_lite.instruments.memory_tags import StepMarks
from megatron_lite.instruments.memory_tracker import StorageTracker
from megatron_lite.instruments.replacing import put_in_place
from megatron_lite.instruments.snapshot_format import ALLOC, FREE
from megatron_lite.planner.walk.recording import MAX_WALK_EVENTS, WalkRecording, WithoutData, stand_for_device
from megatron_lite.planner.walk.tracker import CollectiveCounter, RehearsalTracker
from megatron_lite.script_walk.cuda_answers import answer_as
from megatron_lite.script_walk.device_tensors import (
    DeviceTensors,
    MovedBatch,
    let_torch_compute_in_lists,
    make_weights_without_data,
)
from megatron_lite.script_walk.driverless_cuda import CannotPretend, describe_untried, let_torch_see_a_gpu
from megatron_lite.script_walk.fake_ranks import stand_for_other_ranks
from megatron_lite.script_walk.repeated_forwards import RepeatedForwards
from megatron_lite.script_walk.script_steps import ScriptSteps
from megatron_lite.script_walk.unknown_values import Branches, find_line_of_script, give_unknown_values

UNCOMPILED = "torch.compile was left out: compiled code holds less"
AUTOGRAD_KEYS = {"cuda": "AutogradCUDA", "cpu": "AutogradCPU"}


@dataclass(frozen=True)
class PretendedGpu:
    """The GPU that a script finds."""

    name: str  # as torch.cuda.get_device_name gives it
    capability: tuple[int, int]
    total_bytes: int
    workspace_bytes: int  # of one of cuBLAS' two


class CpuTracker(RehearsalTracker):
    """Records what is allocated on the CPU, with data or without."""

    STORAGES = ("cpu", "meta")


class GpuTracker(RehearsalTracker):
    """Records what is allocated on the GPU that is not there."""

    DEVICE = "cuda"

    def __init__(self, place: StepMarks, most: int, collectives: CollectiveCounter) -> None:
        super().__init__(place, most, collectives)
        self._held_bytes = 0
        self._peak_bytes = 0

    def count_allocated(self) -> int:
        """Return the bytes that tensors of the GPU hold now."""
        return self._held_bytes

    def count_peak(self) -> int:
        """Return the most bytes that tensors of the GPU held so far."""
        return self._peak_bytes

    def _add(self, action: str, allocation: Allocation, where: tuple[list[Frame], str] | None = None) -> None:
        super()._add(action, allocation, where)
        if action == ALLOC:
            self._held_bytes += rounded(allocation.size)
            self._peak_bytes = max(self._peak_bytes, self._held_bytes)
        elif action == FREE:
            self._held_bytes -= rounded(allocation.size)


class ScriptWalk:
    """The walk of this process' script.

    Args:
        gpu: Where it runs; None: on the CPU.
        batch: Its batch.
        finish: Called where the walk ends.
    """

    def __init__(self, gpu: PretendedGpu | None, batch: MovedBatch, finish: Callable[["ScriptWalk"], object]) -> None:
        self.branches = Branches()
        self.batch = batch
        # what the walk leaves out, in sentences
        self.notes = describe_untried(torch.__version__)
        self._gpu = gpu
        self._finish = finish
        self._place = StepMarks()
        self._set_tracker(StorageTracker(self._place, MAX_WALK_EVENTS))
        self._forwards = RepeatedForwards()
        self._open = contextlib.ExitStack()  # for the rest of the process

    def _set_tracker(self, tracker: StorageTracker) -> None:
        """Let a recorder see what is allocated: there is one for each kind of device."""
        self._tracker = tracker
        self._recording = WalkRecording(self._place, tracker)

    def start(self) -> None:
        """Start, for the rest of the process.

        Raises:
            UserError: This build of torch cannot be shown a GPU.
        """
        if self._gpu is None:
            device = CpuTracker.DEVICE
            self._set_tracker(CpuTracker(self._place, MAX_WALK_EVENTS, CollectiveCounter()))
        else:
            device = GpuTracker.DEVICE
            self._set_tracker(self._show_gpu(self._gpu))
            self._name_recurrent_layers()
        without_data = WithoutData()
        tensors = DeviceTensors(without_data, self.batch, self.branches)
        let_torch_compute_in_lists()
        make_weights_without_data(without_data)
        give_unknown_values(self.branches)
        self._leave_uncompiled()
        stand_for_other_ranks()
        self._forwards.attach()
        # frames of the caller are seen in backward, too
        self._open.enter_context(torch.autograd.set_multithreading_enabled(False))
        tensors.prepare_torch()
        self._open.enter_context(stand_for_device(device, AUTOGRAD_KEYS[device], tensors))
        self.record()
        if self._gpu is not None:
            self._recording.add_workspaces(self._gpu.workspace_bytes)

    def record(self) -> None:
        """Start recording only: the script computes with data."""
        self._recording.start()
        ScriptSteps(self._place, self._begin_step, self._end).attach()

    def _show_gpu(self, gpu: PretendedGpu) -> GpuTracker:
        """Let the script find the GPU. Returns the recorder of its memory."""
        try:
            let_torch_see_a_gpu()
        except CannotPretend as error:
            raise UserError(f"{error}; walk the script as on a CPU instead: --cpu.") from None
        tracker = GpuTracker(self._place, MAX_WALK_EVENTS, CollectiveCounter())
        answer_as(gpu.name, gpu.capability, gpu.total_bytes, tracker)
        return tracker

    def _leave_uncompiled(self) -> None:
        """Let torch.compile return what it is given: compiled code is not walked."""

        def leave(model: object = None, **options: object) -> object:
            self._note(UNCOMPILED)
            return model if model is not None else lambda function: function

        put_in_place(torch, "compile", leave)
        put_in_place(nn.Module, "compile", lambda module, *arguments, **options: leave())

    def _note(self, sentence: str) -> None:
        if sentence not in self.notes:
            self.notes.append(sentence)

    def _name_recurrent_layers(self) -> None:
        """Name the lines that call nn.LSTM and its kin on the GPU: what cuDNN reserves for them is not known."""

        def enter(module: nn.Module, inputs: tuple[object, ...]) -> None:
            if isinstance(module, nn.RNNBase):
                kind = type(module).__name__
                self._note(
                    f"{find_line_of_script()}: nn.{kind} takes cuDNN's memory on a GPU, which is not in these figures"
                )

        register_module_forward_pre_hook(enter)

    def _begin_step(self) -> None:
        self._tracker.begin_step()
        self._forwards.begin_step()

    def _end(self) -> None:
        self._recording.stop()
        self._finish(self)

    def take_snapshot(self) -> MemorySnapshot:
        """Take the snapshot of all that was recorded.

        Raises:
            Exception: What went wrong while recording.
        """
        return self._recording.take_snapshot()
