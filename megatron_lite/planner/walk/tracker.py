"""Records a rehearsal. A file of its own, since frames of recorders are left out of stacks."""

from collections import Counter
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.instruments.memory_tags import StepMarks
from megatron_lite.instruments.memory_tracker import StorageTracker
from megatron_lite.mesh_axes import (
    CONTEXT_HEADS,
    CONTEXT_POSITIONS,
    DATA,
    EXPERT,
    EXPERT_DATA,
    EXPERT_REPLICAS,
    EXPERTS,
    find_dimension,
)

# of the operations below torch.distributed's functions; what a rank receives of point-to-point operations another sends
KINDS = {
    "allreduce_": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "send": "send",
}
# groups that are told apart within a dimension, by their names
OWN_DIMENSIONS = {
    EXPERTS: EXPERT,
    EXPERT_REPLICAS: EXPERT_DATA,
    CONTEXT_HEADS: CONTEXT_HEADS,
    CONTEXT_POSITIONS: CONTEXT_POSITIONS,
}

RESOLVE = "_resolve_process_group"  # a function that versions of torch type differently


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by (dimension of the group, kind, bytes of the whole tensor).

    The whole tensor is what an all-gather gives and a reduce-scatter takes.
    """

    def __init__(self, of_all_ranks: str = DATA):
        """
        Args:
            of_all_ranks: The dimension that a group of all ranks is counted for.
        """
        TorchDispatchMode.__init__(self)
        self.calls: Counter[tuple[str, str, int]] = Counter()
        self._of_all_ranks = of_all_ranks

    def __torch_dispatch__(
        self,
        func: "OpOverload[..., object]",
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.see(func, args, result)
        return result

    def see(self, func: "OpOverload[..., object]", args: tuple[object, ...], result: object) -> None:
        """Count an operation that has run, if it is a collective.

        Args:
            func: The operation.
            args: What it was given.
            result: What it returned.
        """
        if func.namespace not in ("c10d", "_c10d_functional"):
            return
        kind = KINDS.get(func.overloadpacket.__name__)
        if kind is None:
            return
        leaves = tree_leaves((args, result))
        groups = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf)]
        if groups:
            group = dist.ProcessGroup.unbox(groups[0])
        else:
            # functional collectives are given its name, behind all else
            names = [leaf for leaf in leaves if isinstance(leaf, str)]
            group = find_group(names[-1] if names else "")
        num_bytes = max(leaf.numel() * leaf.itemsize for leaf in leaves if isinstance(leaf, Tensor))
        self.add(kind, group, num_bytes)

    def add(self, kind: str, group: dist.ProcessGroup | None, num_bytes: int) -> None:
        """Count one collective.

        Args:
            kind: A value of KINDS.
            group: Its ranks; None: all ranks.
            num_bytes: Of the whole tensor.
        """
        description = group.group_desc if group else ""
        dimension = OWN_DIMENSIONS.get(description) or find_dimension(description)
        self.calls[dimension or self._of_all_ranks, kind, num_bytes] += 1


def find_group(name: str) -> dist.ProcessGroup:
    """Find a group by the name that functional collectives take."""
    resolve: Callable[[str], dist.ProcessGroup] = getattr(dist.distributed_c10d, RESOLVE)
    return resolve(name)


class RehearsalTracker(StorageTracker):
    """A recorder that answers by itself on which device a tensor without data is.

    That is three of four of autograd's questions, which would go through all modes.
    """

    STORAGES: tuple[str, ...] = ("meta",)  # of tensors without data

    def __init__(self, place: StepMarks, most: int, collectives: CollectiveCounter):
        super().__init__(place, most)
        self._collectives = collectives

    def begin_step(self) -> None:
        """Forget what was seen in the step before."""
        super().begin_step()
        self._collectives.calls.clear()

    def __torch_dispatch__(
        self,
        func: "OpOverload[..., object]",
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func is torch.ops.prim.device.default:
            asked = args[0]
            if isinstance(asked, FakeTensor) and not asked.fake_mode.in_kernel_invocation:
                return asked.fake_device
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._collectives.see(func, args, result)
        return result
