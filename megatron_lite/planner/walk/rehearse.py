"""Runs a plan's training steps without data and without a GPU, to tell exactly which memory they take, and when.

python -m megatron_lite.planner.walk.rehearse < REQUEST is for programs that do not import torch. REQUEST is JSON: flags of the trainer, world (fields of World), vocab_size, snapshot (a path to write), workspace (bytes of one of cuBLAS'). Prints the figures
as JSON, without the snapshot. Exit code 2 and one line for each mistake of the user.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_lite.analysis.memory.read import analyze_snapshot
from megatron_lite.config.command_line import read_command_line
from megatron_lite.config.plan import BatchSchedule, Plan, resolve
from megatron_lite.config.world import World
from megatron_lite.errors import UserError
from megatron_lite.instruments.base import Instruments
from megatron_lite.instruments.memory_summary import describe_place, operation, site
from megatron_lite.instruments.memory_tags import ModuleHooks, Place
from megatron_lite.instruments.snapshot_format import write_snapshot
from megatron_lite.marks import GRADIENT_BUFFER, mark_memory
from megatron_lite.model.gpt import DTYPES, GPT
from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel import data_parallel
from megatron_lite.parallel.context_parallel import attend_across
from megatron_lite.parallel.data_parallel import replicate
from megatron_lite.parallel.groups import Groups, make_groups
from megatron_lite.parallel.layers import recompute_layers
from megatron_lite.parallel.pipeline import Pipeline, cut_model
from megatron_lite.planner.caching_allocator import rounded
from megatron_lite.planner.hardware import CUBLAS_THREADS, CUBLAS_WORKSPACE
from megatron_lite.planner.walk.kernels import InPlaceGradients, replace_kernels
from megatron_lite.planner.walk.tracker import CollectiveCounter, RehearsalTracker
from megatron_lite.train.build_model import put_on_layers
from megatron_lite.train.choose_kernels import choose_kernels, choose_losses, choose_plan_attention
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.units import MIB

# --- one rank's replica without other ranks: a stand-in for DistributedDataParallel, which cannot run without data
#
# It holds what torch 2.13's reducer holds with gradient_as_bucket_view (torch/csrc/distributed/c10d/reducer.cpp): all
# gradients in one bucket at first, then, from the second forward on, in buckets filled in the order in which gradients came.
# A gradient is computed as a tensor of its own, copied into its bucket and from then on a view of it. Gradients of
# micro-batches that are not reduced stay tensors of their own until the last one. What NCCL takes is outside of torch.


@mark_memory(GRADIENT_BUFFER)
class Bucket:
    """Gradients of some parameters in one buffer, with the methods of dist.GradBucket that communication hooks call."""

    def __init__(self, parameters: list[nn.Parameter]):
        first = parameters[0]
        self._parameters, self.missing = parameters, len(parameters)
        self._flat = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        parts = self._flat.split([p.numel() for p in parameters])
        self._views = [part.view_as(p) for p, part in zip(parameters, parts)]

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        return self._views

    def buffer(self) -> Tensor:
        return self._flat


class BucketedReplica:
    """A stand-in for DistributedDataParallel and its reducer, without other ranks."""

    def __init__(self, model: nn.Module, gradient_as_bucket_view: bool, bucket_cap_mb: float, process_group=None):
        assert gradient_as_bucket_view, "other gradients are not rehearsed"
        self._model, self._cap = model, int(bucket_cap_mb * MIB)
        self.reducer, self._reducing, self._rebuilt = self, False, False
        self._hook: Callable[[object, Bucket], object] = lambda _, bucket: dist.all_reduce(bucket.buffer())
        self._hook_state: object = None
        self._arrived: list[nn.Parameter] = []
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._lay_out([parameters])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def register_comm_hook(self, state, hook):
        """Reduce buckets by `hook`."""
        self._hook_state, self._hook = state, hook

    def no_sync(self):
        """Inside the block, gradients are added up and not reduced."""
        return contextlib.nullcontext()

    def prepare_for_backward(self, _outputs):
        """Reduce the gradients of the next backward."""
        self._reducing, self._unreduced = True, len({bucket for bucket, _ in self._bucket_of.values()})

    def __call__(self, *inputs) -> Tensor:
        if self._arrived and not self._rebuilt:
            self._rebuilt = True
            self._bucket_of.clear()
            groups, filled = [[]], 0
            for parameter in self._arrived:  # a bucket is closed by the gradient that brings it to its size
                if filled >= self._cap:
                    groups.append([])
                    filled = 0
                groups[-1].append(parameter)
                filled += parameter.numel() * parameter.element_size()
            self._lay_out(groups)
        return self._model(*inputs)

    def _lay_out(self, groups: list[list[nn.Parameter]]):
        self._bucket_of = {}
        for group in groups:
            bucket = Bucket(group)
            self._bucket_of |= {p: (bucket, view) for p, view in zip(group, bucket.gradients())}

    @torch.no_grad()
    def _arrive(self, parameter: nn.Parameter):
        if not self._reducing:
            return
        if not self._rebuilt:
            self._arrived.append(parameter)
        bucket, view = self._bucket_of[parameter]
        computed = parameter.grad  # autograd holds it until the bucket is on its way
        parameter.grad = view.copy_(computed)
        bucket.missing -= 1
        if not bucket.missing:
            bucket.missing = len(bucket.parameters())
            self._hook(self._hook_state, bucket)
            self._unreduced -= 1
            self._reducing = self._unreduced > 0


@contextlib.contextmanager
def fake_other_ranks(plan: Plan, collectives: CollectiveCounter) -> Iterator:
    """Inside the block, collectives end at once. Yields the groups of ranks; `collectives` counts sums that are no operations.

    fully_shard, split layers and stages of a pipeline run as they are, over torch's fake process group; for DistributedDataParallel there is a stand-in,
    which needs none.
    """

    def answer(tensor: Tensor, op=None, group: dist.ProcessGroup | None = None, async_op: bool = False):
        collectives.add("all-reduce", group, tensor.numel() * tensor.itemsize)
        future = torch.futures.Future()
        future.set_result([tensor])
        return SimpleNamespace(get_future=lambda: future) if async_op else None

    with (
        patch.object(dist, "all_reduce", answer),
        patch.object(data_parallel, "DistributedDataParallel", BucketedReplica),
    ):
        if plan.sharding is None and plan.layout.data == plan.world.size:
            yield Groups(None, None, None, Pipeline(plan.stage))
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=plan.world.rank, world_size=plan.world.size)
        try:
            yield make_groups(plan, HOST)
        finally:
            dist.destroy_process_group()


# --- A plan's training steps, walked without data and without a GPU: exactly which memory they take, and when

MAX_EVENTS = 10_000_000
SIMULATED = "rehearsed without data; addresses and segments are where CUDA's caching allocator would put them"
END_OF_DOCUMENT = 0  # any id: nothing is read
HOST = torch.device("cpu")


@dataclass(frozen=True)
class Rehearsal:
    """Memory of one rank's first steps. Bytes are in steps of 512, as CUDA's allocator hands them out."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    expandable_reserved_bytes: int  # with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    phase: str  # of the peak, a Phase's value, or recompute
    where: str  # "forward of step 1 in decoder.layers.3.mlp: aten.gelu.default from gelu_tanh (model/gpt.py:10)"
    categories: dict[str, int]  # at the peak, by prediction.CATEGORIES, largest first; adds up to the peak
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
    with fake_other_ranks(plan, collectives) as groups:
        snapshot = walk(lambda: prepare(plan, groups), steps, plan.device, workspace, collectives)
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
) -> dict:
    """A snapshot in the form of torch.cuda.memory._snapshot() of `steps` training steps as on `device`, cuda or cpu.

    prepare() makes model and optimizer, and returns the step: step(phase), where `with phase(Phase.FORWARD):` marks its
    parts. Both must take "cpu" for the device. workspace: bytes of each cuBLAS workspace, on cuda. collectives: those of the last step
    are counted there.
    """
    place = Place()
    tracker = RehearsalTracker(place, MAX_EVENTS, collectives or CollectiveCounter())
    hooks = ModuleHooks(place, in_backward=False)
    # operations that torch has no rule for fail; it would run them on real memory of the same size
    without_data = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    with replace_kernels(device), without_data, InPlaceGradients(device):
        tracker.start()
        hooks.attach()
        try:
            step = prepare()
            for _ in range(CUBLAS_THREADS if device == "cuda" else 0):
                tracker.add_unseen("cublasWorkspace", workspace)
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


def prepare(plan: Plan, groups: Groups, losses: Callable[..., Tensor] | None = None) -> Callable:
    """Make everything of a run that holds device memory; returns its step(phase). losses: as in model.gpt.GPT; the plan's if None."""
    replica = replicate(plan, _build_model(plan, groups, losses), groups)
    optimizer = Optimizer(plan, replica.parameters, HOST, replica.sum_over_ranks, replica.counted)
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


def _build_model(plan: Plan, groups: Groups, losses) -> nn.Module:
    """The model in the plan's precision, as fake parameters cannot be cast in place. On the meta device where ranks share it out."""
    a, dtype = plan.args, DTYPES[plan.precision]
    with_attention = plan
    if a.model.attention_backend == "fused" and plan.device == "cuda":
        # torch refuses cuDNN's attention without a GPU; what torch takes otherwise keeps the same tensors
        with_attention = replace(plan, args=replace(a, model=replace(a.model, attention_backend="auto")))
    before = torch.get_default_dtype()
    kernels = choose_kernels(plan)
    attend = choose_plan_attention(with_attention, HOST, kernels)
    among = groups.tensor
    if groups.context is not None:
        attend = attend_across(attend, plan.layout, groups.context, plan.device)
    torch.set_default_dtype(dtype if plan.sharding is None else before)
    try:
        in_parts = plan.sharding is not None or plan.stage.stages > 1
        with torch.device("meta") if in_parts else HOST:
            model = GPT(plan.rank_shape, attend, losses or choose_losses(plan, kernels, among, eager=True))
        cut_model(model, groups.pipeline)
        if in_parts and plan.sharding is None:
            for module in model.modules():  # to_empty swaps parameters, which fake ones do not let it
                for name, parameter in module.named_parameters(recurse=False):
                    setattr(module, name, nn.Parameter(torch.empty_like(parameter, device=HOST)))
    finally:
        torch.set_default_dtype(before)
    put_on_layers(model, plan, kernels, groups)
    recompute_layers(model.decoder.layers, plan.stage.chunks, plan.recomputed_layers)
    return model


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
