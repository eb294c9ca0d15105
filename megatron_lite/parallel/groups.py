"""The groups of ranks that a layout has, and this rank's place among them."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from megatron_lite.config.plan import Plan
from megatron_lite.parallel.context_parallel import ContextGroups, make_context_groups
from megatron_lite.parallel.expert_parallel import ExpertGroups, make_expert_groups
from megatron_lite.parallel.mesh import make_mesh
from megatron_lite.parallel.pipeline import Pipeline, make_pipeline
from megatron_lite.parallel.tensor_parallel import TensorGroup, make_tensor_group


@dataclass(frozen=True)
class Groups:
    """The groups of ranks that split something with this one; None where each rank has all of it."""

    mesh: DeviceMesh | None  # ranks by what they hold
    tensor: TensorGroup | None
    context: ContextGroups | None
    pipeline: Pipeline
    experts: ExpertGroups | None = None


def make_groups(plan: Plan, device: torch.device) -> Groups:
    """Make the groups that this rank belongs to. Collective where there are other ranks."""
    mesh = make_mesh(plan, device)
    tensor = make_tensor_group(plan, mesh)
    context = make_context_groups(plan)
    pipeline = make_pipeline(plan, device)
    return Groups(mesh, tensor, context, pipeline, make_expert_groups(plan, device))
