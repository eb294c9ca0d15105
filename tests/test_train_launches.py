"""Kernel launches and bytes of a step, counted under fake tensors as on one GPU, and additions at once held against autograd's.

python tests/test_train_launches.py [FLAG ...] counts those of the GPT-3 example. A foreach call counts as one launch, though CUDA
splits it (docs/decisions/035-launches-and-bytes-of-a-step.md). A fused AdamW's bytes are those of the tensors it changes and reads.
"""

import contextlib
import sys
from collections import Counter

import pytest
import torch
from launch import alone, build, flags, plan_of, same
from rehearsal_cases import CPU, EOD, EXAMPLE, GPU, batches, planned
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.optim.optimizer import Optimizer
from megatron_lite.parallel.groups import make_groups
from megatron_lite.phases import Phase
from megatron_lite.planner.model_size import count_parameters
from megatron_lite.planner.walk.fake_backend import FakeBackend
from megatron_lite.planner.walk.kernels import replace_kernels
from megatron_lite.planner.walk.rehearse import prepare
from megatron_lite.train.step import BatchMaker, TrainingStep

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


@pytest.mark.parametrize(
    "words, bytes_per_parameter",
    [
        ("--fp16", 46),  # 6 of them widen the gradients, whose norm takes 2
        ("--fp16 --accumulate-allreduce-grads-in-fp32", 42),
        ("--bf16", 42),
    ],
)
def test_few_launches_add_gradients_and_update_weights(words, bytes_per_parameter):
    # large enough that scalars do not count
    counted, number = count_launches(planned(f"--clip-grad 1.0 --hidden-size 256 {words}", GPU))
    added = 1 if words == "--fp16" else 2  # of two micro-batches; the first one's stay as they are, or are copied
    assert 0 < counted.launches[ADDING] <= 12 * added
    update = sum(counted.bytes[p.value] for p in (Phase.UNSCALE, Phase.CLIP_GRAD, Phase.OPTIMIZER_STEP))
    assert update / number == pytest.approx(bytes_per_parameter, abs=0.1)


@pytest.mark.parametrize("words", ["--fp16 --initial-loss-scale 4096", "--bf16"])
def test_gradients_added_at_once_are_those_added_one_by_one(words):
    def train(at_once: bool):
        plan = planned(f"--seed 3 --hidden-dropout 0 --attention-dropout 0 {words}")
        torch.manual_seed(1)
        replica = build(plan)
        replica._adds_at_once = at_once and replica.fp32 is None
        if at_once and replica.fp32 is not None:
            replica.fp32._bundle = count_parameters(plan.shape) // 8
        step = TrainingStep(
            plan, replica, Optimizer(plan, replica.parameters, CPU), BatchMaker(plan.args.data, plan.layout, CPU, EOD)
        )
        for _ in range(3):
            step(batches(plan), 0, lambda phase: contextlib.nullcontext())
        return [p.detach().clone() for p in replica.parameters]

    with alone():
        assert same(train(False), train(True))


if __name__ == "__main__":
    found, parameters = count_launches(plan_of(flags(EXAMPLE, *sys.argv[1:]), GPU))
    print("| part | launches | GB | bytes per parameter |\n|---|---|---|---|")
    for part, launches in found.launches.items():
        moved = found.bytes[part]
        print(f"| {part or 'other'} | {launches:,} | {moved / 1e9:.2f} | {moved / parameters:.1f} |")
