"""Ranks by their places in a layout, and groups of those that stand in a line."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_lite.config.layout import COPIES, PIPELINE, ROWS, TENSOR, Layout
from megatron_lite.config.plan import Plan
from megatron_lite.parallel.process_group import operation_limit


def arrange_ranks(layout: Layout) -> torch.Tensor:
    """All ranks by their places, (pipeline, data, context, tensor)."""
    sizes = (layout.pipeline, layout.data, layout.context, layout.tensor)
    return torch.tensor([layout.find_rank(*place[::-1]) for place in itertools.product(*map(range, sizes))]).view(sizes)


def make_group(plan: Plan, ranks: torch.Tensor, name: str) -> dist.ProcessGroup:
    """This rank's among the groups that the last dimension of `ranks` lists. Collective."""
    lists = ranks.flatten(0, -2).tolist()
    return dist.new_subgroups_by_enumeration(lists, timeout=operation_limit(plan), group_desc=name)[0]


def make_mesh(plan: Plan, device: torch.device) -> DeviceMesh | None:
    """The ranks by what they hold, or None where each holds everything. Collective."""
    layout, rows = plan.layout, plan.sharding.ranks if plan.sharding else 1
    sizes = {PIPELINE: layout.pipeline, COPIES: layout.replicas // rows, ROWS: rows, TENSOR: layout.tensor}
    if sizes[COPIES] == plan.world.size:
        return None
    sizes = {name: size for name, size in sizes.items() if size > 1}
    mesh = DeviceMesh(device.type, arrange_ranks(layout).view(*sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes if dist.get_backend() != "fake" else ():
        _set_pg_timeout(operation_limit(plan), mesh[name].get_group())  # it would be torch's own, half an hour
    return mesh


def find_group(mesh: DeviceMesh | None, name: str) -> dist.ProcessGroup | None:
    """This rank's group along a dimension of the mesh; None where that has one rank."""
    return mesh[name].get_group() if mesh is not None and name in mesh.mesh_dim_names else None
