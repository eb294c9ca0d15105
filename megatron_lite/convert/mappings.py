"""What a parameter of ours and tensors of a Hugging Face model have to do with each other, both ways.

Letters: G query groups, P heads of a group, D width of one head, H hidden, W rows or columns that stay as they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config.shape import ModelShape
from megatron_lite.model.gpt import GPT


class Same:
    """One tensor, as it is; and what all layouts have in common: two ways to hold the same numbers.

    to_hf makes theirs of ours, of tensors of the meta device, too; from_hf the inverse.
    """

    def to_hf(self, ours: Tensor) -> tuple[Tensor, ...]:
        return (ours,)

    def from_hf(self, theirs: list[Tensor]) -> Tensor:
        return theirs[0]


@dataclass(frozen=True)
class Link:
    """`ours` and all of `theirs` hold the same numbers, as `layout` says."""

    ours: str
    theirs: tuple[str, ...]
    layout: Same


class Transposed(Same):
    """A matrix [out, in] here and [in, out] there: GPT-2's Conv1D. A bias stays as it is."""

    def to_hf(self, ours: Tensor) -> tuple[Tensor, ...]:
        return (_turned(ours),)

    def from_hf(self, theirs: list[Tensor]) -> Tensor:
        return _turned(theirs[0])


@dataclass(frozen=True)
class NormWeight(Same):
    """The weight of a norm; minus_one: ours is stored minus one. What is taken is always stored as it is."""

    minus_one: bool

    def to_hf(self, ours: Tensor) -> tuple[Tensor, ...]:
        # in fp32, as the model forms it: in bf16 the sum would lose the digits that storing it minus one preserves
        return (ours.float() + 1 if self.minus_one else ours,)


@dataclass(frozen=True)
class Vocabulary(Same):
    """A row for each id: ours are padded to `padded`, theirs end with the vocabulary."""

    size: int
    padded: int

    def to_hf(self, ours: Tensor) -> tuple[Tensor, ...]:
        return (ours[: self.size],)

    def from_hf(self, theirs: list[Tensor]) -> Tensor:
        """Rows of padding become the mean row.

        Their logit is then the mean of the logits, and as exp is convex, none gets more than 1/size of the
        probability: the loss rises by at most log(padded/size). A row of zeros has the logit 0, which beats every
        real one of a model such as GPT-2, whose logits all lie far below 0.
        """
        rows_VH = theirs[0]
        mean_H = rows_VH.float().mean(dim=0).to(rows_VH.dtype)
        return torch.cat((rows_VH, mean_H.expand(self.padded - self.size, -1)))


class GatedHalves(Same):
    """One matrix of all gates, then all values, here; two there."""

    def to_hf(self, ours: Tensor) -> tuple[Tensor, ...]:
        return ours.chunk(2)

    def from_hf(self, theirs: list[Tensor]) -> Tensor:
        return torch.cat(theirs)


@dataclass(frozen=True)
class GroupedQKV(Same):
    """Rows by group here (the group's queries, its key, its value); all queries, all keys, all values there.

    interleaved: ours rotates neighbouring channels, theirs always halves; the rows of queries and keys then change
    places within each head, which leaves their products as they are. What is taken rotates halves.
    """

    heads: int
    groups: int
    width: int
    interleaved: bool = False

    def to_hf(self, ours: Tensor) -> tuple[Tensor, ...]:
        grouped = ours.unflatten(0, (self.groups, self.heads // self.groups + 2, self.width))
        q_GPDW, k_GDW, v_GDW = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
        if self.interleaved:
            q_GPDW, k_GDW = _halves_first(q_GPDW, 2), _halves_first(k_GDW, 1)
        return q_GPDW.flatten(0, 2), k_GDW.flatten(0, 1), v_GDW.flatten(0, 1)

    def from_hf(self, theirs: list[Tensor]) -> Tensor:
        per_group = [t.unflatten(0, (self.groups, -1, self.width)) for t in theirs]
        return torch.cat(per_group, dim=1).flatten(0, 2)


@dataclass(frozen=True)
class FusedQKV(Same):
    """The same with queries, keys and values in one matrix [in, out]: GPT-2's c_attn."""

    apart: GroupedQKV

    def to_hf(self, ours: Tensor) -> tuple[Tensor, ...]:
        return (_turned(torch.cat(self.apart.to_hf(ours))),)

    def from_hf(self, theirs: list[Tensor]) -> Tensor:
        a = self.apart
        return a.from_hf(list(_turned(theirs[0]).split([n * a.width for n in (a.heads, a.groups, a.groups)])))


@dataclass(frozen=True)
class RotatedNormWeight(NormWeight):
    """The weight of the norm of queries or keys: its channels go where those of GroupedQKV go."""

    interleaved: bool

    def to_hf(self, ours: Tensor) -> tuple[Tensor, ...]:
        (weight,) = super().to_hf(ours)
        return (_halves_first(weight, 0) if self.interleaved else weight,)


def grouped_qkv(shape: ModelShape) -> GroupedQKV:
    """The layout of this shape's QKV projection."""
    return GroupedQKV(shape.num_attention_heads, shape.num_query_groups, shape.kv_channels, shape.rotary_interleaved)


def _turned(tensor: Tensor) -> Tensor:
    return tensor.T if tensor.dim() == 2 else tensor


def _halves_first(tensor: Tensor, dim: int) -> Tensor:
    """Channels 0, 2, 4, ..., 1, 3, 5, ... of `dim`: pair (2i, 2i + 1) becomes (i, i + D/2)."""
    return tensor.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def parameter_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """{name: size}, in the model's order; a matrix is [out, in], the embeddings [rows, hidden]."""
    with torch.device("meta"):
        model = GPT(shape, attend=None)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
