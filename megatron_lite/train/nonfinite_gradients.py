"""Names the gradients of a step that are not finite, in the order in which backward computed them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_lite.config.layout import Layout, is_of_experts
from megatron_lite.model.gpt import list_parameters
from megatron_lite.optim.optimizer import GradientNorms, Optimizer

ATTENTION = "self_attention"
# the parts of an attention in the order of forward; the module lists norms behind the projection that they come before
ATTENTION_PARTS = (
    "linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj", "q_layernorm", "k_layernorm",
    "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj", "core_attention", "linear_proj",
)  # fmt: skip


@dataclass(frozen=True)
class NonfiniteGradients:
    """The parameters whose gradients have a norm that is NaN or Inf.

    Attributes:
        ranks: The first rank that holds each, by parameter, the one nearest to the loss first.
        total: Parameters of the whole model.
    """

    ranks: dict[str, int]
    total: int


def gather_nonfinite(optimizer: Optimizer, norms: GradientNorms) -> NonfiniteGradients:
    """Find out which gradients of a step are not finite. Collective, and waits for the device: for failures only.

    Args:
        optimizer: This rank's, which names its parameters.
        norms: Norms of the step's gradients on this rank.
    """
    is_finite = torch.isfinite(norms.norms).tolist()
    mine = [optimizer.names[place] for place, good in zip(norms.places, is_finite, strict=True) if not good]
    plan = optimizer.plan
    everyones: list[list[str]] = [[] for _ in range(plan.world.size)]
    dist.all_gather_object(everyones, mine)
    ranks: dict[str, int] = {}
    for rank, names in enumerate(everyones):
        for name in names:
            ranks.setdefault(name, rank)
    is_custom = plan.args.model.model is not None
    listed = optimizer.names if is_custom else list(list_parameters(plan.shape))
    return NonfiniteGradients({name: ranks[name] for name in order_backward(listed) if name in ranks}, len(listed))


def order_backward(names: Sequence[str]) -> list[str]:
    """Order parameters as backward comes to them: the one nearest to the loss first.

    Of one module the weight comes before the bias. Word embeddings come last, though the output may share them:
    what the output gives them cannot be told from what the input does.

    Args:
        names: The parameters as their modules list them, which is nearly the order of forward.
    """
    places: dict[str, int] = {}
    for name in names:
        places.setdefault(_find_block(name), len(places))

    def find_place(name: str) -> tuple[int, int]:
        part = name.rpartition(".")[0].rpartition(".")[2]
        within = ATTENTION_PARTS.index(part) if part in ATTENTION_PARTS else 0
        return -places[_find_block(name)], -within

    return sorted(names, key=find_place)


def _find_block(name: str) -> str:
    """Find the attention that a parameter belongs to, or else its module."""
    module = name.rpartition(".")[0]
    outer, is_of_attention, _ = module.partition(f".{ATTENTION}.")
    return f"{outer}.{ATTENTION}" if is_of_attention else module


def describe_nonfinite(gradients: NonfiniteGradients, layout: Layout) -> str:
    """Describe them in a clause that ends with a semicolon and a blank; "" where all norms are finite.

    Args:
        gradients: The gradients of all ranks.
        layout: Says over how many ranks each was averaged: one of experts over others than the rest.
    """
    if not gradients.ranks:
        return ""
    first, rank = next(iter(gradients.ranks.items()))
    module, _, parameter = first.rpartition(".")
    replicas = layout.expert_replicas if is_of_experts(first) else layout.replicas
    where = f"rank {rank}" if replicas == 1 else f"averaged over {replicas} ranks"
    number = f"{len(gradients.ranks)} of {gradients.total} are not finite"
    return f"first in backward: the gradient of {parameter} in {module} ({where}), {number}; "
