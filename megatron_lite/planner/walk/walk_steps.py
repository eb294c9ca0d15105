"""Walks training steps without data and without a GPU, on fake tensors, of whose memory a snapshot tells."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_lite.config.plan import BatchSchedule, Plan
from megatron_lite.formats.hardware import CUBLAS_WORKSPACE, cublaslt_workspace_bytes
from megatron_lite.formats.memory_snapshot import MemorySnapshot
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.memory_tags import StepMarks
from megatron_lite.mesh_axes import DATA, TENSOR
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.backend import Backend
from megatron_lite.parallel.groups import Groups
from megatron_lite.phases import BeginPhase
from megatron_lite.planner.walk.fake_backend import HOST, FakeBackend, fake_other_ranks
from megatron_lite.planner.walk.kernels import KEY
from megatron_lite.planner.walk.recording import MAX_WALK_EVENTS, WalkRecording, WithoutData, stand_for_device
from megatron_lite.planner.walk.tracker import CollectiveCounter, RehearsalTracker
from megatron_lite.train.build_replica import build_replica
from megatron_lite.train.step import BatchMaker, TrainingStep

END_OF_DOCUMENT = 0  # any id: nothing is read
Step = Callable[[BeginPhase], object]  # does one training step, whose parts it marks


@dataclass(frozen=True)
class Walked:
    """Snapshot and counts that the walk of one rank's first steps leaves behind."""

    snapshot: MemorySnapshot
    notes: tuple[str, ...] = ()  # what is not in it, in words
    # (dimension of the group, kind, bytes of the whole tensor, times) in the last step, of the micro-batches walked
    collectives: tuple[tuple[str, str, int, int], ...] = ()


def walk_plan(plan: Plan, steps: int, workspace: int) -> Walked:
    """Walk the real model, loss, backward and optimizer under fake tensors, as on one GPU of the plan (or on its CPU).

    No more micro-batches than differ from each other are walked.

    Args:
        plan: This rank's.
        steps: Number of steps to walk.
        workspace: Bytes of each cuBLAS workspace; hardware.CUBLAS_WORKSPACE_SINCE_HOPPER on newer GPUs.

    Raises:
        UserError: A flag names an attention kernel that cannot run.
    """
    notes: list[str] = []
    if plan.device == "cuda":
        outside = "CUDA's own memory"
        if plan.world.size > 1:
            outside += " and NCCL's"
        inside = "nor what a kernel takes and gives back within itself"
        notes.append(f"{outside}, outside of torch's allocator, is not counted, {inside}")
    if plan.compilation.layers:
        notes.append("--torch-compile layers is not rehearsed: compiled layers hold less")
    collectives = CollectiveCounter(DATA)
    if plan.layout.tensor == plan.world.size:
        collectives = CollectiveCounter(TENSOR)
    with fake_other_ranks(plan) as groups:
        snapshot = walk(
            lambda: prepare(plan, groups, FakeBackend()),
            steps,
            plan.device,
            workspace,
            collectives,
            cublaslt_workspace_bytes(plan.rank_shape.adds_biases),
        )
    counted = sorted((*one, times) for one, times in collectives.calls.items())
    return Walked(snapshot, tuple(notes), tuple(counted))


def walk(
    prepare: Callable[[], Step],
    steps: int,
    device: str,
    workspace: int = CUBLAS_WORKSPACE,
    collectives: CollectiveCounter | None = None,
    cublaslt_workspace: int = 0,
) -> MemorySnapshot:
    """Take a snapshot of some training steps, as on a GPU or a CPU.

    Args:
        prepare: Makes model and optimizer, and returns the step: step(phase), where `with phase(Phase.FORWARD):` marks
            its parts. Both must take "cpu" for the device.
        steps: Number of steps to walk.
        device: cuda or cpu.
        workspace: Bytes of each cuBLAS workspace, on cuda.
        collectives: Where those of the last step are counted.
        cublaslt_workspace: Bytes that cuBLASLt keeps for itself, on cuda; 0 where it shares cuBLAS'.
    """
    place = StepMarks()
    tracker = RehearsalTracker(place, MAX_WALK_EVENTS, collectives or CollectiveCounter())
    recording = WalkRecording(place, tracker)
    # tensors without data are on the CPU, whatever device they stand for
    with stand_for_device(device, KEY, WithoutData()):
        recording.start()
        try:
            step = prepare()
            if device == "cuda":
                recording.add_workspaces(workspace, cublaslt_workspace)
            watching = Instruments([place], sys.stderr.write)
            for number in range(1, steps + 1):
                tracker.begin_step()
                with watching.step(number):
                    step(watching.phase)
        finally:
            recording.stop()
        # before the model is let go of
        return recording.take_snapshot()


def prepare(plan: Plan, groups: Groups, backend: Backend) -> Step:
    """Make everything of a run that holds device memory.

    Args:
        plan: This rank's.
        groups: Of ranks, among which this one is.
        backend: Fills in what depends on data and devices.

    Returns:
        A step of no more micro-batches than differ from each other.
    """
    replica = build_replica(plan, groups, backend)
    optimizer = Optimizer(
        plan, replica.parameters, HOST, replica.sum_over_ranks, replica.counted, replica.names, replica.shares
    )
    micro_batches = min(plan.micro_batches(plan.train_samples), _count_different_micro_batches(plan))
    shortened = replace(plan, batch=BatchSchedule(plan.samples_per_pass * micro_batches))
    batch_maker = BatchMaker(plan.args.data, plan.layout, HOST, END_OF_DOCUMENT)
    step = TrainingStep(shortened, replica, optimizer, batch_maker)

    def make_batches() -> Iterator[Tensor]:
        while True:
            yield torch.empty(plan.args.training.micro_batch_size, plan.shape.seq_length + 1, dtype=torch.int64)

    return lambda phase: step(make_batches(), 0, phase)


def _count_different_micro_batches(plan: Plan) -> int:
    """Count the micro-batches of a step that differ in memory.

    The first micro-batch finds no gradients, those after it do; among several ranks the last lets go of its own copies
    while it reduces. All between are alike.
    """
    stages = plan.stage.stages
    if len(plan.stage.chunks) > 1 or plan.stage.splits_backward:
        return 3 * stages
    of_one_stage = 2 if plan.world.size == 1 else 3
    return of_one_stage + stages - 1
