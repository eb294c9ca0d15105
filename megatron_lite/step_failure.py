"""Says whether a step of a training went wrong, by its loss and its gradient norm beside those of steps before it."""

import math
from collections.abc import Sequence
from typing import Protocol

# what is compared with
STEPS_COMPARED = 20
MIN_STEPS_BEFORE = 3
# a loss is a spike where it exceeds the largest one before it by this share of their range, and by this share of itself
LOSS_RANGE = 0.5
LOSS_SHARE = 0.05
# so is a norm that is so many times the largest one
NORM_FACTOR = 3.0


class ComparedStep(Protocol):
    """Figures of a step; None: NaN or Inf, or unknown."""

    @property
    def loss(self) -> float | None:
        """Mean loss per token in nats."""

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradients before clipping."""

    @property
    def skipped(self) -> bool:
        """The step changed nothing."""


def describe_failure(step: ComparedStep, before: Sequence[ComparedStep]) -> str:
    """Describe what went wrong in a step, with its figures; "" where nothing did.

    Args:
        step: The step.
        before: Steps before it, the oldest first.
    """
    if step.loss is None or not math.isfinite(step.loss):
        return "the loss is NaN or Inf"
    if step.grad_norm is None or not math.isfinite(step.grad_norm):
        return "the gradient norm is NaN or Inf"
    spike = describe_loss_spike(step.loss, before)
    if spike:
        return spike
    norms = [one.grad_norm for one in list_sound(before) if one.grad_norm is not None]
    if len(norms) >= MIN_STEPS_BEFORE and step.grad_norm > NORM_FACTOR * max(norms):
        return f"the gradient norm is {step.grad_norm:.4g}, at most {max(norms):.4g} in the {len(norms)} steps before"
    return ""


def describe_loss_spike(loss: float, before: Sequence[ComparedStep]) -> str:
    """Describe how far a loss lies above those of steps before it; "" where it does not.

    Args:
        loss: Mean loss of the step, in nats per token.
        before: Steps before it, the oldest first.
    """
    losses = [one.loss for one in list_sound(before) if one.loss is not None]
    if len(losses) < MIN_STEPS_BEFORE:
        return ""
    allowed = max(LOSS_RANGE * (max(losses) - min(losses)), LOSS_SHARE * max(losses))
    if loss - max(losses) <= allowed:
        return ""
    return f"the loss is {loss:.4g}, at most {max(losses):.4g} in the {len(losses)} steps before"


def list_sound(before: Sequence[ComparedStep]) -> Sequence[ComparedStep]:
    """List the newest steps whose figures are numbers."""
    return [one for one in before if one.loss is not None and one.grad_norm is not None][-STEPS_COMPARED:]
