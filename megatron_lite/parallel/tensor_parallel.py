"""Layers of which each rank computes a part, put on from outside a model that was built with this rank's sizes.

A rank has some of the heads, of the MLP's columns and of the vocabulary. linear_qkv, latent attention's projections up
and linear_fc1 take whole hidden states and give this rank's columns; linear_proj and linear_fc2 give this rank's term
of a sum. With sequence parallelism a rank holds its part of the tokens between the two: hidden states are gathered
before, and sums are scattered after. Tokens are split in the order in which they lie in memory, whatever sequence they
belong to, so that no copy puts them in order; their hidden states keep three dimensions, (B, T / ranks, H).

Letters: B sequences, T positions, M = B * T, H hidden, W columns of this rank, V vocabulary entries of this rank.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from megatron_lite.config.plan import Plan
from megatron_lite.mesh_axes import QUERY_GROUP, TENSOR
from megatron_lite.model.attention import Attend, Scope
from megatron_lite.model.gpt import GPT, Embedding
from megatron_lite.model.latent_attention import LatentAttention
from megatron_lite.model.loss import Pieces, fused_token_losses
from megatron_lite.model.products import Keep, Products, multiply_by_hand
from megatron_lite.parallel.layers import replace_method
from megatron_lite.parallel.mesh import arrange_ranks, find_group, make_group
from megatron_lite.parallel.weight_gradients import WeightGradients

SEEDS_APART = 2**32  # far from those of other replicas


class Collectives(Protocol):
    """The operations below torch.distributed's functions, with the types that torch's operators do not tell.

    They return at once, torch.compile knows them, and `wait_tensor` waits for their result. group: the name of a
    process group.
    """

    def all_gather_into_tensor(self, own: Tensor, ranks: int, group: str, /) -> Tensor:
        """Begin to join the tensors of all ranks along the first dimension.

        Args:
            own: This rank's tensor, of the same shape on all.
            ranks: How many ranks there are.
            group: The name of their group.
        """

    def all_reduce(self, own: Tensor, operation: str, group: str, /) -> Tensor:
        """Begin to reduce the tensors of all ranks to one, which each rank gets.

        Args:
            own: This rank's tensor, of the same shape on all.
            operation: sum, avg or max.
            group: The name of the ranks' group.
        """

    def all_reduce_(self, own: Tensor, operation: str, group: str, /) -> Tensor:
        """Begin the reduction of all_reduce in place. The arguments are those of all_reduce."""

    def reduce_scatter_tensor(self, own: Tensor, operation: str, ranks: int, group: str, /) -> Tensor:
        """Begin to reduce the tensors of all ranks to one, of which each rank gets its part of the first dimension.

        Args:
            own: This rank's tensor, of the same shape on all.
            operation: sum, avg or max.
            ranks: How many ranks there are.
            group: The name of their group.
        """

    def all_to_all_single(self, own: Tensor, coming: list[int], leaving: list[int], group: str, /) -> Tensor:
        """Begin to exchange rows.

        Args:
            own: This rank's rows, by the rank that they go to.
            coming: Rows that come from each rank.
            leaving: Rows that go to each rank.
            group: The name of the ranks' group.
        """

    def wait_tensor(self, begun: Tensor, /) -> Tensor:
        """Wait until a tensor that one of the others returned holds its values."""


collectives: Collectives = torch.ops._c10d_functional


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that split each layer, and this one among them."""

    group: dist.ProcessGroup
    ranks: int
    rank: int
    shares_tokens: bool  # sequence parallelism
    query_group: dist.ProcessGroup | None = None  # of the ranks that share one query group; None: each has whole ones

    def gather(self, x_BTH: Tensor) -> Tensor:
        """All tokens, (B, T * ranks, H), of which each rank has its part x_BTH."""
        return self.wait_gathered(self.begin_gather(x_BTH), x_BTH)

    def begin_gather(self, x_BTH: Tensor) -> Tensor:
        """Begin what `gather` does; the result is not there before `wait_gathered`."""
        return collectives.all_gather_into_tensor(x_BTH.contiguous().flatten(0, 1), self.ranks, self.group.group_name)

    def wait_gathered(self, begun: Tensor, like: Tensor) -> Tensor:
        """Wait for what begin_gather began.

        Args:
            begun: What it returned.
            like: What it gathered, (B, T, H).

        Returns:
            All tokens, (B, T * ranks, H).
        """
        batch, length, width = like.shape
        return collectives.wait_tensor(begun).view(batch, length * self.ranks, width)

    def begin_sum(self, x_BTH: Tensor) -> Tensor:
        """Begin to add up x_BTH over ranks: of this rank's part of the tokens, if the ranks split them.

        The result is not there before `wait`; x_BTH may become it.
        """
        name = self.group.group_name
        if not self.shares_tokens:
            # in place, but in a compiled graph, which has its own ways to spare memory
            reduce = collectives.all_reduce if torch.compiler.is_compiling() else collectives.all_reduce_
            return reduce(x_BTH.contiguous(), "sum", name)
        return collectives.reduce_scatter_tensor(x_BTH.contiguous().flatten(0, 1), "sum", self.ranks, name)

    def wait(self, begun: Tensor, like: Tensor) -> Tensor:
        """Wait for what begin_sum began.

        Args:
            begun: What it returned.
            like: What it added up, (B, T, H).

        Returns:
            The sum, (B, T, H), or (B, T / ranks, H) if the ranks split the tokens.
        """
        batch, length, width = like.shape
        own_length = length // self.ranks if self.shares_tokens else length
        return collectives.wait_tensor(begun).view(batch, own_length, width)

    def sum(self, x_BTH: Tensor) -> Tensor:
        """The sum of x_BTH over ranks, of this rank's part of the tokens if the ranks split them."""
        return self.wait(self.begin_sum(x_BTH), x_BTH)


def make_tensor_group(plan: Plan, mesh: DeviceMesh | None) -> TensorGroup | None:
    """Make the group of the ranks that split each layer with this one. Collective.

    Returns:
        The group, or None where each rank computes whole layers.
    """
    layout = plan.layout
    sharing = plan.rank_shape.query_group_ranks
    group = find_group(mesh, TENSOR)
    if group is None:
        return None
    query_group = None
    if sharing > 1:
        query_group = make_group(plan, arrange_ranks(layout).unflatten(3, (-1, sharing)), QUERY_GROUP)
    return TensorGroup(group, layout.tensor, layout.tensor_rank, layout.sequence_parallel, query_group)


class _ColumnContext(Protocol):
    """Values that the forward of _ColumnLinear leaves for its backward."""

    saved_tensors: tuple[Tensor, Tensor]
    among: TensorGroup
    has_bias: bool
    products: Products
    keep: Keep | None

    def save_for_backward(self, x_BTH: Tensor, weight_WH: Tensor, /) -> None:
        """Keep the tensors that backward finds in saved_tensors."""


class _ColumnLinear(torch.autograd.Function):
    """The columns of a product that this rank computes, (B, T, W), of all tokens. The gradient of the weight is
    computed while that of the input is summed.

    Where ranks split the tokens, each keeps its own for backward, and gathers them again while it computes the
    input's gradient.
    """

    @staticmethod
    def forward(
        ctx: _ColumnContext,
        x_BTH: Tensor,
        weight_WH: Tensor,
        bias_W: Tensor | None,
        among: TensorGroup,
        products: Products,
        keep: Keep | None,
    ) -> Tensor:
        """Multiply all tokens by this rank's columns.

        Args:
            x_BTH: All tokens, or this rank's part of them if the ranks split them.
            weight_WH: This rank's columns.
            bias_W: Theirs, if the layer has one.
            among: The ranks that split the layer.
            products: Compute the result and its gradients.
            keep: Takes what the gradient of the weight is computed from; None: backward computes it.
        """
        whole_BTH = among.gather(x_BTH) if among.shares_tokens else x_BTH
        ctx.save_for_backward(x_BTH, weight_WH)
        ctx.among = among
        ctx.has_bias = bias_W is not None
        ctx.products = products
        ctx.keep = keep
        return products.multiply(whole_BTH, weight_WH, bias_W)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ColumnContext, gradient_BTW: Tensor) -> tuple[Tensor | None, ...]:
        x_BTH, weight_WH = ctx.saved_tensors
        gathered = ctx.among.begin_gather(x_BTH) if ctx.among.shares_tokens else None
        of_input_BTH = ctx.products.compute_input_gradient(gradient_BTW, weight_WH)
        whole_BTH = x_BTH if gathered is None else ctx.among.wait_gathered(gathered, x_BTH)
        begun = ctx.among.begin_sum(of_input_BTH)
        gradient_MW = gradient_BTW.flatten(0, 1)
        of_weight = None
        if ctx.keep is None:
            of_weight = ctx.products.compute_weight_gradient(gradient_MW, whole_BTH.flatten(0, 1))
        else:
            ctx.keep(whole_BTH, gradient_BTW)
        of_bias = gradient_MW.sum(0) if ctx.has_bias else None
        return ctx.among.wait(begun, of_input_BTH), of_weight, of_bias, None, None, None


# torch gives `apply` no types; so here and below
_multiply_columns: Callable[[Tensor, Tensor, Tensor | None, TensorGroup, Products, Keep | None], Tensor]
_multiply_columns = _ColumnLinear.apply


class _AmongContext(Protocol):
    """Values that the forward of _SumOverRanks leaves for its backward."""

    among: TensorGroup


class _SumOverRanks(torch.autograd.Function):
    """The sum of what ranks have, (B, T, H), of this rank's part of the tokens if the ranks split them."""

    @staticmethod
    def forward(ctx: _AmongContext, x_BTH: Tensor, among: TensorGroup) -> Tensor:
        ctx.among = among
        return among.sum(x_BTH)

    @staticmethod
    @once_differentiable
    def backward(ctx: _AmongContext, gradient_BTH: Tensor) -> tuple[Tensor, None]:
        return ctx.among.gather(gradient_BTH) if ctx.among.shares_tokens else gradient_BTH, None


_sum_over_ranks: Callable[[Tensor, TensorGroup], Tensor] = _SumOverRanks.apply


class _SpreadOverRanks(torch.autograd.Function):
    """The part of keys that all ranks' heads use, (B, T, R), of all tokens where ranks split them.

    Backward adds up what each rank's heads had of it.
    """

    @staticmethod
    def forward(ctx: _AmongContext, x_BTR: Tensor, among: TensorGroup) -> Tensor:
        ctx.among = among
        return among.gather(x_BTR) if among.shares_tokens else x_BTR.view_as(x_BTR)

    @staticmethod
    @once_differentiable
    def backward(ctx: _AmongContext, gradient_BTR: Tensor) -> tuple[Tensor, None]:
        # a sum in place must not change a gradient that is another tensor's, too
        own_BTR = gradient_BTR if ctx.among.shares_tokens else gradient_BTR.clone()
        return ctx.among.sum(own_BTR), None


_spread_over_ranks: Callable[[Tensor, TensorGroup], Tensor] = _SpreadOverRanks.apply


class _QueryGroupContext(Protocol):
    """Values that the forward of _GatherQueryGroup leaves for its backward."""

    group: dist.ProcessGroup
    ranks: int
    queries: int  # columns of all ranks' queries
    first: int  # of them, this rank's first column
    last: int  # the column after this rank's last one


class _GatherQueryGroup(torch.autograd.Function):
    """The query group's key and value and this rank's queries, (B, T, W), from columns [queries, key, value] of which
    each rank has a part.

    Backward adds up what each rank's queries had of key and value.
    """

    @staticmethod
    def forward(ctx: _QueryGroupContext, part_BTW: Tensor, group: dist.ProcessGroup, kv_channels: int) -> Tensor:
        ranks = dist.get_world_size(group)
        rank = dist.get_rank(group)
        gathered = collectives.all_gather_into_tensor(part_BTW.contiguous(), ranks, group.group_name)
        parts = collectives.wait_tensor(gathered).view(ranks, *part_BTW.shape)
        whole = parts.movedim(0, -2).flatten(-2)
        ctx.group = group
        ctx.ranks = ranks
        ctx.queries = whole.shape[-1] - 2 * kv_channels
        ctx.first = ctx.queries // ranks * rank
        ctx.last = ctx.queries // ranks * (rank + 1)
        own_queries = whole[..., ctx.first : ctx.last]
        key_and_value = whole[..., ctx.queries :]
        return torch.cat((own_queries, key_and_value), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: _QueryGroupContext, gradient_BTW: Tensor) -> tuple[Tensor, None, None]:
        own, key_and_value = gradient_BTW.tensor_split((ctx.last - ctx.first,), dim=-1)
        of_others = gradient_BTW.new_zeros(*gradient_BTW.shape[:-1], ctx.queries)
        whole = torch.cat((of_others, key_and_value), dim=-1)
        whole[..., ctx.first : ctx.last] = own
        parts = whole.unflatten(-1, (ctx.ranks, -1)).movedim(-2, 0).contiguous()
        summed = collectives.reduce_scatter_tensor(parts.flatten(0, 1), "sum", ctx.ranks, ctx.group.group_name)
        return collectives.wait_tensor(summed), None, None


_gather_query_group: Callable[[Tensor, dist.ProcessGroup, int], Tensor] = _GatherQueryGroup.apply


def split_layers(model: GPT, among: TensorGroup, products: Products, later: WeightGradients | None = None) -> None:
    """Have each linear layer and the embedding exchange with other ranks what they lack.

    Args:
        model: Built with this rank's sizes.
        among: The ranks that split it.
        products: Functions by which the layers multiply.
        later: Takes gradients of the layers' weights; None: backward computes them.
    """
    for layer in model.list_layers():
        attention = layer.self_attention
        mlp = layer.dense_mlp
        columns = attention.columns if mlp is None else [*attention.columns, mlp.linear_fc1]
        for module in columns:
            replace_method(module, "forward", partial(_apply_columns, module, among, products, later))
        if isinstance(attention, LatentAttention):
            replace_method(attention, "spread_keys", partial(_spread_keys, among))
        elif among.query_group is not None:
            qkv = attention.linear_qkv
            gather = partial(_apply_query_group, qkv.forward, among.query_group, attention.kv_channels)
            replace_method(qkv, "forward", gather)
        rows = [attention.linear_proj] if mlp is None else [attention.linear_proj, mlp.linear_fc2]
        for module in rows:
            replace_method(module, "forward", partial(_apply_rows, module, among, products, later))
    if model.embedding is not None:
        replace_method(model.embedding, "forward", partial(_embed, model.embedding, among))


def _spread_keys(among: TensorGroup, keys_BTR: Tensor) -> Tensor:
    """Stands in for LatentAttention.spread_keys."""
    return _spread_over_ranks(keys_BTR, among)


def _apply_columns(
    module: nn.Linear, among: TensorGroup, products: Products, later: WeightGradients | None, x_BTH: Tensor
) -> Tensor:
    weight_WH, keep = _take_weight(module, products, later)
    return _multiply_columns(x_BTH, weight_WH, module.bias, among, products, keep)


def _take_weight(module: nn.Linear, products: Products, later: WeightGradients | None) -> tuple[Tensor, Keep | None]:
    return (module.weight, None) if later is None else later.take_over(module.weight, products)


def _apply_query_group(
    columns: Callable[[Tensor], Tensor], group: dist.ProcessGroup, kv_channels: int, x_BTH: Tensor
) -> Tensor:
    return _gather_query_group(columns(x_BTH), group, kv_channels)


def _apply_rows(
    module: nn.Linear, among: TensorGroup, products: Products, later: WeightGradients | None, x_BTW: Tensor
) -> Tensor:
    """The sum over ranks of each one's product, to which the bias is added once."""
    weight_WH, keep = _take_weight(module, products, later)
    if keep is None:
        part_BTH = products.linear(x_BTW, weight_WH)
    else:
        part_BTH = multiply_by_hand(x_BTW, weight_WH, None, products, keep)
    sum_BTH = _sum_over_ranks(part_BTH, among)
    # torch's type of bias does not say that a layer without one has None there
    bias_H: Tensor | None = module.bias
    return sum_BTH if bias_H is None else sum_BTH + bias_H


def _embed(embedding: Embedding, among: TensorGroup, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
    """Embed tokens: each rank looks up the vocabulary entries that it has, and has zeros for all others.

    Args:
        embedding: The module, whose word embeddings are this rank's.
        among: The ranks that split the vocabulary.
        tokens_BT: All tokens.
        positions_BT: Theirs, or (1, T) where all sequences have the same.

    Returns:
        hidden_BTH of all tokens, or of this rank's part of them if the ranks split them.
    """
    weight_VH = embedding.word_embeddings.weight
    own_BT = tokens_BT - among.rank * len(weight_VH)
    is_elsewhere_BT = (own_BT < 0) | (own_BT >= len(weight_VH))
    vectors_BTH = F.embedding(own_BT.masked_fill(is_elsewhere_BT, 0), weight_VH)
    own_BTH = vectors_BTH.masked_fill(is_elsewhere_BT[..., None], 0.0)
    hidden_BTH: Tensor = _sum_over_ranks(own_BTH, among)
    if embedding.position_embeddings is not None:
        if among.shares_tokens:
            mine = positions_BT.expand_as(tokens_BT).flatten().chunk(among.ranks)[among.rank]
            positions_BT = mine.view(hidden_BTH.shape[:2])
        hidden_BTH = hidden_BTH + embedding.position_embeddings(positions_BT)
    hidden_BTH = embedding.dropout(hidden_BTH)
    return hidden_BTH


# --- the loss: no rank ever has the logits of the whole vocabulary


def make_losses(among: TensorGroup, entries: int, pieces: Pieces, products: Products) -> Callable[..., Tensor]:
    """Make the model's loss over a vocabulary of which each rank has a part.

    Args:
        among: The ranks that split the vocabulary.
        entries: Vocabulary entries of each rank, V.
        pieces: Measure logits and write their gradients.
        products: Compute the logits and the gradients of what they are made from.

    Returns:
        Maps (hidden_BTH, weight_VH, labels_BT) to losses_BT, in nats.
    """

    def project(hidden_BTH: Tensor, weight_VH: Tensor) -> Tensor:
        return _multiply_columns(hidden_BTH, weight_VH, None, among, products, None)

    return partial(
        fused_token_losses,
        pieces=pieces,
        project=project,
        first_word=among.rank * entries,
        combine=partial(_combine, among.group),
    )


def _combine(group: dist.ProcessGroup, own_M: Tensor, normalizers_M: Tensor) -> tuple[Tensor, Tensor]:
    """The labels' logits and log(sum(exp(logits))) over the whole vocabulary, from those over each rank's part."""
    highest_M = normalizers_M.clone()
    dist.all_reduce(highest_M, dist.ReduceOp.MAX, group)
    sums = torch.stack((own_M, (normalizers_M - highest_M).exp()))
    dist.all_reduce(sums, group=group)
    return sums[0], sums[1].log_().add_(highest_M)


# --- dropout: ranks must draw alike for hidden states that all of them have, and otherwise for what is their own


def drop_own_heads(attend: Attend, rank: int) -> Attend:
    """Attention whose dropout differs between tensor parallel ranks, which all draw alike elsewhere."""
    return replace(attend, function=partial(_attend_drawing_otherwise, attend.function, rank))


def _attend_drawing_otherwise(
    function: Callable[..., Tensor],
    rank: int,
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    scope: Scope,
    dropout: float,
    layer_number: int,
) -> Tensor:
    """Attend with a dropout that follows from the common state and the rank, so that recomputing draws the same again.

    Args:
        function: An attention kernel, whose arguments and result are those of Attend's.
        rank: This rank's number among those that split the heads.
    """
    others = (k_BGTD, v_BGTD, scope, dropout, layer_number)
    if not dropout:
        return function(q_BNTD, *others)
    if q_BNTD.device.type == "cpu":
        torch.rand(())  # so that the next layer finds another state, whatever is drawn between
        state = torch.get_rng_state()
        seed = zlib.crc32(state.numpy().data) + rank
        torch.default_generator.manual_seed(seed)
        out_BNTD = function(q_BNTD, *others)
        torch.set_rng_state(state)
        return out_BNTD
    # a seed and an offset, on the host: all ranks advance the offset alike
    state = torch.cuda.get_rng_state(q_BNTD.device)
    own = state.clone()
    own.view(torch.int64)[0] += SEEDS_APART * (1 + rank)
    torch.cuda.set_rng_state(own, q_BNTD.device)
    out_BNTD = function(q_BNTD, *others)
    after = torch.cuda.get_rng_state(q_BNTD.device)
    after.view(torch.int64)[0] = state.view(torch.int64)[0]
    torch.cuda.set_rng_state(after, q_BNTD.device)
    return out_BNTD
