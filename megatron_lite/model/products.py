"""The matrix products of a linear layer, for what computes gradients itself: the loss, layers that ranks split,
backward in two halves.

Letters: M rows (tokens), H input channels, W output channels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# called with (..., H) that went into the product with a weight, and (..., W), the gradient of what came out
Keep = Callable[[Tensor, Tensor], None]


def compute_input_gradient(
    gradient_W: Tensor,
    weight_WH: Tensor,
    like_H: Tensor | None = None,
) -> Tensor:
    """Compute the gradient of a linear layer's input, gradient @ weight.

    Args:
        gradient_W: Gradient of the layer's output, [..., W].
        weight_WH: Weight of the layer.
        like_H: A tensor of the result's size, for kernels that want one.

    Returns:
        A tensor [..., H].
    """
    return gradient_W @ weight_WH


def compute_weight_gradient(gradient_MW: Tensor, input_MH: Tensor) -> Tensor:
    """Compute the gradient of a linear layer's weight, gradient^T @ input: [W, H]."""
    return gradient_MW.t() @ input_MH


@dataclass(frozen=True)
class Products:
    """Functions that multiply.

    The defaults are torch's own; other kernels give the same numbers but for the last digits.
    """

    # (input_H, weight_WH, bias_W or None) -> (..., W), to differentiate
    linear: Callable[..., Tensor] = F.linear
    # the same, by which no gradient is computed
    multiply: Callable[..., Tensor] = F.linear
    compute_input_gradient: Callable[..., Tensor] = compute_input_gradient
    compute_weight_gradient: Callable[[Tensor, Tensor], Tensor] = compute_weight_gradient


class LinearByHand(torch.autograd.Function):
    """A linear layer whose gradients are computed by given products, but for a weight's that `keep` takes."""

    @staticmethod
    def forward(
        ctx: Any,
        input_H: Tensor,
        weight_WH: Tensor,
        bias_W: Tensor | None,
        products: Products,
        keep: Keep | None,
    ) -> Tensor:
        """Compute input @ weight^T + bias, [..., W].

        Args:
            ctx: Torch's, where backward finds what forward leaves.
            input_H: Inputs, [..., H].
            weight_WH: The weight.
            bias_W: The bias, if the layer has one.
            products: Compute the result and its gradients.
            keep: Takes what the weight's gradient is computed from; None: backward computes it.
        """
        ctx.save_for_backward(input_H, weight_WH)
        ctx.has_bias = bias_W is not None
        ctx.products = products
        ctx.keep = keep
        return products.multiply(input_H, weight_WH, bias_W)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_W: Tensor) -> tuple[Tensor | None, ...]:
        input_H, weight_WH = ctx.saved_tensors
        gradient_MW = gradient_W.flatten(0, -2)
        of_weight = None
        if ctx.keep is not None:
            ctx.keep(input_H, gradient_W)
        elif ctx.needs_input_grad[1]:
            of_weight = ctx.products.compute_weight_gradient(gradient_MW, input_H.flatten(0, -2))
        of_input = None
        if ctx.needs_input_grad[0]:
            of_input = ctx.products.compute_input_gradient(gradient_W, weight_WH, input_H)
        of_bias = gradient_MW.sum(0) if ctx.has_bias else None
        return of_input, of_weight, of_bias, None, None


# torch gives `apply` no types
multiply_by_hand: Callable[[Tensor, Tensor, Tensor | None, Products, Keep | None], Tensor] = LinearByHand.apply
