"""Routes tokens evenly where they have no data: each expert gets as many, whatever a router would say."""

import torch
from torch import Tensor

from megatron_lite.config.plan import Plan
from megatron_lite.model.experts import RouteReader
from megatron_lite.planner.expert_load import compute_selected_share


def divide_evenly(total: int, parts: int) -> list[int]:
    """`total` as a sum of so many numbers, of which the first may be greater by 1."""
    each, more = divmod(total, parts)
    return [each + 1] * more + [each] * (parts - more)


def make_even_reader(plan: Plan) -> RouteReader:
    """Make the reader of tokens' routes that finds them even, whatever they would be."""
    if plan.shape.experts is None:
        return RouteReader()
    share = compute_selected_share(plan)

    def read_counts(counts: Tensor, total: int) -> list[list[int]]:
        even = divide_evenly(total, counts.shape[-1])
        return [even] * len(counts)

    def select_kept(order_A: Tensor, kept_A: Tensor) -> Tensor:
        number = round(share * len(order_A))
        places = torch.empty(number, dtype=torch.int64, device=order_A.device)
        return order_A.index_select(0, places)

    def scale_once(costs_ME: Tensor) -> Tensor:
        # how often it is repeated is data's to say; each time takes the same memory
        return costs_ME.exp()

    return RouteReader(read_counts, select_kept, scale_once)
