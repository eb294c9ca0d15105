"""The base of all ways of training data parallel: ranks by what they hold, this rank's parts, and sums over ranks that
hold others."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.config.layout import (
    Part,
    Sharding,
    count_stage_layers,
    find_part,
    is_of_experts,
    is_split,
    whole_part,
)
from megatron_lite.config.plan import Plan
from megatron_lite.mesh_axes import TENSOR
from megatron_lite.model.experts import MixtureOfExperts, list_mixtures
from megatron_lite.parallel.groups import Groups
from megatron_lite.parallel.mesh import find_group
from megatron_lite.parallel.pipeline import add_ends, cut_chunks, is_copy

# norms of queries or keys, of whose gradients each tensor parallel rank has those of its own heads
NORMS_OF_HEADS = ("q_layernorm", "k_layernorm")


def describe_layout(plan: Plan) -> str:
    """A line on what each rank computes and keeps."""
    layout = plan.layout
    words = []
    if layout.tensor > 1:
        tokens = " and of the tokens between them" if layout.sequence_parallel else ""
        words.append(f"each rank computes 1/{layout.tensor} of every layer{tokens}")
    if layout.context > 1:
        words.append(f"each rank has 1/{layout.context} of every sequence")
    if layout.pipeline > 1:
        layers = count_stage_layers(plan.args.parallel, plan.shape.num_layers)
        numbers = ", ".join(str(number) for number in layers)
        chunks = len(plan.stage.chunks)
        in_chunks = f" in {chunks} chunks" if chunks > 1 else ""
        words.append(f"{layout.pipeline} stages have {numbers} layers{in_chunks}")
    if plan.sharding is None:
        whole = "its weights and moments" if layout.tensor * layout.pipeline > 1 else "all weights and moments"
        words.append(f"each rank keeps {whole}")
    else:
        when = "for forward and again for backward" if plan.sharding.gathers_twice else "once per step"
        parts = plan.sharding.ranks * layout.tensor
        whose = "its " if layout.pipeline > 1 else ""
        kept = f"1/{parts} of {whose}fp32 weights and moments"
        words.append(f"each rank keeps {kept}; layers are gathered {when}")
    return "; ".join(words)


@dataclass(frozen=True)
class ReplicateRanks:
    """Ranks that hold the same part of a parameter, of which each writes some parameters to a checkpoint."""

    place: int  # this rank's among them
    number: int


def find_replicate_ranks(plan: Plan) -> ReplicateRanks:
    """The ranks that hold the same parts of the model, but for experts."""
    ranks = plan.sharding.ranks if plan.sharding else 1
    return ReplicateRanks(plan.layout.replica // ranks, plan.layout.replicas // ranks)


def find_expert_replicate_ranks(plan: Plan) -> ReplicateRanks:
    """The ranks that hold the same parts of experts."""
    ranks = plan.expert_sharding.ranks if plan.expert_sharding else 1
    return ReplicateRanks(plan.layout.expert_replica // ranks, plan.layout.expert_replicas // ranks)


class ShardedRows:
    """The rows that a rank has of a parameter that fully_shard has sharded: optim/muon.py's RowShare."""

    def __init__(self, sharded: Tensor, sharding: Sharding):
        """
        Args:
            sharded: The parameter, whose mesh and places other tensors of its shape lie on.
            sharding: Says which rows are this rank's.
        """
        # imported where parameters are sharded only: it brings torch.compile's parts, which takes a second
        from torch.distributed.tensor import DTensor

        assert isinstance(sharded, DTensor)
        self._make_sharded = DTensor.from_local
        self._like = sharded
        self._sharding = sharding

    def gather(self, rows: Tensor) -> Tensor:
        """Gather all rows of a tensor of which each rank gives its own, as it holds the parameter's. Collective."""
        like = self._like
        spread = self._make_sharded(
            rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        whole: Tensor = spread.full_tensor()
        return whole

    def take(self, whole: Tensor) -> Tensor:
        """Take this rank's rows of a whole tensor."""
        (block,) = self._sharding.find_rows(whole_part(tuple(whole.shape))).blocks
        return whole.narrow(0, block.offsets[0], block.sizes[0])


class Replica(ABC):
    """A rank's model among others, which is called a chunk of its layers at a time where a pipeline has several.

    `names` and `parameters` are this rank's, `parts` says of which it has not all.
    """

    def __init__(self, plan: Plan, model: nn.Module, groups: Groups):
        """
        Args:
            plan: This rank's plan.
            model: The rank's part of the model.
            groups: The ranks that share the model.
        """
        self.model = model
        self.pipeline = groups.pipeline
        self.stage_group = None if groups.experts is None else groups.experts.stage
        self.chunks = cut_chunks(model, self.pipeline)
        named = {name: p for chunk in self.chunks for name, p in chunk.named_parameters() if p.requires_grad}
        self.names = list(named)
        self.parameters = list(named.values())
        self.parts = find_parts(model, plan)
        self.replicate_ranks = find_replicate_ranks(plan)
        self.expert_replicate_ranks = find_expert_replicate_ranks(plan)
        self._tensor_group = find_group(groups.mesh, TENSOR)
        self.owned = [_is_owned(plan, name) for name in self.names]
        holds_all = groups.mesh is None and plan.layout.expert_block == 1
        self.sum_over_ranks = None if holds_all else self._sum_over_ranks
        # a sum over all ranks counts one copy of each parameter
        self.counted: list[bool] = []
        for name, owned in zip(self.names, self.owned):
            is_first_copy = holds_all or self.find_replicate_ranks(name).place == 0
            self.counted.append(owned and is_first_copy)
        # places of parameters whose gradients tensor parallel ranks have a term of each
        self._partial: list[int] = []
        if self._tensor_group is not None:
            self._partial = [place for place, name in enumerate(self.names) if _has_partial_gradient(plan, name)]
        # the parameters, by name, whose rows ranks share out
        self.shares: dict[str, ShardedRows] = {}

    @abstractmethod
    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Call the forward of the running action's chunk, with the inputs of GPT's. Returns losses_BT."""

    @abstractmethod
    def backward(self, last: bool) -> AbstractContextManager[None]:
        """Enter before the backward of one micro-batch, leave after it. last: it is the step's last of its chunk."""

    @abstractmethod
    def gradients(self) -> Sequence[Tensor | None]:
        """The gradient of each parameter, averaged over ranks, after the last micro-batch's backward.

        Returns:
            A tensor per parameter, in their order; None for a parameter that the losses do not use.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget the gradients of all parameters."""

    @torch.no_grad()
    def _sum_over_ranks(self, number: Tensor) -> Tensor:
        """The sum of what each rank found in the parts that it counts, a scalar. Collective."""
        total = number.clone()
        dist.all_reduce(total)
        return total

    def list_mixtures(self) -> list[tuple[str, MixtureOfExperts]]:
        """List (name, mixture of experts) of each layer of this rank that has one."""
        found = {name: mixture for chunk in self.chunks for name, mixture in list_mixtures(chunk)}
        return list(found.items())

    def find_replicate_ranks(self, name: str) -> ReplicateRanks:
        """The ranks that hold the same part of the parameter of this name as this one does."""
        return self.expert_replicate_ranks if is_of_experts(name) else self.replicate_ranks

    @torch.no_grad()
    def _add_partial(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Complete, in place, the gradients of which tensor parallel ranks, or both ends of a pipeline, have a term
        each. Returns `gradients`."""
        add_ends(self.pipeline, self.names, gradients)
        if self._partial:
            parts = [part for place in self._partial if (part := gradients[place]) is not None]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat, group=self._tensor_group)
            lengths = [part.numel() for part in parts]
            sums = [one.view_as(part) for one, part in zip(flat.split(lengths), parts)]
            torch._foreach_copy_(parts, sums)
        return gradients


def _is_owned(plan: Plan, name: str) -> bool:
    """Whether this rank writes the parameter of this name, and counts it, for all that hold the same.

    What tensor parallel ranks hold alike is the first one's, and an embedding on both ends of a pipeline the first
    stage's.
    """
    if is_copy(plan.stage, name):
        return False
    return plan.layout.tensor_rank == 0 or is_split(name)


def _has_partial_gradient(plan: Plan, name: str) -> bool:
    """Whether a tensor parallel rank has the gradient of its own tokens, or heads, of the parameter of this name."""
    if is_split(name):
        return False
    # latent attention's norms are of what all heads are made from
    is_of_own_heads = name.split(".")[-2] in NORMS_OF_HEADS and plan.shape.latent is None
    return plan.layout.sequence_parallel or is_of_own_heads


def find_parts(model: nn.Module, plan: Plan) -> dict[str, Part]:
    """Find this rank's parts, by name, of parameters that it does not hold whole.

    Args:
        model: The rank's part of the model, whose parameters are not sharded yet.
        plan: The rank's.
    """
    experts = plan.rank_shape.experts
    gated = plan.shape.activation == "swiglu"
    parts: dict[str, Part] = {}
    for name, parameter in model.named_parameters():
        sharding = plan.expert_sharding if is_of_experts(name) else plan.sharding
        number = 0 if experts is None else experts.local_number
        part = find_part(name, tuple(parameter.shape), plan.layout, gated, number)
        if sharding is not None:
            parts[name] = sharding.find_rows(part)
        elif part.whole != part.shape:
            parts[name] = part
    return parts
