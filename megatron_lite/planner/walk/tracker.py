"""The recorders of a rehearsal. A file of their own, since their frames are left out of stacks."""

from collections import Counter

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.analysis.ranks.process_groups import find_dimension
from megatron_lite.instruments.memory_tags import StepMarks
from megatron_lite.instruments.memory_tracker import StorageTracker

# of the operations below torch.distributed's functions; what a rank receives of point-to-point operations another one sends
KINDS = {
    "allreduce_": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "send": "send",
}


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by (dimension of the group, kind, bytes of the whole tensor): what an all-gather gives, a reduce-scatter takes."""

    def __init__(self, of_all_ranks: str = "data"):
        """of_all_ranks: the dimension of a group that has them all."""
        super().__init__()
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self._of_all_ranks = of_all_ranks

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.see(func, args, result)
        return result

    def see(self, func, args: tuple, result):
        """An operation that has run."""
        kind = KINDS.get(func.overloadpacket.__name__) if func.namespace in ("c10d", "_c10d_functional") else None
        if kind:
            leaves = tree_leaves((args, result))
            groups = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf)]
            name = next((leaf for leaf in reversed(leaves) if isinstance(leaf, str)), "")
            group = dist.ProcessGroup.unbox(groups[0]) if groups else find_group(name)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.add(kind, group, max(tensor.numel() * tensor.itemsize for tensor in tensors))

    def add(self, kind: str, group: dist.ProcessGroup | None, num_bytes: int):
        """group: None for all ranks."""
        dimension = find_dimension(group.group_desc) if group else ""
        self.calls[dimension or self._of_all_ranks, kind, num_bytes] += 1


def find_group(name: str) -> dist.ProcessGroup:
    """By the name that functional collectives take."""
    return dist.distributed_c10d._resolve_process_group(name)


class RehearsalTracker(StorageTracker):
    """A recorder that answers by itself on which device a tensor without data is: three of four of autograd's questions,
    which would go through all modes."""

    STORAGES = "meta"  # of tensors without data

    def __init__(self, place: StepMarks, most: int, collectives: CollectiveCounter):
        super().__init__(place, most)
        self._collectives = collectives

    def begin_step(self):
        super().begin_step()
        self._collectives.calls.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._collectives.see(func, args, result)
        return result
