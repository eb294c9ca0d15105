"""Ranks that have some of the experts each, put on from outside a model that was built with this rank's.

The ranks of a stage, whatever they share out otherwise, are cut into blocks. A block has all experts once: `expert`
times `expert_tensor` ranks, where those that split the same experts are neighbors, as in Megatron-LM. Each rank routes
its own tokens; a block exchanges them, and what experts give for them. Ranks at the same place of different blocks hold
the same part of the same experts, and average its gradients.

Letters: M tokens of this rank, H hidden, K experts of a token, E experts, L experts of this rank, R ranks of the block,
A assignments of this rank's tokens, S assignments that it receives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from megatron_lite.config.layout import Layout, is_of_experts
from megatron_lite.config.plan import Plan
from megatron_lite.mesh_axes import BLOCK, EXPERT_REPLICAS, EXPERTS, MICRO_BATCH, REPLICATE, SHARD, STAGE
from megatron_lite.model.experts import (
    Exchange,
    Experts,
    Routes,
    TokenSharing,
    list_mixtures,
    sort_by_expert,
    sum_rows,
)
from megatron_lite.parallel.mesh import arrange_ranks, make_group
from megatron_lite.parallel.tensor_parallel import collectives


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of ranks that a layer of experts needs; None: that has one rank."""

    block: dist.ProcessGroup | None  # that together have all experts once
    replicas: dist.ProcessGroup | None  # that hold the same part of the experts
    micro_batch: dist.ProcessGroup | None  # that share out the tokens of a micro-batch
    stage: dist.ProcessGroup | None  # that have the same layers
    # the replicas, by whether they share out the experts' state; None where nobody does
    mesh: DeviceMesh | None


def make_expert_groups(plan: Plan, device: torch.device) -> ExpertGroups | None:
    """Make the groups that this rank's experts need; None for a model without experts. Collective."""
    if plan.shape.experts is None:
        return None
    layout = plan.layout
    stages = arrange_ranks(layout).flatten(1)  # (pipeline, rank of the stage)
    blocks = stages.unflatten(1, (layout.expert_replicas, layout.expert_block))
    micro_batches = stages.unflatten(1, (layout.data, layout.context * layout.tensor))

    def make(ranks: Tensor, name: str) -> dist.ProcessGroup | None:
        return make_group(plan, ranks, name) if ranks.shape[-1] > 1 else None

    return ExpertGroups(
        block=make(blocks, EXPERTS),
        replicas=make(blocks.transpose(1, 2), EXPERT_REPLICAS),
        micro_batch=make(micro_batches, MICRO_BATCH),
        stage=make(stages, STAGE),
        mesh=_make_mesh(plan, blocks, device),
    )


def _make_mesh(plan: Plan, blocks: Tensor, device: torch.device) -> DeviceMesh | None:
    """The replicas of experts as torch's fully_shard takes them. Collective."""
    if plan.expert_sharding is None:
        return None
    shards = plan.expert_sharding.ranks
    # (stage, place in the block, replicate, shard)
    ranks = blocks.transpose(1, 2).unflatten(2, (-1, shards))
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=(STAGE, BLOCK, REPLICATE, SHARD))
    return mesh[REPLICATE, SHARD] if ranks.shape[2] > 1 else mesh[SHARD]


def spread_experts(model: nn.Module, plan: Plan, groups: ExpertGroups) -> None:
    """Have each layer of experts exchange tokens, and what routers count, with other ranks.

    Args:
        model: Built with this rank's experts.
        plan: The rank's.
        groups: The groups that make_expert_groups makes.
    """
    layout = plan.layout
    sharing = TokenSharing(
        ranks=layout.context * layout.tensor,
        tensor=layout.tensor,
        tensor_rank=layout.tensor_rank,
        sum_micro_batch=partial(_sum_over, groups.micro_batch),
        sum_all=partial(_sum_over, groups.stage),
        all_ranks=layout.stage_size,
    )
    for _, mixture in list_mixtures(model):
        mixture.router.sharing = sharing
        if groups.block is not None:
            mixture.exchange = choose_exchange(plan.args.experts.moe_token_dispatcher_type, layout, groups.block)


def _sum_over(group: dist.ProcessGroup | None, tensor: Tensor) -> Tensor:
    """The sum over a group of ranks of a tensor that needs no gradient."""
    if group is None:
        return tensor
    begun = collectives.all_reduce(tensor.contiguous(), "sum", group.group_name)
    return collectives.wait_tensor(begun)


def _gather(x_M: Tensor, block: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks, one rank's below the other's."""
    begun = collectives.all_gather_into_tensor(x_M.contiguous(), block.size(), block.group_name)
    return collectives.wait_tensor(begun)


def _scatter_sum(x_M: Tensor, block: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, of which each gets its rows."""
    begun = collectives.reduce_scatter_tensor(x_M.contiguous(), "sum", block.size(), block.group_name)
    return collectives.wait_tensor(begun)


def _send(x_A: Tensor, coming: list[int], leaving: list[int], block: dist.ProcessGroup) -> Tensor:
    """Exchange rows.

    Args:
        x_A: This rank's rows, by the rank that they go to.
        coming: Rows that come from each rank.
        leaving: Rows that go to each rank.
        block: The ranks.

    Returns:
        The rows of other ranks, by the rank that they come from.
    """
    begun = collectives.all_to_all_single(x_A.contiguous(), coming, leaving, block.group_name)
    return collectives.wait_tensor(begun)


class _BlockContext(Protocol):
    """Values that the forward of _Gather and of _ScatterSum leaves for its backward."""

    block: dist.ProcessGroup


class _Gather(torch.autograd.Function):
    """The rows of all ranks; backward sums what each had of their gradients."""

    @staticmethod
    def forward(ctx: _BlockContext, x_M: Tensor, block: dist.ProcessGroup) -> Tensor:
        ctx.block = block
        return _gather(x_M, block)

    @staticmethod
    @once_differentiable
    def backward(ctx: _BlockContext, gradient_M: Tensor) -> tuple[Tensor, None]:
        return _scatter_sum(gradient_M, ctx.block), None


# torch gives `apply` no types; so below
_gather_with_gradient: Callable[[Tensor, dist.ProcessGroup], Tensor] = _Gather.apply


class _ScatterSum(torch.autograd.Function):
    """The sum over ranks, of which each gets its rows; backward gathers their gradients."""

    @staticmethod
    def forward(ctx: _BlockContext, x_M: Tensor, block: dist.ProcessGroup) -> Tensor:
        ctx.block = block
        return _scatter_sum(x_M, block)

    @staticmethod
    @once_differentiable
    def backward(ctx: _BlockContext, gradient_M: Tensor) -> tuple[Tensor, None]:
        return _gather(gradient_M, ctx.block), None


_scatter_sum_with_gradient: Callable[[Tensor, dist.ProcessGroup], Tensor] = _ScatterSum.apply


class _SendContext(Protocol):
    """Values that the forward of _Send leaves for its backward."""

    coming: list[int]
    leaving: list[int]
    block: dist.ProcessGroup


class _Send(torch.autograd.Function):
    """Rows to and from other ranks; their gradients go the way back."""

    @staticmethod
    def forward(
        ctx: _SendContext, x_A: Tensor, coming: list[int], leaving: list[int], block: dist.ProcessGroup
    ) -> Tensor:
        ctx.coming = coming
        ctx.leaving = leaving
        ctx.block = block
        return _send(x_A, coming, leaving, block)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SendContext, gradient_S: Tensor) -> tuple[Tensor | None, ...]:
        return _send(gradient_S, ctx.leaving, ctx.coming, ctx.block), None, None, None


_send_with_gradient: Callable[[Tensor, list[int], list[int], dist.ProcessGroup], Tensor] = _Send.apply


def choose_exchange(dispatcher: str, layout: Layout, block: dist.ProcessGroup) -> Exchange:
    """Choose how ranks exchange tokens.

    Args:
        dispatcher: The value of --moe-token-dispatcher-type.
        layout: The layout, as this rank has it.
        block: The ranks that together have all experts.
    """
    exchange: Callable[..., Tensor] = gather_tokens if dispatcher == "allgather" else send_tokens
    return partial(exchange, layout, block)


def gather_tokens(layout: Layout, block: dist.ProcessGroup, x_MH: Tensor, routes: Routes, experts: Experts) -> Tensor:
    """An Exchange in which each rank gets all tokens of the block, and takes those of its experts.

    All ranks have as many tokens. What experts give is summed over ranks, and each gets the sums of its own tokens. The
    arguments are those of send_tokens.
    """
    number = experts.linear_fc1.experts
    gathered_MH = _gather_with_gradient(x_MH, block)
    shares_MK = _gather_with_gradient(routes.shares_MK, block)
    experts_MK = _gather(routes.experts_MK, block)
    first = layout.expert_rank * number
    is_mine_MK = (experts_MK >= first) & (experts_MK < first + number)
    if routes.kept_MK is not None:
        is_mine_MK = is_mine_MK & _gather(routes.kept_MK.to(torch.uint8), block).bool()
    # those of other ranks count as dropped here, whatever expert stands there
    mine = Routes((experts_MK - first).clamp(0, number - 1), shares_MK, is_mine_MK, routes.reader)
    assigned = sort_by_expert(mine, number)
    sums_MH = experts(gathered_MH, assigned.tokens_A, assigned.shares_A, assigned.counts_E)
    return _scatter_sum_with_gradient(sums_MH, block)


def send_tokens(
    layout: Layout,
    block: dist.ProcessGroup,
    x_MH: Tensor,
    routes: Routes,
    experts: Experts,
) -> Tensor:
    """An Exchange in which each token is sent to the ranks of its experts only (all-to-all), and their results back.

    A token goes to all ranks that split its expert, each of which gives a part of a sum.

    Args:
        layout: The layout, as this rank has it.
        block: The ranks that together have all experts.
        x_MH: This rank's tokens.
        routes: Experts that the tokens go to, and with which shares.
        experts: This rank's experts.

    Returns:
        out_MH, the sum of what each token's experts give.
    """
    ranks = layout.expert_block
    copies = layout.expert_tensor
    number = experts.linear_fc1.experts
    assigned = sort_by_expert(routes, layout.expert * number)
    counts = assigned.counts_E.view(layout.expert, 1, number)
    counts_RL = counts.expand(-1, copies, -1).reshape(ranks, number)
    coming_RL = _send(counts_RL, [1] * ranks, [1] * ranks, block)
    # the host must know how many there are: one wait for both directions
    both_R = torch.stack((counts_RL.sum(dim=1), coming_RL.sum(dim=1)))
    leaving, coming = routes.reader.read_counts(both_R, copies * len(assigned.tokens_A))
    tokens_A = assigned.tokens_A
    shares_A = assigned.shares_A
    places_A = _repeat_for_copies(leaving, copies, x_MH.device)
    if places_A is not None:
        tokens_A = tokens_A.index_select(0, places_A)
        shares_A = shares_A.index_select(0, places_A)
    shares_S = _send_with_gradient(shares_A, coming, leaving, block)
    order_S = _order_by_expert(coming_RL, sum(coming))
    # tokens have no name here, by which they would stay while results are on their way back
    back_SH = experts(
        _send_with_gradient(x_MH.index_select(0, tokens_A), coming, leaving, block),
        order_S,
        shares_S.index_select(0, order_S),
        coming_RL.sum(dim=0),
    )
    out_AH = _send_with_gradient(back_SH, leaving, coming, block)
    return sum_rows(out_AH, tokens_A, len(x_MH))


def _order_by_expert(coming_RL: Tensor, number: int) -> Tensor:
    """The places of received rows, which lie by rank and then by expert, in the order of experts.

    Args:
        coming_RL: int64, rows that come from each rank for each expert.
        number: How many they are.

    Returns:
        order_S, int64.
    """
    ranks, experts = coming_RL.shape
    labels_RL = torch.arange(experts, device=coming_RL.device).expand(ranks, experts)
    labels_S = labels_RL.flatten().repeat_interleave(coming_RL.flatten(), output_size=number)
    return labels_S.argsort(stable=True)


def _repeat_for_copies(leaving: list[int], copies: int, device: torch.device) -> Tensor | None:
    """Number the assignment that each row is of that leaves.

    Args:
        leaving: Rows for each rank.
        copies: Ranks after each other that get the same rows.
        device: Where the numbers are needed.

    Returns:
        A number for each row; None where each assignment leaves once, in its order.
    """
    if copies == 1:
        return None
    places: list[Tensor] = []
    first = 0
    for rank in range(0, len(leaving), copies):
        rows = torch.arange(first, first + leaving[rank], device=device)
        places += [rows] * copies
        first += leaving[rank]
    return torch.cat(places)


class ExpertGradients:
    """Averages the gradients of this rank's experts over ranks that hold the same.

    A rank's gradient is the sum over the tokens of its block, where that of any other parameter is of the rank's own
    tokens. The mean over data and context parallel ranks is therefore the sum over blocks, divided by their number.
    """

    def __init__(self, plan: Plan, groups: ExpertGroups | None, names: list[str]):
        """
        Args:
            plan: The rank's.
            groups: The groups that make_expert_groups makes.
            names: Names of the parameters, in the order of their gradients.
        """
        self._places = [place for place, name in enumerate(names) if is_of_experts(name)]
        self._group = None if groups is None else groups.replicas
        self._divisor = plan.layout.replicas

    @torch.no_grad()
    def average(self, gradients: Sequence[Tensor | None]) -> None:
        """Average in place the gradients of experts among those of all parameters."""
        works = []
        for place in self._places:
            gradient = gradients[place]
            assert gradient is not None, "an expert without tokens has a gradient of zeros"
            if self._divisor > 1:
                gradient.div_(self._divisor)
            if self._group is not None:
                works.append(dist.all_reduce(gradient, group=self._group, async_op=True))
        for work in works:
            if work is not None:
                work.wait()
