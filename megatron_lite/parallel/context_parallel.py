"""Sequences of which each rank has a part, put on from outside: attention gathers keys and values, all else goes token
by token.

A rank has two of 2N chunks of each sequence (`Layout.find_chunks`). The queries of each meet the keys up to the chunk's
own end, by a kernel of their own, so that no kernel needs a mask that flash attention does not know.

Letters: B batch, N query heads, G query groups, T positions of this rank, S of the whole sequence, D width of one head,
R ranks, C positions of a chunk.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lite.config.layout import Layout
from megatron_lite.config.plan import Plan
from megatron_lite.model.attention import Attend
from megatron_lite.parallel.mesh import arrange_ranks, make_group
from megatron_lite.parallel.tensor_parallel import collectives


def make_context_group(plan: Plan) -> dist.ProcessGroup | None:
    """This rank's, or None where each has whole sequences. Collective."""
    if plan.layout.context == 1:
        return None
    return make_group(plan, arrange_ranks(plan.layout).transpose(2, 3), "context")


def share_out_positions(model: nn.Module, layout: Layout, length: int):
    """Have the model number the positions that this rank has of a sequence of so many."""
    model.number_positions = partial(_number_positions, layout.find_chunks(length))


def _number_positions(chunks: tuple[range, ...], length: int, device: torch.device) -> Tensor:
    return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in chunks])


def attend_across(attend: Attend, layout: Layout, group: dist.ProcessGroup, device: str) -> Attend:
    """Attention of this rank's queries to keys and values of all ranks, on cuda or cpu."""
    masks = attend.name == "explicit" or device == "cpu"
    return replace(attend, function=partial(_attend_to_all, attend.function, masks, layout, group))


def _attend_to_all(
    function, masks: bool, layout: Layout, group, q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, mask, *others
) -> Tensor:
    k_BGSD, v_BGSD = _GatherSequence.apply(k_BGTD, v_BGTD, layout.context, group)
    parts = []
    for q_BNCD, chunk in zip(q_BNTD.chunk(2, dim=2), layout.find_chunks(k_BGSD.shape[2])):
        keys, values = k_BGSD[:, :, : chunk.stop], v_BGSD[:, :, : chunk.stop]
        earlier = None  # plain causal
        if chunk.start and masks:
            earlier = torch.ones(len(chunk), chunk.stop, dtype=torch.bool, device=q_BNCD.device).tril(chunk.start)[
                None, None
            ]
        elif chunk.start and q_BNCD.is_cuda:  # else a rehearsal's, whose memory is that of any causal attention
            from torch.nn.attention.bias import causal_lower_right  # imports torch.compile's, which takes a second

            earlier = causal_lower_right(len(chunk), chunk.stop)
        parts.append(function(q_BNCD, keys, values, earlier, *others))
    return torch.cat(parts, dim=2)


class _GatherSequence(torch.autograd.Function):
    """Keys and values of whole sequences, in the order of positions.

    Backward adds up what each rank's queries had of them.
    """

    @staticmethod
    def forward(ctx, k_BGTD: Tensor, v_BGTD: Tensor, ranks: int, group: dist.ProcessGroup):
        ctx.ranks, ctx.group = ranks, group
        own = torch.stack((k_BGTD, v_BGTD))
        gathered = collectives.all_gather_into_tensor(own, ranks, group.group_name)
        # (R, 2 of k and v, B, G, 2 chunks, C, D); a rank's second chunk counts from the sequence's end
        parts = collectives.wait_tensor(gathered).view(ranks, *own.shape).unflatten(-2, (2, -1))
        first, second = parts.select(4, 0), parts.select(4, 1).flip(0)
        whole = torch.cat((first, second)).movedim(0, 3).flatten(3, 4)
        return whole[0], whole[1]

    @staticmethod
    @once_differentiable
    def backward(ctx, of_k_BGSD: Tensor, of_v_BGSD: Tensor):
        whole = torch.stack((of_k_BGSD, of_v_BGSD)).unflatten(3, (2, ctx.ranks, -1)).movedim((3, 4), (0, 1))
        parts = torch.stack((whole[0], whole[1].flip(0)), dim=4).flatten(4, 5)
        summed = collectives.reduce_scatter_tensor(parts.flatten(0, 1), "sum", ctx.ranks, ctx.group.group_name)
        of_k_BGTD, of_v_BGTD = collectives.wait_tensor(summed)
        return of_k_BGTD, of_v_BGTD, None, None
