"""Lets a script that is one of several ranks find the others, whose part nobody takes: collectives end at once."""

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.instruments.replacing import put_in_place
from megatron_lite.parallel.data_parallel import BUCKET_MIB
from megatron_lite.planner.walk.fake_backend import BucketedReplica, open_fake_group

INITIALIZE = "init_process_group"


class WalkedDataParallel(nn.Module):
    """Stands for DistributedDataParallel, which cannot run without data. Its arguments are that one's.

    Args:
        module: The replica of this rank.
        process_group: The ranks that average gradients; None: all.
        bucket_cap_mb: Size of a bucket, in MiB; None: torch's own.
        gradient_as_bucket_view: Gradients are views of the buckets that are sent.
        options: The others, on which no memory depends.
    """

    def __init__(
        self,
        module: nn.Module,
        *devices: object,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        **options: object,
    ) -> None:
        super().__init__()
        self.module = module
        self._replica = BucketedReplica(module, bucket_cap_mb or BUCKET_MIB, process_group, gradient_as_bucket_view)
        self.require_backward_grad_sync = True

    def forward(self, *inputs: object, **named: object) -> Tensor:
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._replica.prepare_for_backward([])
        return self._replica(*inputs, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up inside the block, and do not average them."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


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
