"""Ranks by their places in a layout, and groups of those that stand in a line."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_lite.config.layout import Layout
from megatron_lite.config.plan import Plan
from megatron_lite.mesh_axes import PIPELINE, REPLICATE, SHARD, TENSOR
from megatron_lite.parallel.process_group import operation_limit


def arrange_ranks(layout: Layout) -> torch.Tensor:
    """All ranks by their places, an integer tensor of the shape (pipeline, data, context, tensor)."""
    sizes = (layout.pipeline, layout.data, layout.context, layout.tensor)
    places = itertools.product(*(range(size) for size in sizes))
    ranks = []
    for stage, data, context, tensor in places:
        ranks.append(layout.find_rank(tensor, context, data, stage))
    return torch.tensor(ranks).view(sizes)


def make_group(plan: Plan, ranks: torch.Tensor, name: str) -> dist.ProcessGroup:
    """Make the groups of ranks that the last dimension of `ranks` lists. Collective.

    Args:
        plan: This rank's.
        ranks: Each rank once, a group in each line of the last dimension.
        name: Describes the groups in messages of torch.

    Returns:
        The group with this rank.
    """
    lists = ranks.flatten(0, -2).tolist()
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration(lists, timeout=operation_limit(plan), group_desc=name)
    return own


def make_mesh(plan: Plan, device: torch.device) -> DeviceMesh | None:
    """Make the mesh of ranks by what they hold. Collective.

    Returns:
        The mesh, or None where each rank holds everything.
    """
    layout = plan.layout
    shards = plan.sharding.ranks if plan.sharding else 1
    sizes = {
        PIPELINE: layout.pipeline,
        REPLICATE: layout.replicas // shards,
        SHARD: shards,
        TENSOR: layout.tensor,
    }
    if sizes[REPLICATE] == plan.world.size:
        return None
    sizes = {name: size for name, size in sizes.items() if size > 1}
    ranks = arrange_ranks(layout).view(*sizes.values())
    mesh = DeviceMesh(device.type, ranks, mesh_dim_names=tuple(sizes))
    if dist.get_backend() != "fake":
        for name in sizes:
            # it would be torch's own, half an hour
            _set_pg_timeout(operation_limit(plan), mesh[name].get_group())
    return mesh


def find_group(mesh: DeviceMesh | None, name: str) -> dist.ProcessGroup | None:
    """Find this rank's group along a dimension of the mesh; None where that has one rank."""
    if mesh is None or mesh.mesh_dim_names is None or name not in mesh.mesh_dim_names:
        return None
    return mesh[name].get_group()
