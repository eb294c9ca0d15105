"""Makes tensors of a Hugging Face model of a parameter of ours, and the other way round.

Letters: G query groups, P heads of a group, D width of one head, H hidden, W rows or columns that stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.shape import ModelShape


@dataclass(frozen=True)
class WeightForms:
    """Two ways to hold the same numbers: theirs made of ours (of tensors of the meta device, too), and the inverse."""

    to_hf: Callable[[Tensor], tuple[Tensor, ...]]
    from_hf: Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True)
class Link:
    """`ours` and all of `theirs` hold the same numbers, as `layout` says."""

    ours: str
    theirs: tuple[str, ...]
    layout: WeightForms
    dtype: torch.dtype | None = None  # on both sides, whatever the other weights have; None: that of the others


def _turn(tensor: Tensor) -> Tensor:
    """Transpose a matrix; a vector stays as it is."""
    return tensor.T if tensor.dim() == 2 else tensor


def _put_halves_first(tensor: Tensor, dim: int) -> Tensor:
    """Put channels of `dim` into the order 0, 2, 4, ..., 1, 3, 5, ...: pair (2i, 2i + 1) becomes (i, i + D/2)."""
    pairs: Tensor = tensor.unflatten(dim, (-1, 2))
    return pairs.transpose(dim, dim + 1).flatten(dim, dim + 1)


SAME = WeightForms(lambda ours: (ours,), lambda theirs: theirs[0])
# a matrix [out, in] here and [in, out] there, GPT-2's Conv1D; a bias stays as it is
TRANSPOSED = WeightForms(lambda ours: (_turn(ours),), lambda theirs: _turn(theirs[0]))


def lay_out_stack(number: int) -> WeightForms:
    """So many matrices of one size: one below the other here, apart there."""
    return WeightForms(lambda ours: ours.chunk(number), torch.cat)


# one matrix of all gates, then all values, here; two there
GATED_HALVES = lay_out_stack(2)


def lay_out_norm(shape: ModelShape, rotated: bool = False) -> WeightForms:
    """The weight of a norm, which may be stored minus one here. What is taken is always stored as it is.

    Args:
        shape: Shape of the model.
        rotated: Whether the norm is that of queries or keys, whose channels go where those of lay_out_qkv go.
    """
    are_turned = rotated and shape.rotary_interleaved

    def to_hf(ours: Tensor) -> tuple[Tensor, ...]:
        # in fp32, as the model forms it: in bf16 the sum would lose the digits that storing it minus one preserves
        weight = ours.float() + 1 if shape.layernorm_1p else ours
        if are_turned:
            weight = _put_halves_first(weight, 0)
        return (weight,)

    return WeightForms(to_hf, SAME.from_hf)


def lay_out_vocabulary(shape: ModelShape, vocab_size: int) -> WeightForms:
    """A row for each id: ours are padded, theirs end with the vocabulary."""

    def from_hf(theirs: list[Tensor]) -> Tensor:
        # Rows of padding become the mean row. Their logit is then the mean of the logits, and as exp is convex, none
        # gets more than 1/size of the probability: the loss rises by at most log(padded/size). A row of zeros has the
        # logit 0, which beats every real one of a model such as GPT-2, whose logits all lie far below 0.
        rows_VH = theirs[0]
        mean_H = rows_VH.float().mean(dim=0).to(rows_VH.dtype)
        num_padded = shape.padded_vocab_size - vocab_size
        padding = mean_H.expand(num_padded, -1)
        return torch.cat((rows_VH, padding))

    return WeightForms(lambda ours: (ours[:vocab_size],), from_hf)


def lay_out_qkv(shape: ModelShape) -> WeightForms:
    """Rows by group here (the group's queries, its key, its value); all queries, all keys, all values there.

    Ours may rotate neighboring channels, theirs always rotate halves; the rows of queries and keys then change
    places within each head, which leaves their products as they are. What is taken rotates halves.
    """
    groups = shape.num_query_groups
    heads_of_group = shape.num_attention_heads // groups
    width = shape.kv_channels

    def to_hf(ours: Tensor) -> tuple[Tensor, ...]:
        grouped: Tensor = ours.unflatten(0, (groups, heads_of_group + 2, width))
        q_GPDW = grouped[:, :-2]
        k_GDW = grouped[:, -2]
        v_GDW = grouped[:, -1]
        if shape.rotary_interleaved:
            q_GPDW = _put_halves_first(q_GPDW, 2)
            k_GDW = _put_halves_first(k_GDW, 1)
        return q_GPDW.flatten(0, 2), k_GDW.flatten(0, 1), v_GDW.flatten(0, 1)

    def from_hf(theirs: list[Tensor]) -> Tensor:
        per_group = [tensor.unflatten(0, (groups, -1, width)) for tensor in theirs]
        return torch.cat(per_group, dim=1).flatten(0, 2)

    return WeightForms(to_hf, from_hf)


def lay_out_fused_qkv(shape: ModelShape) -> WeightForms:
    """The same with queries, keys and values in one matrix [in, out]: GPT-2's c_attn."""
    apart = lay_out_qkv(shape)
    numbers = (shape.num_attention_heads, shape.num_query_groups, shape.num_query_groups)
    sizes = [number * shape.kv_channels for number in numbers]

    def to_hf(ours: Tensor) -> tuple[Tensor, ...]:
        together = torch.cat(apart.to_hf(ours))
        return (_turn(together),)

    def from_hf(theirs: list[Tensor]) -> Tensor:
        together = _turn(theirs[0])
        return apart.from_hf(list(together.split(sizes)))

    return WeightForms(to_hf, from_hf)
