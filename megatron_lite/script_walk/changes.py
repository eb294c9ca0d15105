"""Changes of a script that can be walked without touching it: each is made where torch is called, for the rest of the
process."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from megatron_lite.formats.fit_record import ChangeName

MIN_LIKE_BLOCKS = 2  # of a list of modules, for it to be the layers of a model


def _recompute_blocks() -> None:
    """Compute each block's activations again in backward."""
    _at_first_call(_wrap_blocks)


def _wrap_blocks(model: nn.Module) -> None:
    for block in find_blocks(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the layers of a model: the list of modules of one class that has the most parameters; [] without one."""
    most = 0
    found: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(module)
        if len(children) < MIN_LIKE_BLOCKS or len({type(child) for child in children}) != 1:
            continue
        count = sum(parameter.numel() for parameter in module.parameters())
        if count > most:
            most = count
            found = children
    return found


def _use_bf16() -> None:
    """Compute forward in bf16, where the script computes in fp32."""
    _at_first_call(_wrap_in_autocast)


def _wrap_in_autocast(model: nn.Module) -> None:
    device = next((parameter.device.type for parameter in model.parameters()), "cuda")
    if torch.is_autocast_enabled(device):
        return
    compute = model.forward

    def forward(*inputs: object, **named: object) -> object:
        with torch.autocast(device, torch.bfloat16):
            return compute(*inputs, **named)

    model.forward = forward


def _at_first_call(change: Callable[[nn.Module], object]) -> None:
    """Change the model when it is first called to learn."""
    changed: list[nn.Module] = []

    def enter(module: nn.Module, inputs: tuple[object, ...]) -> None:
        if changed or not torch.is_grad_enabled():
            return
        changed.append(module)
        change(module)

    register_module_forward_pre_hook(enter)


def _update_by(fused: bool) -> None:
    """Update all weights in one kernel, or one weight after another."""

    def choose(optimizer: Optimizer, *arguments: object) -> None:
        for group in optimizer.param_groups:
            if "fused" in group:
                group["fused"] = fused
            if "foreach" in group:
                group["foreach"] = False

    register_optimizer_step_pre_hook(choose)


def _share_state() -> None:
    """Let each rank update its share of the weights, as torch's ZeroRedundancyOptimizer does.

    Gradients are those of all weights, before the update and after it.
    """
    whole: dict[Optimizer, list[list[Tensor]]] = {}

    def keep_share(optimizer: Optimizer, *arguments: object) -> None:
        if whole:
            # the step of another optimizer calls this one: it has shared the weights already
            return
        groups: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
        if any(is_traceable_wrapper_subclass(weight) for group in groups for weight in group):
            # DTensors, as FSDP makes them: all is shared already
            return
        whole[optimizer] = groups
        shares = divide_weights(groups, dist.get_world_size())[dist.get_rank()]
        for group, share in zip(optimizer.param_groups, shares):
            group["params"] = share

    def take_all(optimizer: Optimizer, *arguments: object) -> None:
        for group, weights in zip(optimizer.param_groups, whole.pop(optimizer, [])):
            group["params"] = weights

    register_optimizer_step_pre_hook(keep_share)
    register_optimizer_step_post_hook(take_all)


def divide_weights(groups: list[list[Tensor]], ranks: int) -> list[list[list[Tensor]]]:
    """Divide weights among ranks: the largest first, each to the rank that has least.

    Args:
        groups: The weights of each parameter group.
        ranks: How many share them.

    Returns:
        For each rank its weights of each group.
    """
    sizes = [0] * ranks
    shares: list[list[list[Tensor]]] = [[[] for _ in groups] for _ in range(ranks)]
    for number, group in enumerate(groups):
        for weight in sorted(group, key=Tensor.numel, reverse=True):
            rank = sizes.index(min(sizes))
            shares[rank][number].append(weight)
            sizes[rank] += weight.numel() if weight.requires_grad else 0
    return shares


CHANGES: dict[ChangeName, Callable[[], object]] = {
    ChangeName.RECOMPUTE: _recompute_blocks,
    ChangeName.BF16: _use_bf16,
    ChangeName.FUSED: functools.partial(_update_by, True),
    ChangeName.SHARED_STATE: _share_state,
    ChangeName.ONE_BY_ONE: functools.partial(_update_by, False),
}
