"""Sequences of which each rank has a part, put on from outside: attention exchanges, all else goes token by token.

A rank has two of 2R chunks of each sequence (`Layout.find_chunks`). In attention, ranks gather keys and values, or they
exchange heads for positions (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509), or neighbors do this and others
that.

Where they gather, the queries of each chunk meet the keys from the window's begin up to the chunk's own end, by a
kernel of their own, so that no kernel needs a mask that flash attention does not know. Where all of them exchange
heads, attention is that of whole sequences. Where A neighbors do, their chunks side by side are two of 2R/A chunks.

Letters: B batch, N query heads, G query groups, T positions of this rank, D width of one head, R ranks, A ranks that
exchange heads, C positions of a chunk, S positions that this rank attends to: all of the sequence, but before the
others' keys are gathered those of A ranks. H: heads of whatever is exchanged.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.config.layout import Layout
from megatron_lite.config.plan import Plan
from megatron_lite.mesh_axes import CONTEXT, CONTEXT_HEADS, CONTEXT_POSITIONS
from megatron_lite.model.attention import Attend, Scope, cut_edges
from megatron_lite.model.gpt import GPT
from megatron_lite.parallel.layers import replace_method
from megatron_lite.parallel.mesh import arrange_ranks, make_group
from megatron_lite.parallel.tensor_parallel import collectives


@dataclass(frozen=True)
class ContextGroups:
    """The ranks that split each sequence with this one, and two parts of them where some exchange heads and others do
    not; None where there is no such part."""

    whole: dist.ProcessGroup
    heads: dist.ProcessGroup | None = None  # neighbors that exchange heads
    positions: dist.ProcessGroup | None = None  # ranks that have the same heads then

    def find_heads(self, head_ranks: int) -> dist.ProcessGroup:
        """The group of so many ranks that exchange heads."""
        return self.whole if self.heads is None or dist.get_world_size(self.heads) != head_ranks else self.heads

    def find_positions(self, head_ranks: int) -> dist.ProcessGroup:
        """The group that gathers keys and values where so many ranks exchange heads."""
        return self.whole if self.positions is None or head_ranks == 1 else self.positions


def make_context_groups(plan: Plan) -> ContextGroups | None:
    """Make the groups of the ranks that split each sequence with this one; None where it has whole ones. Collective."""
    layout = plan.layout
    if layout.context == 1:
        return None
    ranks = arrange_ranks(layout).transpose(2, 3)
    whole = make_group(plan, ranks, CONTEXT)
    if layout.inner_context in (1, layout.context):
        return ContextGroups(whole)
    parts = ranks.unflatten(3, (-1, layout.inner_context))
    heads = make_group(plan, parts, CONTEXT_HEADS)
    positions = make_group(plan, parts.transpose(3, 4), CONTEXT_POSITIONS)
    return ContextGroups(whole, heads, positions)


def share_out_positions(model: GPT, plan: Plan, groups: ContextGroups) -> None:
    """Have the model number the positions that this rank has of each sequence, and attend to those of all ranks.

    Args:
        model: The whole model or a stage of it.
        plan: This rank's.
        groups: The ranks that split each sequence.
    """
    chunks = plan.layout.find_chunks(plan.shape.seq_length)
    replace_method(model, "number_positions", partial(_number_positions, chunks))
    # one for all layers that exchange alike, so that a compiled layer serves them all
    functions: dict[int, Attend] = {}
    for number, layer in zip(plan.stage.layers, model.list_layers()):
        head_ranks = plan.count_head_ranks(number)
        attention = layer.self_attention
        if head_ranks not in functions:
            functions[head_ranks] = attend_across(attention.attend, plan.layout, groups, head_ranks)
        attention.attend = functions[head_ranks]


def _number_positions(chunks: tuple[range, ...], length: int, device: torch.device) -> Tensor:
    """The positions of these chunks, (T,). Stands in for GPT.number_positions."""
    positions = []
    for chunk in chunks:
        positions.append(torch.arange(chunk.start, chunk.stop, device=device))
    return torch.cat(positions)


def attend_across(attend: Attend, layout: Layout, groups: ContextGroups, head_ranks: int) -> Attend:
    """Attention of this rank's queries to keys and values of all ranks.

    Args:
        attend: The kernel.
        layout: This rank's place among the others.
        groups: The ranks that split each sequence.
        head_ranks: How many of them exchange heads; the others gather keys and values.
    """
    function = attend.function
    joined = layout.join_context(head_ranks)
    if joined.context > 1:
        function = partial(_attend_to_all, function, joined, groups.find_positions(head_ranks))
    if head_ranks > 1:
        place = layout.context_rank % head_ranks
        function = partial(_attend_by_heads, function, place, head_ranks, groups.find_heads(head_ranks))
    return replace(attend, function=function)


# --- ranks that gather keys and values


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
        by_rank = collectives.wait_tensor(gathered).view(ranks, *own.shape)
        parts = by_rank.unflatten(-2, (2, -1))
        first = parts.select(4, 0)
        second = parts.select(4, 1).flip(0)
        by_chunk = torch.cat((first, second))
        whole = by_chunk.movedim(0, 3).flatten(3, 4)
        return whole[0], whole[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: _SequenceContext, of_k_BGSD: Tensor, of_v_BGSD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        both = torch.stack((of_k_BGSD, of_v_BGSD))
        by_chunk = both.unflatten(3, (2, ctx.ranks, -1))
        whole = by_chunk.movedim((3, 4), (0, 1))
        first = whole[0]
        second = whole[1].flip(0)
        parts = torch.stack((first, second), dim=4).flatten(4, 5)
        summed = collectives.reduce_scatter_tensor(parts.flatten(0, 1), "sum", ctx.ranks, ctx.group.group_name)
        of_k_BGTD, of_v_BGTD = collectives.wait_tensor(summed)
        return of_k_BGTD, of_v_BGTD, None, None


# torch gives `apply` no types
_gather_sequence: Callable[[Tensor, Tensor, int, dist.ProcessGroup], tuple[Tensor, Tensor]] = _GatherSequence.apply

# --- ranks that exchange heads for positions


def _attend_by_heads(
    function: Callable[..., Tensor],
    place: int,
    head_ranks: int,
    group: dist.ProcessGroup,
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    scope: Scope,
    dropout: float,
    layer_number: int,
) -> Tensor:
    """Attend for some of the heads, to the positions of all ranks that exchange them.

    Args:
        function: Attention of the joined positions; it and what follows `group` are as in Attend, of this rank's.
        place: This rank's among those that exchange heads.
        head_ranks: How many ranks exchange heads.
        group: The ranks that exchange heads.
        scope: What each position of the whole sequences may attend to.
    """
    q_BHSD, k_BHSD, v_BHSD = _split_heads(q_BNTD, k_BGTD, v_BGTD, head_ranks, group)
    if scope.offset_N is not None:
        scope = scope._replace(offset_N=scope.offset_N.chunk(head_ranks)[place])
    out_BHSD = function(q_BHSD, k_BHSD, v_BHSD, scope, dropout, layer_number)
    return _join_heads(out_BHSD, head_ranks, group)


class _HeadsContext(Protocol):
    """Values that the forward of _SplitHeads and _JoinHeads leaves for its backward."""

    ranks: int
    group: dist.ProcessGroup


class _SplitHeads(torch.autograd.Function):
    """The positions of all ranks for some of the heads of queries, keys and values, from all heads of own positions."""

    @staticmethod
    def forward(
        ctx: _HeadsContext, q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, ranks: int, group: dist.ProcessGroup
    ) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        ctx.group = group
        return _take_positions([q_BNTD, k_BGTD, v_BGTD], ranks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _HeadsContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (*_take_heads(list(gradients), ctx.ranks, ctx.group), None, None)


class _JoinHeads(torch.autograd.Function):
    """All heads of own positions, (B, N, T, D), from some heads of the positions of all ranks."""

    @staticmethod
    def forward(ctx: _HeadsContext, out_BHSD: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
        ctx.ranks = ranks
        ctx.group = group
        return _take_heads([out_BHSD], ranks, group)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: _HeadsContext, gradient_BNTD: Tensor) -> tuple[Tensor, None, None]:
        return _take_positions([gradient_BNTD], ctx.ranks, ctx.group)[0], None, None


_split_heads: Callable[[Tensor, Tensor, Tensor, int, dist.ProcessGroup], tuple[Tensor, Tensor, Tensor]]
_split_heads = _SplitHeads.apply
_join_heads: Callable[[Tensor, int, dist.ProcessGroup], Tensor] = _JoinHeads.apply


def _take_positions(own: list[Tensor], ranks: int, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Give each rank its heads, and take the positions of all for this rank's.

    Args:
        own: Tensors of all heads and this rank's positions, (B, H * A, T, D); heads may differ in their number.
        ranks: A.
        group: The ranks.

    Returns:
        The same with H heads and A * T positions, which lie in one tensor.
    """
    parts = []
    for x_BHTD in own:
        # a chunk from either end of the sequence
        by_rank = x_BHTD.unflatten(1, (ranks, -1))
        by_chunk = by_rank.unflatten(3, (2, -1))
        parts.append(by_chunk.permute(1, 3, 0, 2, 4, 5))
    together = torch.cat(parts, dim=3)
    received = _exchange(together, group)
    from_start = [received[rank, 0] for rank in range(ranks)]
    from_end = [received[rank, 1] for rank in reversed(range(ranks))]
    joined = torch.cat((*from_start, *from_end), dim=2)
    heads = [part.shape[3] for part in parts]
    found: tuple[Tensor, ...] = joined.split(heads, dim=1)
    return found


def _take_heads(own: list[Tensor], ranks: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Give each rank its positions, and take all heads of this rank's: the way back of _take_positions.

    Args:
        own: Tensors of some heads and the positions of all ranks, (B, H, A * T, D).
        ranks: A.
        group: The ranks.

    Returns:
        The same with H * A heads and T positions, in memory with all heads of a position side by side.
    """
    whole = own[0] if len(own) == 1 else torch.cat(own, dim=1)
    chunks = whole.chunk(2 * ranks, dim=2)
    by_rank = []
    for rank in range(ranks):
        by_rank.append(chunks[rank])
        by_rank.append(chunks[-1 - rank])
    pairs = torch.stack(by_rank).unflatten(0, (ranks, 2))
    # (A, 2 chunks, B, H, C, D)
    received = _exchange(pairs, group)
    heads = [x_BHSD.shape[1] for x_BHSD in own]
    found = []
    for part in received.split(heads, dim=3):
        by_position = part.permute(2, 1, 4, 0, 3, 5)
        x_BTHD = by_position.flatten(3, 4).flatten(1, 2)
        found.append(x_BTHD.transpose(1, 2))
    return found


def _exchange(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give each rank its part of the first dimension, and take the part that each has for this one."""
    rows = [1] * len(by_rank)
    begun = collectives.all_to_all_single(by_rank.contiguous(), rows, rows, group.group_name)
    return collectives.wait_tensor(begun)
