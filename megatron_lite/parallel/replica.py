"""What the ways of training data parallel have in common: ranks by what they hold, this rank's parts,
and sums over those that hold others."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_lite.config.layout import TENSOR, Layout, Part, Sharding, count_stage_layers, find_part, is_split
from megatron_lite.config.plan import Plan
from megatron_lite.parallel.mesh import find_group
from megatron_lite.parallel.pipeline import Pipeline, add_ends, cut_chunks, is_copy


def describe_layout(plan: Plan) -> str:
    """A line on what each rank computes and keeps."""
    layout, words = plan.layout, []
    if layout.tensor > 1:
        tokens = " and of the tokens between them" if layout.sequence_parallel else ""
        words.append(f"each rank computes 1/{layout.tensor} of every layer{tokens}")
    if layout.context > 1:
        words.append(f"each rank has 1/{layout.context} of every sequence")
    if layout.pipeline > 1:
        numbers = ", ".join(map(str, count_stage_layers(plan.args.parallel, plan.shape.num_layers)))
        chunks = len(plan.stage.chunks)
        words.append(f"{layout.pipeline} stages have {numbers} layers{f' in {chunks} chunks' if chunks > 1 else ''}")
    if plan.sharding is None:
        whole = "its weights and moments" if layout.tensor * layout.pipeline > 1 else "all weights and moments"
        words.append(f"each rank keeps {whole}")
    else:
        when = "for forward and again for backward" if plan.sharding.gathers_twice else "once per step"
        kept = (
            f"1/{plan.sharding.ranks * layout.tensor} of {'its ' if layout.pipeline > 1 else ''}fp32 "
            "weights and moments"
        )
        words.append(f"each rank keeps {kept}; layers are gathered {when}")
    return "; ".join(words)


class Replica:
    """A rank's model among others, which is called a chunk of its layers at a time where a pipeline has several.

    `names` and `parameters` are this rank's, `parts` says of which it has not all.
    """

    def __init__(self, plan: Plan, model: nn.Module, mesh: DeviceMesh | None, pipeline: Pipeline | None):
        self.model, layout, stage = model, plan.layout, plan.stage
        self.pipeline = pipeline or Pipeline(stage)
        self.chunks = cut_chunks(model, self.pipeline)
        named = {name: p for chunk in self.chunks for name, p in chunk.named_parameters() if p.requires_grad}
        self.names, self.parameters = list(named), list(named.values())
        self.parts = find_parts(model, layout, plan.sharding, plan.shape.activation == "swiglu")
        # ranks that hold the same parts, of which each writes some to a checkpoint
        ranks = plan.sharding.ranks if plan.sharding else 1
        self.copy, self.copies = layout.replica // ranks, layout.replicas // ranks
        self._tensor_group = find_group(mesh, TENSOR)
        # a sum over all parameters counts once what tensor parallel ranks hold alike, and a tied embedding on both ends
        self.counted = [(layout.tensor_rank == 0 or is_split(name)) and not is_copy(stage, name) for name in self.names]
        self.sum_over_ranks = None if mesh is None else self._sum_over_ranks
        # each of these ranks has the gradient from its own tokens, or heads, only
        of_heads = ("q_layernorm", "k_layernorm")
        self._partial = [
            index
            for index, name in enumerate(self.names)
            if self._tensor_group is not None
            and not is_split(name)
            and (layout.sequence_parallel or name.split(".")[-2] in of_heads)
        ]

    @torch.no_grad()
    def _sum_over_ranks(self, number: Tensor) -> Tensor:
        """Of what each rank found in its parts."""
        total = number.clone()
        dist.all_reduce(total)
        return total / self.copies

    @torch.no_grad()
    def _add_partial(self, gradients: list[Tensor]) -> list[Tensor]:
        """With those that tensor parallel ranks, or both ends of a pipeline,
        have a part of the sum of added up among them."""
        add_ends(self.pipeline, self.names, gradients)
        if self._partial:
            parts = [gradients[index] for index in self._partial]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat, group=self._tensor_group)
            sums = [one.view_as(part) for one, part in zip(flat.split([part.numel() for part in parts]), parts)]
            torch._foreach_copy_(parts, sums)
        return gradients


def find_parts(model: nn.Module, layout: Layout, sharding: Sharding | None, gated: bool) -> dict[str, Part]:
    """This rank's parts, by name, of parameters that it does not hold whole.

    Args:
        model: With parameters that are not sharded yet.
        gated: Whether the MLP's first matrix holds gate and value.
    """
    parts = {}
    for name, parameter in model.named_parameters():
        part = find_part(name, tuple(parameter.shape), layout, gated)
        if sharding is not None:
            parts[name] = sharding.find_rows(part)
        elif part.whole != part.shape:
            parts[name] = part
    return parts
