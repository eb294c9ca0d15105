"""Kernel launches and bytes of a step, counted under fake tensors as on one GPU.

`python tests/count_launches.py [FLAG ...]` counts those of the GPT-3 example. A foreach call counts as one launch, though CUDA
splits it (docs/decisions/035-launches-and-bytes-of-a-step.md). A fused AdamW's bytes are those of the tensors it changes and reads.
"""

import contextlib
import sys
from collections import Counter

import torch
from support.launch import flags, plan_of
from support.rehearsal_cases import CPU, EXAMPLE, GPU
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.config.model_size import count_parameters
from megatron_lite.parallel.groups import make_groups
from megatron_lite.phases import Phase
from megatron_lite.planner.walk.fake_backend import FakeBackend
from megatron_lite.planner.walk.kernels import replace_kernels
from megatron_lite.planner.walk.walk_steps import prepare

# launch nothing: they make, view or name memory
SILENT = {"empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "split", "lift_fresh", "resize_"}


CHANGED = {"_fused_adamw_": (0, 2, 3)}  # weights and moments; gradients too where it divides them


ADDING = "gradient accumulation"


class Launches(TorchDispatchMode):
    """Counts launches and bytes by the part of the step."""

    def __init__(self):
        super().__init__()
        self.part, self.launches, self.bytes, self.inside = "", Counter(), Counter(), False

    @contextlib.contextmanager
    def phase(self, phase: Phase):
        before, self.part = self.part, phase.value
        yield
        self.part = before

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if self.inside:  # fake tensors take some operators apart, which are one launch
            return function(*arguments, **(named or {}))
        self.inside = True
        try:
            result, name = function(*arguments, **(named or {})), function.overloadpacket.__name__
        finally:
            self.inside = False
        if name in SILENT or function.is_view or function.namespace == "prim":
            return result
        part, read = self.part, tensors(arguments, named)
        if name in CHANGED:
            options = named or {}
            changed = [*CHANGED[name], *([1] if options.get("grad_scale") is not None else [])]
            written = tensors(*(arguments[at] for at in changed))
        elif name.rstrip("_").endswith("copy") or name in ("fill_", "zero_"):
            written, read = tensors(arguments[0]), tensors(arguments[1:])
        else:
            written = tensors(result) or tensors(arguments[0])
        if name in ("add_", "_foreach_add_", "_foreach_copy_") and part in ("", Phase.BACKWARD.value):
            node = torch._C._current_autograd_node()
            if node is None or "AccumulateGrad" in node.name():
                part = ADDING
        self.launches[part] += 1
        self.bytes[part] += sum(t.numel() * t.element_size() for t in (*read, *written))
        return result


def tensors(*trees) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def count_launches(plan) -> tuple[Launches, int]:
    """Of the second step, and the number of parameters."""
    counted = Launches()
    with replace_kernels("cuda"), FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False):
        step = prepare(plan, make_groups(plan, CPU), FakeBackend())
        step(lambda phase: contextlib.nullcontext())
        with counted:
            step(counted.phase)
    return counted, count_parameters(plan.shape)


if __name__ == "__main__":
    found, parameters = count_launches(plan_of(flags(EXAMPLE, *sys.argv[1:]), GPU))
    print("| part | launches | GB | bytes per parameter |\n|---|---|---|---|")
    for part, launches in found.launches.items():
        moved = found.bytes[part]
        print(f"| {part or 'other'} | {launches:,} | {moved / 1e9:.2f} | {moved / parameters:.1f} |")
