"""Changes of a script that can be walked without touching it: each is made where torch is called, for the rest of the
process."""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
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


CHANGES: dict[ChangeName, Callable[[], object]] = {
    ChangeName.RECOMPUTE: _recompute_blocks,
    ChangeName.BF16: _use_bf16,
    ChangeName.FUSED: functools.partial(_update_by, True),
    ChangeName.ONE_BY_ONE: functools.partial(_update_by, False),
}
