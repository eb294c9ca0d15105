"""Backward in two halves: gradients of inputs at once, since other stages of a pipeline wait for them; gradients of weights when there is time.

Qi et al. 2023, arXiv 2401.10241. Put on from outside: linear layers keep what their weights' gradients are computed from. Letters: W output, H input channels.
"""

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# called with (..., H) that went into the product with a weight, and (..., W), the gradient of what came out
Keep = Callable[[Tensor, Tensor], None]


class WeightGradients:
    """What gradients of weights are computed from, of each micro-batch in the order of their backwards."""

    def __init__(self):
        self._kept: deque[list[tuple[nn.Parameter, Tensor, Tensor]]] = deque()

    def begin(self):
        """From here on belongs to another micro-batch's backward."""
        self._kept.append([])

    def take_over(self, weight_WH: nn.Parameter) -> tuple[Tensor, Keep]:
        """The weight as a number that needs no gradient, and what a backward calls instead of computing one."""
        return weight_WH.detach(), partial(self._keep, weight_WH)

    def _keep(self, weight_WH: nn.Parameter, input_H: Tensor, gradient_W: Tensor):
        self._kept[-1].append((weight_WH, input_H, gradient_W))

    def add(self):
        """The earliest micro-batch's, to the weights' gradients as autograd does it: hooks of the parameters are called."""
        kept = self._kept.popleft()
        while kept:
            weight_WH, input_H, gradient_W = kept.pop()
            with torch.no_grad():
                gradient_WH = gradient_W.flatten(0, -2).t() @ input_H.flatten(0, -2)
            torch.autograd.backward(weight_WH, gradient_WH)


class _Linear(torch.autograd.Function):
    """A linear layer whose backward hands what the weight's gradient is computed from to keep(input_H, gradient_W)."""

    @staticmethod
    def forward(ctx, input_H: Tensor, weight_WH: Tensor, bias_W: Tensor | None, keep: Keep) -> Tensor:
        ctx.save_for_backward(input_H, weight_WH)
        ctx.has_bias, ctx.keep = bias_W is not None, keep
        return F.linear(input_H, weight_WH, bias_W)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_W: Tensor):
        input_H, weight_WH = ctx.saved_tensors
        ctx.keep(input_H, gradient_W)
        of_bias = gradient_W.flatten(0, -2).sum(0) if ctx.has_bias else None
        return gradient_W @ weight_WH, None, of_bias, None


def multiply(input_H: Tensor, weight_WH: nn.Parameter, bias_W: Tensor | None, later: WeightGradients | None) -> Tensor:
    """A linear layer's result. later: takes the weight's gradient; None: backward computes all."""
    if later is None:
        return F.linear(input_H, weight_WH, bias_W)
    weight_WH, keep = later.take_over(weight_WH)
    return _Linear.apply(input_H, weight_WH, bias_W, keep)


def delay_weights(model: nn.Module, later: WeightGradients):
    """Have the layers' weights get their gradients from `later`."""
    for layer in model.decoder.layers:
        for module in (
            layer.self_attention.linear_qkv,
            layer.self_attention.linear_proj,
            layer.mlp.linear_fc1,
            layer.mlp.linear_fc2,
        ):
            module.forward = partial(_apply, module, later)


def _apply(linear: nn.Linear, later: WeightGradients, input_H: Tensor) -> Tensor:
    return multiply(input_H, linear.weight, linear.bias, later)
