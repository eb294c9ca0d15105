"""One rank's replica without other ranks: a stand-in for DistributedDataParallel, which cannot run without data.

It holds what torch 2.13's reducer holds with gradient_as_bucket_view (torch/csrc/distributed/c10d/reducer.cpp): all
gradients in one bucket at first, then, from the second forward on, in buckets filled in the order in which gradients came.
A gradient is computed as a tensor of its own, copied into its bucket and from then on a view of it. Gradients of
micro-batches that are not reduced stay tensors of their own until the last one. What NCCL takes is outside of torch.
"""

import contextlib
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.marks import GRADIENT_BUFFER, mark_memory
from megatron_lite.parallel import data_parallel
from megatron_lite.units import MIB


@mark_memory(GRADIENT_BUFFER)
class Bucket:
    """Some parameters' gradients side by side; answers what communication hooks ask a dist.GradBucket."""

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
    """Called as DistributedDataParallel is."""

    def __init__(self, model: nn.Module, gradient_as_bucket_view: bool, bucket_cap_mb: float):
        assert gradient_as_bucket_view, "other gradients are not rehearsed"
        self._model, self._cap = model, int(bucket_cap_mb * MIB)
        self._reducing, self._rebuilt = True, False
        self._hook: Callable[[object, Bucket], object] = lambda _, bucket: dist.all_reduce(bucket.buffer())
        self._arrived: list[nn.Parameter] = []
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._lay_out([parameters])
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrive)

    def register_comm_hook(self, state, hook):
        """`hook` reduces a bucket from now on."""
        self._hook = hook

    @contextlib.contextmanager
    def no_sync(self):
        """Gradients only add up."""
        self._reducing = False
        try:
            yield
        finally:
            self._reducing = True

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
            self._hook(None, bucket)


class _Reduced:
    """The work of a reduction, done."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    def get_future(self) -> torch.futures.Future:
        future = torch.futures.Future()
        future.set_result([self._tensor])
        return future


@contextlib.contextmanager
def without_other_ranks():
    """While this lasts, the stand-in wraps models, a reduction over ranks is over at once, and no process group is needed."""

    def answer(tensor: Tensor, *arguments, async_op: bool = False, **options):
        return _Reduced(tensor) if async_op else None

    with (
        patch.object(dist, "all_reduce", answer),
        patch.object(data_parallel, "DistributedDataParallel", BucketedReplica),
    ):
        yield
