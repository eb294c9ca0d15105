"""What a parameter of ours and tensors of a Hugging Face model have to do with each other, both ways.

Letters: G query groups, P heads of a group, D width of one head, H hidden, W rows or columns that stay as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_lite.config.shape import ModelShape


class Layout(Protocol):
    """Two ways to hold the same numbers. `give` works on tensors of the meta device, too."""

    def to_hf(self, ours: Tensor) -> tuple[Tensor, ...]:
        """Theirs, made of ours."""

    def from_hf(self, theirs: list[Tensor]) -> Tensor:
        """Ours, made of theirs."""


@dataclass(frozen=True)
class Link:
    """`ours` and all of `theirs` hold the same numbers, as `layout` says."""

    ours: str
    theirs: tuple[str, ...]
    layout: Layout


class Same:
    """One tensor, as it is."""

    def to_hf(self, ours: Tensor) -> tuple[Tensor, ...]:
        return (ours,)

    def from_hf(self, theirs: list[Tensor]) -> Tensor:
        return theirs[0]


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
class Vocabulary:
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


@dataclass(frozen=True)
class GatedHalves:
    """One matrix of all gates, then all values, here; two there."""

    def to_hf(self, ours: Tensor) -> tuple[Tensor, ...]:
        return ours.chunk(2)

    def from_hf(self, theirs: list[Tensor]) -> Tensor:
        return torch.cat(theirs)


@dataclass(frozen=True)
class GroupedQKV:
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
class FusedQKV:
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


# --- the parameters that a shape has, under Megatron-Core's names, without building the model


def layer_prefix(layer: int) -> str:
    """Of the layer's parameters; layers count from 0 in names."""
    return f"decoder.layers.{layer}."


def parameter_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """{name: size}, in the model's order; a matrix is [out, in], the embeddings [rows, hidden]."""
    hidden = shape.hidden_size
    sizes = {"embedding.word_embeddings.weight": (shape.padded_vocab_size, hidden)}
    if shape.position_embedding == "learned_absolute":
        sizes["embedding.position_embeddings.weight"] = (shape.max_position_embeddings, hidden)
    for layer in range(shape.num_layers):
        sizes.update((layer_prefix(layer) + name, size) for name, size in _layer(shape))
    sizes.update(_norm("decoder.final_layernorm", hidden, shape))
    if not shape.tied_embeddings:
        sizes["output_layer.weight"] = (shape.padded_vocab_size, hidden)
    return sizes


def _layer(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, linear = shape.hidden_size, shape.linear_bias
    yield from _norm("input_layernorm", hidden, shape)
    yield from _matrix("self_attention.linear_qkv", shape.qkv_width, hidden, shape.qkv_bias)
    yield from _matrix("self_attention.linear_proj", hidden, shape.attention_width, linear)
    if shape.qk_layernorm:
        yield from _norm("self_attention.q_layernorm", shape.kv_channels, shape)
        yield from _norm("self_attention.k_layernorm", shape.kv_channels, shape)
    yield from _norm("pre_mlp_layernorm", hidden, shape)
    yield from _matrix("mlp.linear_fc1", shape.fc1_width, hidden, linear)
    yield from _matrix("mlp.linear_fc2", hidden, shape.ffn_hidden_size, linear)


def _matrix(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, width: int, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    if shape.normalization == "LayerNorm":
        yield f"{name}.bias", (width,)
