"""Lets a script that is one of several ranks find the others, whose part nobody takes: collectives end at once."""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from megatron_lite.instruments.replacing import put_in_place
from megatron_lite.parallel.data_parallel import BUCKET_MIB
from megatron_lite.planner.walk.fake_backend import BucketedReplica, open_fake_group

FIRST_BUCKET_MIB = 1  # torch's default, where the size of buckets is
INITIALIZE = "init_process_group"


class CloneOutputs(torch.autograd.Function):
    """Copies what a model returns, as DistributedDataParallel's sink does."""

    @staticmethod
    def forward(ctx: FunctionCtx, *outputs: object) -> tuple[object, ...]:
        # what the loss does not use has no gradient, rather than one of zeros
        ctx.set_materialize_grads(False)
        return tuple(output.clone() if isinstance(output, Tensor) else output for output in outputs)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: object) -> tuple[object, ...]:
        return gradients


# torch gives `apply` no types
_clone: Callable[..., tuple[object, ...]] = CloneOutputs.apply


class WalkedDataParallel(DistributedDataParallel):
    """Stands for DistributedDataParallel, whose reducer cannot run without data. Its arguments are that one's.

    Args:
        module: The replica of this rank.
        process_group: The ranks that average gradients; None: all.
        bucket_cap_mb: Size of a bucket, in MiB; None: torch's own.
        gradient_as_bucket_view: Gradients are views of the buckets that are sent.
        find_unused_parameters: Outputs are copied, and buckets stay as they are at first.
        static_graph: Outputs are copied once, and buckets are those of a graph that stays.
        options: The others, on which no memory depends.
    """

    def __init__(
        self,
        module: nn.Module,
        *devices: object,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        **options: object,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync = True
        self.static_graph = static_graph
        self._finds_unused = find_unused_parameters and not static_graph
        self._has_run = False
        self._replica = BucketedReplica(
            module,
            bucket_cap_mb or BUCKET_MIB,
            process_group,
            keeps_views=gradient_as_bucket_view,
            first_bucket_mib=FIRST_BUCKET_MIB if bucket_cap_mb is None else None,
            rebuilds=not self._finds_unused,
        )

    def forward(self, *inputs: object, **named: object) -> object:
        learns = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._replica.rebuild_buckets()
        output = self.module(*inputs, **named)
        if learns:
            self._replica.prepare_for_backward([])
        is_first = self.static_graph and not self._has_run
        self._has_run = True
        return copy_outputs(output) if self._finds_unused or is_first else output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up inside the block, and do not average them."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def copy_outputs(output: object) -> object:
    """Copy the tensors that a model returns. Those that no gradient leads to are returned as they are.

    Args:
        output: What the model returned: a tensor or a collection.
    """
    leaves, structure = tree_flatten(output)
    copies = _clone(*leaves)
    chosen = [copy if _has_gradient(leaf) else leaf for leaf, copy in zip(leaves, copies)]
    copied: object = tree_unflatten(chosen, structure)
    return copied


def _has_gradient(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.grad_fn is not None


def stand_for_other_ranks() -> None:
    """Make process groups of torch's fake backend, whatever the script asks for, for the rest of the process."""

    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: object = None,
        world_size: int = -1,
        rank: int = -1,
        **named: object,
    ) -> None:
        if rank < 0:
            rank = int(os.environ.get("RANK", "0"))
        if world_size < 0:
            world_size = int(os.environ.get("WORLD_SIZE", "1"))
        open_fake_group(rank, world_size)

    for place in (dist, dist.distributed_c10d):
        put_in_place(place, INITIALIZE, init_process_group)
    put_in_place(dist, "is_nccl_available", lambda: True)
    for place in (nn.parallel, nn.parallel.distributed):
        put_in_place(place, "DistributedDataParallel", WalkedDataParallel)
