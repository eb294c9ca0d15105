"""Sequences of which each rank has a part, put on from outside: attention gathers keys and values, all else goes token
by token.

A rank has two of 2R chunks of each sequence (`Layout.find_chunks`). The queries of each meet the keys from the window's
begin up to the chunk's own end, by a kernel of their own, so that no kernel needs a mask that flash attention does not
know.

Letters: B batch, N query heads, G query groups, T positions of this rank, S of the whole sequence, D width of one head,
R ranks, C positions of a chunk.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.config.layout import Layout
from megatron_lite.config.plan import Plan
from megatron_lite.mesh_axes import CONTEXT
from megatron_lite.model.attention import Attend, Scope, cut_edges
from megatron_lite.model.gpt import GPT
from megatron_lite.parallel.layers import replace_method
from megatron_lite.parallel.mesh import arrange_ranks, make_group
from megatron_lite.parallel.tensor_parallel import collectives


def make_context_group(plan: Plan) -> dist.ProcessGroup | None:
    """Make the group of the ranks that split each sequence with this one; None where it has whole ones. Collective."""
    if plan.layout.context == 1:
        return None
    return make_group(plan, arrange_ranks(plan.layout).transpose(2, 3), CONTEXT)


def share_out_positions(model: GPT, layout: Layout, length: int) -> None:
    """Have the model number the positions that this rank has of each sequence.

    Args:
        model: The whole model or a stage of it.
        layout: This rank's place among the others.
        length: Positions of a whole sequence.
    """
    replace_method(model, "number_positions", partial(_number_positions, layout.find_chunks(length)))


def _number_positions(chunks: tuple[range, ...], length: int, device: torch.device) -> Tensor:
    """The positions of these chunks, (T,). Stands in for GPT.number_positions."""
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def attend_across(attend: Attend, layout: Layout, group: dist.ProcessGroup) -> Attend:
    """Attention of this rank's queries to keys and values of all ranks.

    Args:
        attend: The kernel for each chunk of queries.
        layout: This rank's place among the others.
        group: The ranks that split each sequence.
    """
    return replace(attend, function=partial(_attend_to_all, attend.function, layout, group))


def _attend_to_all(
    function: Callable[..., Tensor],
    layout: Layout,
    group: dist.ProcessGroup,
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    scope: Scope,
    dropout: float,
    layer_number: int,
) -> Tensor:
    """Attend to the keys and values of whole sequences, a chunk of queries at a time.

    Args:
        function: An attention kernel; it and what follows `group` are as in Attend, of this rank's positions.
        layout: This rank's place among the others.
        group: The ranks that split each sequence.
        scope: What each position of the whole sequences may attend to.
    """
    k_BGSD, v_BGSD = _gather_sequence(k_BGTD, v_BGTD, layout.context, group)
    length = k_BGSD.shape[2]
    parts = []
    for q_BNCD, chunk in zip(q_BNTD.chunk(2, dim=2), layout.find_chunks(length)):
        first = 0 if scope.window is None else max(chunk.start - scope.window, 0)
        keys = k_BGSD[:, :, first : chunk.stop]
        values = v_BGSD[:, :, first : chunk.stop]
        edges_E = scope.edges_E
        if edges_E is not None:
            edges_E = cut_edges(edges_E, length, first, chunk.stop)
        part_BNCD = function(q_BNCD, keys, values, scope._replace(edges_E=edges_E), dropout, layer_number)
        parts.append(part_BNCD)
    return torch.cat(parts, dim=2)


class _SequenceContext(Protocol):
    """Values that the forward of _GatherSequence leaves for its backward."""

    ranks: int
    group: dist.ProcessGroup


class _GatherSequence(torch.autograd.Function):
    """Keys and values of whole sequences, in the order of positions.

    Backward adds up what each rank's queries had of them.
    """

    @staticmethod
    def forward(
        ctx: _SequenceContext, k_BGTD: Tensor, v_BGTD: Tensor, ranks: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.ranks = ranks
        ctx.group = group
        own = torch.stack((k_BGTD, v_BGTD))
        gathered = collectives.all_gather_into_tensor(own, ranks, group.group_name)
        # (R, 2 of k and v, B, G, 2 chunks, C, D); a rank's second chunk counts from the sequence's end
        parts = collectives.wait_tensor(gathered).view(ranks, *own.shape).unflatten(-2, (2, -1))
        first = parts.select(4, 0)
        second = parts.select(4, 1).flip(0)
        whole = torch.cat((first, second)).movedim(0, 3).flatten(3, 4)
        return whole[0], whole[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: _SequenceContext, of_k_BGSD: Tensor, of_v_BGSD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        both = torch.stack((of_k_BGSD, of_v_BGSD))
        whole = both.unflatten(3, (2, ctx.ranks, -1)).movedim((3, 4), (0, 1))
        parts = torch.stack((whole[0], whole[1].flip(0)), dim=4).flatten(4, 5)
        summed = collectives.reduce_scatter_tensor(parts.flatten(0, 1), "sum", ctx.ranks, ctx.group.group_name)
        of_k_BGTD, of_v_BGTD = collectives.wait_tensor(summed)
        return of_k_BGTD, of_v_BGTD, None, None


# torch gives `apply` no types
_gather_sequence: Callable[[Tensor, Tensor, int, dist.ProcessGroup], tuple[Tensor, Tensor]] = _GatherSequence.apply
