"""The factor that keeps small fp16 gradients from vanishing, as tensors that stay on the device.

Reading a scale on the host would make it wait for the device in every step, so that every rule is arithmetic.
"""

import torch
from torch import Tensor

from megatron_lite.config.plan import Plan


class LossScale:
    """A fixed factor. `update` changes nothing."""

    def __init__(self, scale: float, device: torch.device):
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)

    def update(self, overflow: Tensor):
        """Called once a step with the bool tensor `overflow`."""

    def tensors(self) -> dict[str, Tensor]:
        """What a resumed run goes on from, live; nothing, as a fixed factor is the command line's."""
        return {}


class DynamicLossScale(LossScale):
    """Megatron's rules: halve when `hysteresis` overflows have been used up, double after `window` clean steps.

    Hysteresis comes back only when the scale grows, not by a clean step.
    """

    def __init__(self, initial: float, minimum: float, window: int, hysteresis: int, device: torch.device):
        super().__init__(initial, device)
        self.minimum, self.window, self.hysteresis = minimum, window, hysteresis
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.hysteresis_tracker = torch.full((), hysteresis, dtype=torch.int32, device=device)

    def update(self, overflow: Tensor):
        clean_steps = torch.where(overflow, 0, self.growth_tracker + 1)
        left = torch.where(overflow, self.hysteresis_tracker - 1, self.hysteresis_tracker)
        shrink, grow = overflow & (left <= 0), clean_steps == self.window
        halved = (self.scale / 2).clamp(min=self.minimum)
        self.scale.copy_(torch.where(shrink, halved, torch.where(grow, self.scale * 2, self.scale)))
        self.growth_tracker.copy_(torch.where(grow, 0, clean_steps))
        self.hysteresis_tracker.copy_(torch.where(grow, self.hysteresis, left))

    def tensors(self) -> dict[str, Tensor]:
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "hysteresis_tracker": self.hysteresis_tracker,
        }


def make_loss_scale(plan: Plan, device: torch.device) -> LossScale | None:
    """None where gradients need no scale: fp32, and bf16 without --loss-scale."""
    p = plan.args.precision
    if plan.precision == "fp32" or plan.precision == "bf16" and not p.loss_scale:
        return None
    if p.loss_scale:  # 0 is Megatron's word for a dynamic one
        return LossScale(p.loss_scale, device)
    return DynamicLossScale(p.initial_loss_scale, p.min_loss_scale, int(p.loss_scale_window), p.hysteresis, device)
