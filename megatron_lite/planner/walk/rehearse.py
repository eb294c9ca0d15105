"""Runs a plan's training steps without data and without a GPU, to tell exactly which memory they take, and when.

python -m megatron_lite.planner.walk.rehearse < REQUEST is for programs that do not import torch. REQUEST is JSON: flags
of the trainer, world (fields of World), vocab_size, snapshot (a path to write), workspace (bytes of one of cuBLAS').
Prints the figures as JSON, without the snapshot. Exit code 2 and one line for each mistake of the user.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_lite.analysis.memory.read import analyze_snapshot
from megatron_lite.caching_allocator import rounded
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import BatchSchedule, Plan, resolve
from megatron_lite.config.world import World
from megatron_lite.errors import UserError
from megatron_lite.formats.hardware import CUBLAS_THREADS, CUBLAS_WORKSPACE, cublaslt_workspace_bytes
from megatron_lite.formats.memory_snapshot import MemorySnapshot, TraceEvent
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.memory_summary import describe_place, operation, site
from megatron_lite.instruments.memory_tags import ModuleHooks, StepMarks
from megatron_lite.instruments.snapshot_format import write_snapshot
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.backend import Backend
from megatron_lite.parallel.groups import Groups
from megatron_lite.phases import BeginPhase
from megatron_lite.planner.walk.fake_backend import HOST, FakeBackend, fake_other_ranks
from megatron_lite.planner.walk.kernels import InPlaceGradients, replace_kernels
from megatron_lite.planner.walk.tracker import CollectiveCounter, RehearsalTracker
from megatron_lite.train.build_replica import build_replica
from megatron_lite.train.step import BatchMaker, TrainingStep

MAX_WALK_EVENTS = 10_000_000
SIMULATED = "rehearsed without data; addresses and segments are where CUDA's caching allocator would put them"
END_OF_DOCUMENT = 0  # any id: nothing is read
Step = Callable[[BeginPhase], object]  # does one training step, whose parts it marks


def make_empty_snapshot() -> MemorySnapshot:
    """Make the snapshot of a process that holds nothing."""
    return {"segments": [], "device_traces": [[]], "allocator_settings": {}, "external_annotations": []}


@dataclass(frozen=True)
class Rehearsal:
    """Memory of one rank's first steps. Bytes are in steps of 512, as CUDA's allocator hands them out."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    expandable_reserved_bytes: int  # with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    phase: str  # of the peak, a Phase's value, or recompute
    where: str  # "forward of step 1 in decoder.layers.3.mlp: aten.gelu.default from gelu_tanh (model/gpt.py:10)"
    # bytes at the peak, by formats.memory_categories.CATEGORIES, largest first; they add up to the peak
    categories: dict[str, int]
    notes: tuple[str, ...]  # what is not in it, in words
    # (dimension of the group, kind, bytes of the whole tensor, times) in the last step, of the micro-batches walked
    collectives: tuple[tuple[str, str, int, int], ...] = ()
    snapshot: MemorySnapshot = field(default_factory=make_empty_snapshot, repr=False)


def rehearse(plan: Plan, steps: int = 2, workspace: int = CUBLAS_WORKSPACE) -> Rehearsal:
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
    all_ranks_split_layers = plan.layout.tensor == plan.world.size
    collectives = CollectiveCounter("tensor" if all_ranks_split_layers else "data")
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
    return replace(summarize_walk(snapshot, tuple(notes)), collectives=tuple(counted))


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
    hooks = ModuleHooks(place, in_backward=False)
    # operations that torch has no rule for fail; it would run them on real memory of the same size
    without_data = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    with replace_kernels(device), without_data, InPlaceGradients(device):
        tracker.start()
        hooks.attach()
        try:
            step = prepare()
            if device == "cuda":
                for _ in range(CUBLAS_THREADS):
                    tracker.add_unseen("cublasWorkspace", workspace)
            if device == "cuda" and cublaslt_workspace:
                tracker.add_unseen("cublasLtWorkspace", cublaslt_workspace)
            watching = Instruments([place], sys.stderr.write)
            for number in range(1, steps + 1):
                tracker.begin_step()
                with watching.step(number):
                    step(watching.phase)
        finally:
            hooks.detach()
            tracker.stop()
        snapshot = tracker.snapshot()  # before the model is let go of
    if tracker.failure is not None:
        raise tracker.failure
    snapshot["allocator_settings"]["simulated"] = SIMULATED
    return snapshot


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
    step = TrainingStep(shortened, replica, optimizer, BatchMaker(plan.args.data, plan.layout, HOST, END_OF_DOCUMENT))

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


def summarize_walk(snapshot: MemorySnapshot, notes: tuple[str, ...] = ()) -> Rehearsal:
    """Compute the figures of a snapshot.

    Args:
        snapshot: That `walk` returned.
        notes: What is not in it, in words.
    """
    read = analyze_snapshot(snapshot, Path("rehearsal"))
    replayed_bytes = read.fragmentation.replay_reserved_bytes
    assert replayed_bytes is not None  # the record is whole
    highest = _find_highest(snapshot["device_traces"][0])
    place = describe_place(highest["user_metadata"])
    frames = highest["frames"]
    return Rehearsal(
        allocated_peak_bytes=read.peak_bytes,
        reserved_peak_bytes=read.fragmentation.reserved_bytes,
        expandable_reserved_bytes=replayed_bytes,
        phase=read.peak_phase,
        where=f"{place}: {operation(frames)}{site(frames)}",
        categories={held.category: held.num_bytes for held in read.held},
        notes=notes,
        snapshot=snapshot,
    )


def _find_highest(events: list[TraceEvent]) -> TraceEvent:
    """Find the allocation that first reaches the peak. Rehearsals begin with nothing."""
    held_bytes = 0
    most_bytes = 0
    highest = events[0]
    for event in events:
        if event["action"] == "alloc":
            held_bytes += rounded(event["size"])
            if held_bytes > most_bytes:
                most_bytes = held_bytes
                highest = event
        elif event["action"] == "free_completed":
            held_bytes -= rounded(event["size"])
    return highest


def main() -> int:
    """Rehearse what standard input asks for. Returns the exit code."""
    request = json.load(sys.stdin)
    plan = resolve(read_command_line(request["flags"]).args, World(**request["world"]), request["vocab_size"])
    try:
        found = rehearse(plan, workspace=request["workspace"])
    except UserError as error:
        print("\n".join(error.lines), file=sys.stderr)
        return error.exit_code
    write_snapshot(Path(request["snapshot"]), found.snapshot)
    names = [field.name for field in fields(found) if field.name != "snapshot"]
    print(json.dumps({name: getattr(found, name) for name in names}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
