"""Routes tokens evenly where they have no data: each expert gets as many, whatever a router would say."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from megatron_lite.config.plan import Plan
from megatron_lite.model import experts as mixtures
from megatron_lite.planner.expert_load import compute_selected_share


def divide_evenly(total: int, parts: int) -> list[int]:
    """`total` as a sum of so many numbers, of which the first may be greater by 1."""
    each, more = divmod(total, parts)
    return [each + 1] * more + [each] * (parts - more)


@contextlib.contextmanager
def route_evenly(plan: Plan) -> Iterator[None]:
    """Inside the block, what a layer of experts reads of its tokens' routes is what even routes would say."""
    if plan.shape.experts is None:
        yield
        return
    share = compute_selected_share(plan)

    def read_counts(counts: Tensor, total: int) -> list[int] | list[list[int]]:
        even = divide_evenly(total, counts.shape[-1])
        return even if counts.dim() == 1 else [even] * len(counts)

    def select_kept(order_A: Tensor, kept_A: Tensor) -> Tensor:
        places = torch.empty(round(share * len(order_A)), dtype=torch.int64, device=order_A.device)
        return order_A.index_select(0, places)

    def scale_once(costs_ME: Tensor) -> Tensor:
        # how often it is repeated is data's to say; each time takes the same memory
        return costs_ME.exp()

    with mock.patch.multiple(mixtures, read_counts=read_counts, select_kept=select_kept, sinkhorn=scale_once):
        yield
