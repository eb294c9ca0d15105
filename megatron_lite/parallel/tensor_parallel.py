"""Layers of which each rank computes a part, put on from outside a model that was built with this rank's sizes.

A rank has some of the heads, of the MLP's columns and of the vocabulary. linear_qkv and linear_fc1 take whole hidden
states and give this rank's columns; linear_proj and linear_fc2 give this rank's share of a sum. With sequence
parallelism a rank holds its share of the tokens between the two: hidden states are gathered before, and sums are
scattered after. Tokens are shared out in the order in which they lie in memory, whatever sequence they belong to, so
that no copy puts them in order; their hidden states keep three dimensions, (B, T / ranks, H).

Letters: B sequences, T positions, M = B * T, H hidden, W columns of this rank, V words of this rank.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from megatron_lite.config.layout import TENSOR
from megatron_lite.config.plan import Plan
from megatron_lite.model.attention import Attend
from megatron_lite.model.loss import Pieces, fused_token_losses
from megatron_lite.model.products import Keep, LinearByHand, Products
from megatron_lite.parallel.mesh import arrange_ranks, find_group, make_group
from megatron_lite.parallel.weight_gradients import WeightGradients

# the operations below torch.distributed's functions: they return at once, torch.compile knows them,
# and `wait_tensor` waits
collectives = torch.ops._c10d_functional
SEEDS_APART = 2**32  # far from those of other replicas


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that split each layer, and this one among them."""

    group: dist.ProcessGroup
    ranks: int
    rank: int
    shares_tokens: bool  # sequence parallelism
    query_group: dist.ProcessGroup | None = None  # of the ranks that share one query group; None: each has whole ones

    def gather(self, x_BTH: Tensor) -> Tensor:
        """All tokens, of which each rank has its share."""
        return self.wait_gathered(self.begin_gather(x_BTH), x_BTH)

    def begin_gather(self, x_BTH: Tensor) -> Tensor:
        """The same, not there before `wait_gathered`."""
        return collectives.all_gather_into_tensor(x_BTH.contiguous().flatten(0, 1), self.ranks, self.group.group_name)

    def wait_gathered(self, begun: Tensor, like: Tensor) -> Tensor:
        """What begin_gather began, in the form of `like`, which was gathered."""
        batch, length, width = like.shape
        return collectives.wait_tensor(begun).view(batch, length * self.ranks, width)

    def begin_sum(self, x_BTH: Tensor) -> Tensor:
        """The sum over ranks, of this rank's share of the tokens if they are shared out.

        Not there before `wait`; x_BTH may become it.
        """
        name = self.group.group_name
        if not self.shares_tokens:
            # in place, but in a compiled graph, which has its own ways to spare memory
            reduce = collectives.all_reduce if torch.compiler.is_compiling() else collectives.all_reduce_
            return reduce(x_BTH.contiguous(), "sum", name)
        return collectives.reduce_scatter_tensor(x_BTH.contiguous().flatten(0, 1), "sum", self.ranks, name)

    def wait(self, begun: Tensor, like: Tensor) -> Tensor:
        """What begin_sum began, in the form of `like`, which was summed."""
        batch, length, width = like.shape
        return collectives.wait_tensor(begun).view(batch, length // self.ranks if self.shares_tokens else length, width)

    def sum(self, x_BTH: Tensor) -> Tensor:
        return self.wait(self.begin_sum(x_BTH), x_BTH)


def make_tensor_group(plan: Plan, mesh: DeviceMesh | None) -> TensorGroup | None:
    """This rank's, or None where each computes whole layers. Collective."""
    group, layout, sharing = find_group(mesh, TENSOR), plan.layout, plan.rank_shape.query_group_ranks
    if group is None:
        return None
    query_group = None
    if sharing > 1:
        query_group = make_group(plan, arrange_ranks(layout).unflatten(3, (-1, sharing)), "tensor, of a query group")
    return TensorGroup(group, layout.tensor, layout.tensor_rank, layout.sequence_parallel, query_group)


class _ColumnLinear(torch.autograd.Function):
    """This rank's columns of a product, (B, T, W), of all tokens. The gradient of the weight is computed while that of
    the input is summed.

    Of tokens that ranks share out, each keeps its own for backward, and gathers them again while it computes the
    input's gradient.
    """

    @staticmethod
    def forward(
        ctx,
        x_BTH: Tensor,
        weight_WH: Tensor,
        bias_W: Tensor | None,
        among: TensorGroup,
        products: Products,
        keep: Keep | None = None,
    ) -> Tensor:
        """keep: takes what the gradient of the weight is computed from."""
        whole_BTH = among.gather(x_BTH) if among.shares_tokens else x_BTH
        ctx.save_for_backward(x_BTH, weight_WH)
        ctx.among, ctx.has_bias, ctx.products, ctx.keep = among, bias_W is not None, products, keep
        return products.multiply(whole_BTH, weight_WH, bias_W)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_BTW: Tensor):
        x_BTH, weight_WH = ctx.saved_tensors
        gathered = ctx.among.begin_gather(x_BTH) if ctx.among.shares_tokens else None
        of_input_BTH = ctx.products.compute_input_gradient(gradient_BTW, weight_WH)
        whole_BTH = x_BTH if gathered is None else ctx.among.wait_gathered(gathered, x_BTH)
        begun = ctx.among.begin_sum(of_input_BTH)
        gradient_MW, of_weight = gradient_BTW.flatten(0, 1), None
        if ctx.keep is None:
            of_weight = ctx.products.compute_weight_gradient(gradient_MW, whole_BTH.flatten(0, 1))
        else:
            ctx.keep(whole_BTH, gradient_BTW)
        of_bias = gradient_MW.sum(0) if ctx.has_bias else None
        return ctx.among.wait(begun, of_input_BTH), of_weight, of_bias, None, None, None


class _SumOverRanks(torch.autograd.Function):
    """The sum of what ranks have, (B, T, H), of this rank's share of the tokens if they are shared out."""

    @staticmethod
    def forward(ctx, x_BTH: Tensor, among: TensorGroup) -> Tensor:
        ctx.among = among
        return among.sum(x_BTH)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_BTH: Tensor):
        return ctx.among.gather(gradient_BTH) if ctx.among.shares_tokens else gradient_BTH, None


class _GatherQueryGroup(torch.autograd.Function):
    """(B, T, W) of a query group's columns [queries, key, value], of which each of R ranks has a part -> this rank's
    queries, key and value.

    Backward adds up what each rank's queries had of key and value.
    """

    @staticmethod
    def forward(ctx, part_BTW: Tensor, group: dist.ProcessGroup, kv_channels: int) -> Tensor:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        gathered = collectives.all_gather_into_tensor(part_BTW.contiguous(), ranks, group.group_name)
        whole = collectives.wait_tensor(gathered).view(ranks, *part_BTW.shape).movedim(0, -2).flatten(-2)
        queries = whole.shape[-1] - 2 * kv_channels  # of all ranks
        first, last = queries // ranks * rank, queries // ranks * (rank + 1)
        ctx.group, ctx.ranks, ctx.queries, ctx.first, ctx.last = group, ranks, queries, first, last
        return torch.cat((whole[..., first:last], whole[..., queries:]), dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_BTW: Tensor):
        own, key_and_value = gradient_BTW.tensor_split((ctx.last - ctx.first,), dim=-1)
        of_others = gradient_BTW.new_zeros(*gradient_BTW.shape[:-1], ctx.queries)
        whole = torch.cat((of_others, key_and_value), dim=-1)
        whole[..., ctx.first : ctx.last] = own
        parts = whole.unflatten(-1, (ctx.ranks, -1)).movedim(-2, 0).contiguous()
        summed = collectives.reduce_scatter_tensor(parts.flatten(0, 1), "sum", ctx.ranks, ctx.group.group_name)
        return collectives.wait_tensor(summed), None, None


def split_layers(model: nn.Module, among: TensorGroup, products: Products, later: WeightGradients | None = None):
    """Have each linear layer and the embedding exchange with other ranks what they lack.

    Args:
        model: Built with this rank's sizes.
        among: The ranks that split it.
        products: By which the layers multiply.
        later: Takes gradients of the layers' weights; None: backward computes them.
    """
    for layer in model.decoder.layers:
        for module in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
            module.forward = partial(_apply_columns, module, among, products, later)
        if among.query_group is not None:
            module, width = layer.self_attention.linear_qkv, layer.self_attention.kv_channels
            module.forward = partial(_apply_query_group, module.forward, among.query_group, width)
        for module in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
            module.forward = partial(_apply_rows, module, among, products, later)
    if model.embedding is not None:
        model.embedding.forward = partial(_embed, model.embedding, among)


def _apply_columns(
    module: nn.Linear, among: TensorGroup, products: Products, later: WeightGradients | None, x_BTH: Tensor
) -> Tensor:
    weight_WH, keep = _take_weight(module, products, later)
    return _ColumnLinear.apply(x_BTH, weight_WH, module.bias, among, products, keep)


def _take_weight(module: nn.Linear, products: Products, later: WeightGradients | None) -> tuple[Tensor, Keep | None]:
    return (module.weight, None) if later is None else later.take_over(module.weight, products)


def _apply_query_group(columns: Callable[[Tensor], Tensor], group, kv_channels: int, x_BTH: Tensor) -> Tensor:
    return _GatherQueryGroup.apply(columns(x_BTH), group, kv_channels)


def _apply_rows(
    module: nn.Linear, among: TensorGroup, products: Products, later: WeightGradients | None, x_BTW: Tensor
) -> Tensor:
    """The bias is added to the sum, once."""
    weight_WH, keep = _take_weight(module, products, later)
    if keep is None:
        part_BTH = products.linear(x_BTW, weight_WH)
    else:
        part_BTH = LinearByHand.apply(x_BTW, weight_WH, None, products, keep)
    sum_BTH = _SumOverRanks.apply(part_BTH, among)
    return sum_BTH if module.bias is None else sum_BTH + module.bias


def _embed(embedding: nn.Module, among: TensorGroup, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
    """Each rank looks its own words up; all others' are zeros there."""
    words = embedding.word_embeddings.weight
    own_BT = tokens_BT - among.rank * len(words)
    is_elsewhere_BT = (own_BT < 0) | (own_BT >= len(words))
    vectors_BTH = F.embedding(own_BT.masked_fill(is_elsewhere_BT, 0), words)
    hidden_BTH = _SumOverRanks.apply(vectors_BTH.masked_fill(is_elsewhere_BT[..., None], 0.0), among)
    if embedding.position_embeddings is not None:
        if among.shares_tokens:
            mine = positions_BT.expand_as(tokens_BT).flatten().chunk(among.ranks)[among.rank]
            positions_BT = mine.view(hidden_BTH.shape[:2])
        hidden_BTH = hidden_BTH + embedding.position_embeddings(positions_BT)
    return embedding.dropout(hidden_BTH)


# --- the loss: no rank ever has the logits of all words


def make_losses(among: TensorGroup, words: int, pieces: Pieces, products: Products) -> Callable[..., Tensor]:
    """The model's loss over a vocabulary of which each rank has so many words. products: that make the logits."""
    return partial(
        fused_token_losses,
        pieces=pieces,
        project=lambda hidden_BTH, weight_VH: _ColumnLinear.apply(hidden_BTH, weight_VH, None, among, products),
        first_word=among.rank * words,
        combine=partial(_combine, among.group),
    )


def _combine(group: dist.ProcessGroup, own_M: Tensor, normalizers_M: Tensor) -> tuple[Tensor, Tensor]:
    """The labels' logits and log(sum(exp(logits))) of all words, from those of each rank's."""
    highest_M = normalizers_M.clone()
    dist.all_reduce(highest_M, dist.ReduceOp.MAX, group)
    sums = torch.stack((own_M, (normalizers_M - highest_M).exp()))
    dist.all_reduce(sums, group=group)
    return sums[0], sums[1].log_().add_(highest_M)


# --- dropout: ranks must draw alike for hidden states that all of them have, and otherwise for what is their own


def drop_own_heads(attend: Attend, rank: int) -> Attend:
    """Attention whose dropout differs between tensor parallel ranks, which all draw alike elsewhere."""
    return replace(attend, function=partial(_attend_drawing_otherwise, attend.function, rank))


def _attend_drawing_otherwise(function: Callable[..., Tensor], rank: int, q_BNTD: Tensor, *others) -> Tensor:
    """What is drawn follows from the common state and the rank, so that recomputing draws the same again."""
    dropout = others[3]
    if not dropout:
        return function(q_BNTD, *others)
    if q_BNTD.device.type == "cpu":
        torch.rand(())  # so that the next layer finds another state, whatever is drawn between
        state = torch.get_rng_state()
        seed = zlib.crc32(state.numpy()) + rank
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
