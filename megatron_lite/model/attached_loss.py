"""Losses beside the main one, whose backward begins where a tensor that they hang on has its own."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class LossState(Protocol):
    """State of a loss beside the main one: the factor before backward, which the main loss has, too."""

    loss_scale: Tensor | float


class _AttachLoss(torch.autograd.Function):
    """Gives a tensor on as it is; its backward also begins that of a loss, as if it were part of the objective."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, state: LossState) -> Tensor:
        ctx.state = state
        ctx.form = loss.dtype, loss.device
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.form
        return gradient, torch.as_tensor(ctx.state.loss_scale, dtype=dtype, device=device), None


def attach_loss(carrier: Tensor, loss: Tensor, state: LossState) -> Tensor:
    """Hang a loss on a tensor that the main loss is computed from.

    Args:
        carrier: The tensor.
        loss: A scalar that needs a gradient.
        state: Read when backward comes to the tensor.

    Returns:
        The tensor, whose backward begins the loss', too.
    """
    attached: Tensor = _AttachLoss.apply(carrier, loss, state)  # type: ignore[no-untyped-call]
    return attached
