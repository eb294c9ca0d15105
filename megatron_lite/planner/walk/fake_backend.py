"""Builds replicas without data and without other ranks, whose steps take the memory of real ones."""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

# by its name: a script that is walked finds another function in its place
from torch.distributed.distributed_c10d import init_process_group

from megatron_lite.config.layout import is_of_experts
from megatron_lite.config.plan import Plan
from megatron_lite.marks import GRADIENT_BUFFER, mark_memory
from megatron_lite.model.attention import Attend, Scope
from megatron_lite.model.experts import RouteReader
from megatron_lite.model.gpt import DTYPES, GPT
from megatron_lite.model.kernels import Kernels
from megatron_lite.parallel.groups import Groups, make_groups
from megatron_lite.parallel.tensor_parallel import TensorGroup
from megatron_lite.planner.walk.even_routing import make_even_reader
from megatron_lite.train.choose_kernels import choose_losses, choose_plan_attention
from megatron_lite.units import MIB

FLASH = "sdpa flash"  # as choose_attention names it
HOST = torch.device("cpu")  # tensors without data are said to lie here, whatever device they stand for


class FakeBackend:
    """The Backend of walks, inside of FakeTensorMode. It times nothing, draws nothing and compiles nothing."""

    device = HOST

    def choose_attention(self, plan: Plan, kernels: Kernels, tensor: TensorGroup | None) -> Attend:
        """Choose the kernel that the plan's device would take."""
        model = plan.args.model
        if model.attention_backend == "fused" and plan.device == "cuda":
            # torch refuses cuDNN's attention without a GPU; what torch takes otherwise keeps the same tensors
            model = replace(model, attention_backend="auto")
            plan = replace(plan, args=replace(plan.args, model=model))
        attend = choose_plan_attention(plan, HOST, kernels)
        if attend.name == FLASH and plan.masks_attention:
            return replace(attend, function=partial(_attend_without_data, attend.function, plan.device == "cuda"))
        return attend

    def choose_losses(self, plan: Plan, kernels: Kernels, tensor: TensorGroup | None) -> Callable[..., Tensor]:
        """Choose the loss that is not compiled."""
        return choose_losses(plan, kernels, tensor, eager=True)

    def fill_parameters(self, model: GPT, plan: Plan) -> None:
        """Give parameters memory in the plan's precision at once: torch cannot cast fake ones in place."""
        dtype = DTYPES[plan.precision]
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                filled = nn.Parameter(torch.empty_like(parameter, dtype=dtype, device=HOST))
                module.register_parameter(name, filled)

    def choose_route_reader(self, plan: Plan) -> RouteReader:
        """Choose the reader that has no data, and finds routes even."""
        return make_even_reader(plan)

    def compile_layers(self, model: GPT, plan: Plan) -> None:
        """Leave layers as they are."""

    def average_gradients(
        self, model: nn.Module, bucket_mib: float, group: dist.ProcessGroup | None
    ) -> "BucketedReplica":
        """Wrap the model in a stand-in for DistributedDataParallel, which cannot run without data."""
        return BucketedReplica(model, bucket_mib, group)


def _attend_without_data(
    function: Callable[..., Tensor],
    on_gpu: bool,
    q_BNTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scope: Scope,
    dropout: float,
    layer_number: int,
) -> Tensor:
    """Attend with the memory of flash kernels, which depends on neither documents nor, on a GPU, windows.

    Args:
        function: The kernel; what follows `on_gpu` is as in Attend.
        on_gpu: Whether the plan's device is a GPU.
    """
    if not on_gpu:
        out_BNTD = function(q_BNTD, k_BGSD, v_BGSD, scope._replace(edges_E=None), dropout, layer_number)
        # the results of documents are put together
        return out_BNTD if scope.edges_E is None else out_BNTD.clone()
    is_grouped = q_BNTD.shape[1] != k_BGSD.shape[1]
    return F.scaled_dot_product_attention(
        q_BNTD, k_BGSD, v_BGSD, dropout_p=dropout, is_causal=True, enable_gqa=is_grouped
    )


def open_fake_group(rank: int, size: int) -> None:
    """Open torch's fake process group, whose collectives end at once.

    Args:
        rank: That of this process.
        size: Number of ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


@contextlib.contextmanager
def fake_other_ranks(plan: Plan) -> Iterator[Groups]:
    """Make collectives inside the block end at once, over torch's fake process group.

    Yields:
        The plan's groups of ranks.
    """
    open_fake_group(plan.world.rank, plan.world.size)
    try:
        yield make_groups(plan, HOST)
    finally:
        dist.destroy_process_group()


# --- a stand-in for DistributedDataParallel
#
# It holds what torch 2.13's reducer holds (torch/csrc/distributed/c10d/reducer.cpp): all gradients in one bucket at
# first, then, from the second forward on, in buckets filled in the order in which gradients came. A gradient is
# computed as a tensor of its own and copied into its bucket; with gradient_as_bucket_view it is a view of the bucket
# from then on, without it stays beside. Those of micro-batches that are not reduced stay tensors of their own until the
# last one. What NCCL takes is outside of torch.


def divide_into_buckets(parameters: list[nn.Parameter], limits: tuple[int, ...]) -> list[list[nn.Parameter]]:
    """Divide parameters into those of one bucket each, as torch's compute_bucket_assignment_by_size does.

    Args:
        parameters: In the order in which they are put in.
        limits: Bytes from which on a bucket is closed; the last one counts for all further ones of its type.

    Returns:
        Parameters of one type each.
    """
    closed: list[list[nn.Parameter]] = []
    opened: dict[torch.dtype, list[nn.Parameter]] = {}
    filled = Counter[torch.dtype]()
    full = Counter[torch.dtype]()
    for parameter in parameters:
        dtype = parameter.dtype
        opened.setdefault(dtype, []).append(parameter)
        filled[dtype] += parameter.numel() * parameter.element_size()
        if filled[dtype] >= limits[min(full[dtype], len(limits) - 1)]:
            closed.append(opened.pop(dtype))
            full[dtype] += 1
            filled[dtype] = 0
    return [*closed, *opened.values()]


@mark_memory(GRADIENT_BUFFER)
class FakeBucket:
    """Gradients of some parameters in one buffer, with the methods of dist.GradBucket that communication hooks call."""

    def __init__(self, parameters: list[nn.Parameter]):
        first = parameters[0]
        self._parameters = parameters
        self.missing = len(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        parts = self._flat.split(sizes)
        self._views = [part.view_as(parameter) for parameter, part in zip(parameters, parts)]

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients it holds."""
        return self._parameters

    def gradients(self) -> list[Tensor]:
        """Return views of the buffer, one per parameter."""
        return self._views

    def buffer(self) -> Tensor:
        """Return all gradients as one tensor of one dimension."""
        return self._flat


@mark_memory(GRADIENT_BUFFER)
class UsedParameters:
    """Numbers that say which parameters the ranks used in a step, on the host and on the device.

    Args:
        parameters: Those whose gradients are averaged.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        count = len(parameters)
        self._on_host = torch.empty(count, dtype=torch.int32)
        self._on_device = torch.empty(count, dtype=torch.int32, device=parameters[0].device)


class BucketedReplica:
    """A stand-in for DistributedDataParallel, and for its reducer.

    Args:
        model: Whose gradients are averaged.
        bucket_mib: Size of a bucket, in MiB.
        group: The ranks that average; None: all.
        keeps_views: gradient_as_bucket_view: gradients are views of their buckets.
        first_bucket_mib: Size of the first bucket, in MiB; None: that of all.
        rebuilds: Buckets are filled anew in the order in which gradients came; not so with find_unused_parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        bucket_mib: float,
        group: dist.ProcessGroup | None,
        keeps_views: bool = True,
        first_bucket_mib: float | None = None,
        rebuilds: bool = True,
    ):
        self._keeps_views = keeps_views
        self._model = model
        first_mib = bucket_mib if first_bucket_mib is None else first_bucket_mib
        self._limits = (int(first_mib * MIB), int(bucket_mib * MIB))
        self.reducer = self
        self._reducing = False
        self._rebuilt = not rebuilds
        self._group = group
        self._hook: Callable[[object, FakeBucket], object] = self._sum_up
        self._hook_state: object = None
        self._arrived: list[nn.Parameter] = []
        named = model.named_parameters()
        parameters = [p for name, p in named if p.requires_grad and not is_of_experts(name)]
        limits = (sys.maxsize,) if rebuilds else self._limits
        self._lay_out(divide_into_buckets(parameters, limits))
        self._used = None if rebuilds else UsedParameters(parameters)
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def _sum_up(self, _state: object, bucket: FakeBucket) -> None:
        """Reduce a bucket by a sum, as DistributedDataParallel does where no hook is registered."""
        dist.all_reduce(bucket.buffer(), group=self._group)

    # Any: torch wants a hook written for dist.GradBucket, from which nothing derives; a FakeBucket only resembles it
    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], object]) -> None:
        """Reduce buckets by `hook`."""
        self._hook_state = state
        self._hook = hook

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Add gradients up inside the block, and do not reduce them."""
        return contextlib.nullcontext()

    def prepare_for_backward(self, _outputs: list[Tensor]) -> None:
        """Reduce the gradients of the next backward."""
        self._reducing = True
        buckets = {bucket for bucket, _ in self._bucket_of.values()}
        self._unreduced = len(buckets)
        for bucket in buckets:
            # some of the last backward were not complete, if it used no weight of theirs
            bucket.missing = len(bucket.parameters())

    def __call__(self, *inputs: object, **named: object) -> Tensor:
        self.rebuild_buckets()
        result: Tensor = self._model(*inputs, **named)
        return result

    def rebuild_buckets(self) -> None:
        """Fill buckets in the order in which gradients came, once, before a forward."""
        if not self._arrived or self._rebuilt:
            return
        self._rebuilt = True
        self._bucket_of.clear()
        self._lay_out(divide_into_buckets(self._arrived, self._limits))

    def _lay_out(self, groups: list[list[nn.Parameter]]) -> None:
        """Make a bucket of each group of parameters."""
        self._bucket_of: dict[nn.Parameter, tuple[FakeBucket, Tensor]] = {}
        for group in groups:
            bucket = FakeBucket(group)
            self._bucket_of |= {p: (bucket, view) for p, view in zip(group, bucket.gradients())}

    @torch.no_grad()
    def _arrive(self, parameter: nn.Parameter) -> None:
        """Put a gradient that was computed into its bucket, and reduce a bucket that is complete."""
        if not self._reducing:
            return
        if not self._rebuilt:
            self._arrived.append(parameter)
        bucket, view = self._bucket_of[parameter]
        computed = parameter.grad  # autograd holds it until the bucket is on its way
        assert computed is not None
        view.copy_(computed)
        if self._keeps_views:
            parameter.grad = view
        bucket.missing -= 1
        if not bucket.missing:
            bucket.missing = len(bucket.parameters())
            self._hook(self._hook_state, bucket)
            self._unreduced -= 1
            self._reducing = self._unreduced > 0
