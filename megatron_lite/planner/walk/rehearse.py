"""Runs a plan's training steps without data and without a GPU, to tell exactly which memory they take, and when.

python -m megatron_lite.planner.walk.rehearse < REQUEST is for programs that do not import torch. REQUEST is JSON: flags of the trainer, world (fields of World), vocab_size, snapshot (a path to write), workspace (bytes of one of cuBLAS'). Prints the figures
as JSON, without the snapshot. Exit code 2 and one line for each mistake of the user.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_lite.analysis.memory.read import analyze_snapshot
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import BatchSchedule, Plan, resolve
from megatron_lite.config.world import World
from megatron_lite.errors import UserError
from megatron_lite.formats.caching_allocator import rounded
from megatron_lite.formats.hardware import CUBLAS_THREADS, CUBLAS_WORKSPACE, cublaslt_workspace_bytes
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.memory_summary import describe_place, operation, site
from megatron_lite.instruments.memory_tags import ModuleHooks, StepMarks
from megatron_lite.instruments.snapshot_format import write_snapshot
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.backend import Backend
from megatron_lite.parallel.groups import Groups
from megatron_lite.planner.walk.fake_backend import HOST, FakeBackend, fake_other_ranks
from megatron_lite.planner.walk.kernels import InPlaceGradients, replace_kernels
from megatron_lite.planner.walk.tracker import CollectiveCounter, RehearsalTracker
from megatron_lite.train.build_replica import build_replica
from megatron_lite.train.step import BatchMaker, TrainingStep

MAX_EVENTS = 10_000_000
SIMULATED = "rehearsed without data; addresses and segments are where CUDA's caching allocator would put them"
END_OF_DOCUMENT = 0  # any id: nothing is read


@dataclass(frozen=True)
class Rehearsal:
    """Memory of one rank's first steps. Bytes are in steps of 512, as CUDA's allocator hands them out."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    expandable_reserved_bytes: int  # with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    phase: str  # of the peak, a Phase's value, or recompute
    where: str  # "forward of step 1 in decoder.layers.3.mlp: aten.gelu.default from gelu_tanh (model/gpt.py:10)"
    categories: dict[
        str, int
    ]  # at the peak, by formats.memory_categories.CATEGORIES, largest first; adds up to the peak
    notes: tuple[str, ...]  # what is not in it, in words
    # (dimension of the group, kind, bytes of the whole tensor, times) in the last step, of as many micro-batches as were walked
    collectives: tuple[tuple[str, str, int, int], ...] = ()
    snapshot: dict = field(default_factory=dict, repr=False)  # in the form of torch.cuda.memory._snapshot()


def rehearse(plan: Plan, steps: int = 2, workspace: int = CUBLAS_WORKSPACE) -> Rehearsal:
    """Walk the real model, loss, backward and optimizer under fake tensors, as on one GPU of the plan (or on its CPU).

    No more micro-batches than differ from each other are walked. workspace: bytes of each cuBLAS
    workspace; hardware.CUBLAS_WORKSPACE_SINCE_HOPPER on newer GPUs.
    Raises UserError where a flag names an attention kernel that cannot run.
    """
    notes = []
    if plan.device == "cuda":
        outside = "CUDA's own memory" + (" and NCCL's" if plan.world.size > 1 else "")
        inside = "nor what a kernel takes and gives back within itself"
        notes.append(f"{outside}, outside of torch's allocator, is not counted, {inside}")
    if plan.compilation.layers:
        notes.append("--torch-compile layers is not rehearsed: compiled layers hold less")
    collectives = CollectiveCounter("tensor" if plan.layout.tensor == plan.world.size else "data")
    with fake_other_ranks(plan) as groups:
        snapshot = walk(
            lambda: prepare(plan, groups, FakeBackend()),
            steps,
            plan.device,
            workspace,
            collectives,
            cublaslt_workspace_bytes(plan.rank_shape.adds_biases),
        )
    return replace(
        summarize_walk(snapshot, tuple(notes)),
        collectives=tuple(sorted((*one, times) for one, times in collectives.calls.items())),
    )


def walk(
    prepare: Callable[[], Callable],
    steps: int,
    device: str,
    workspace: int = CUBLAS_WORKSPACE,
    collectives: CollectiveCounter | None = None,
    cublaslt_workspace: int = 0,
) -> dict:
    """A snapshot in the form of torch.cuda.memory._snapshot() of some training steps, as on a GPU or a CPU.

    Args:
        prepare: Makes model and optimizer, and returns the step: step(phase), where `with phase(Phase.FORWARD):` marks its
            parts. Both must take "cpu" for the device.
        steps: Number of steps to walk.
        device: cuda or cpu.
        workspace: Bytes of each cuBLAS workspace, on cuda.
        collectives: Where those of the last step are counted.
        cublaslt_workspace: Bytes that cuBLASLt keeps for itself, on cuda; 0 where it shares cuBLAS'.
    """
    place = StepMarks()
    tracker = RehearsalTracker(place, MAX_EVENTS, collectives or CollectiveCounter())
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


def prepare(plan: Plan, groups: Groups, backend: Backend) -> Callable:
    """Make everything of a run that holds device memory; returns its step(phase)."""
    replica = build_replica(plan, groups, backend)
    optimizer = Optimizer(plan, replica.parameters, HOST, replica.sum_over_ranks, replica.counted, replica.names)
    # The first micro-batch finds no gradients, those after it do; among several ranks the last lets go of its own copies
    # while it reduces. All between are alike.
    chunks, stages = len(plan.stage.chunks), plan.stage.stages
    different = (2 if plan.world.size == 1 else 3) + stages - 1
    if chunks > 1 or plan.stage.splits_backward:
        different = 3 * stages
    different = min(plan.micro_batches(plan.train_samples), different)
    shortened = replace(plan, batch=BatchSchedule(plan.samples_per_pass * different))
    step = TrainingStep(shortened, replica, optimizer, BatchMaker(plan.args.data, plan.layout, HOST, END_OF_DOCUMENT))

    def make_batches():
        while True:
            yield torch.empty(plan.args.training.micro_batch_size, plan.shape.seq_length + 1, dtype=torch.int64)

    return lambda phase: step(make_batches(), 0, phase)


def summarize_walk(snapshot: dict, notes: tuple[str, ...] = ()) -> Rehearsal:
    """The figures of a snapshot that `walk` returned."""
    read, held, most, highest = analyze_snapshot(snapshot, Path("rehearsal")), 0, 0, {}
    for event in snapshot["device_traces"][0]:  # which allocation first reaches the peak; rehearsals begin with nothing
        if event["action"] == "alloc":
            held += rounded(event["size"])
            if held > most:
                most, highest = held, event
        elif event["action"] == "free_completed":
            held -= rounded(event["size"])
    return Rehearsal(
        allocated_peak_bytes=read.peak_bytes,
        reserved_peak_bytes=read.fragmentation.reserved_bytes,
        expandable_reserved_bytes=read.fragmentation.replay_reserved_bytes,
        phase=read.peak_phase,
        where=f"{describe_place(highest['user_metadata'])}: {operation(highest['frames'])}{site(highest['frames'])}",
        categories={held.category: held.num_bytes for held in read.held},
        notes=notes,
        snapshot=snapshot,
    )


def main() -> int:
    """Rehearse what standard input asks for; returns the exit code."""
    request = json.load(sys.stdin)
    plan = resolve(read_command_line(request["flags"]).args, World(**request["world"]), request["vocab_size"])
    try:
        found = rehearse(plan, workspace=request["workspace"])
    except UserError as error:
        print("\n".join(error.lines), file=sys.stderr)
        return error.exit_code
    write_snapshot(Path(request["snapshot"]), found.snapshot)
    print(json.dumps({field.name: getattr(found, field.name) for field in fields(found) if field.name != "snapshot"}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
