"""torch's fused AdamW and SGD in Megatron's parameter groups."""

import torch
from torch import Tensor, nn

from megatron_lite.config.plan import Plan


def make_engine(plan: Plan, weights: list[nn.Parameter], lr: Tensor) -> torch.optim.Optimizer:
    """A fused torch optimizer over `weights`, reading its learning rate from the device tensor `lr`.

    The first group, matrices and embeddings, decays as Optimizer.follow sets it; vectors (biases, norms) do not.
    """
    o = plan.args.optimizer
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": 0.0},
        {"params": [w for w in weights if w.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if o.optimizer == "adam":
        engine = torch.optim.AdamW(groups, lr=lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps, fused=True)
    else:
        engine = torch.optim.SGD(groups, lr=lr, momentum=o.sgd_momentum, fused=True)
    for weight in weights:
        engine.state[weight] |= _first_state(o.optimizer, o.sgd_momentum, weight)
    return engine


def _first_state(kind: str, momentum: float, weight: nn.Parameter) -> dict[str, Tensor]:
    """What torch would make in the first step. Made before it, a checkpoint finds tensors to be read into."""
    if kind == "adam":
        step = torch.zeros((), dtype=torch.float32, device=weight.device)
        return {"step": step, "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
    # torch would leave a buffer that it makes in a skipped first step uninitialised; zeros give the same first step
    return {"momentum_buffer": torch.zeros_like(weight)} if momentum else {}
