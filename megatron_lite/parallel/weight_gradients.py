"""Backward in two halves: gradients of inputs at once, since other stages of a pipeline wait for them; gradients of
weights when there is time.

Qi et al. 2023, arXiv 2401.10241. Put on from outside: linear layers keep what their weights' gradients are computed
from. Letters: W output, H input channels.
"""

from collections import deque
from functools import partial

import torch
from torch import Tensor, nn

from megatron_lite.model.gpt import GPT
from megatron_lite.model.mlp import MLP
from megatron_lite.model.products import Keep, Products, multiply_by_hand
from megatron_lite.parallel.layers import replace_method

# what the gradient of one weight is computed from: the weight, what multiplies, the layer's input (..., H), and the
# gradient (..., W) of its output
_Kept = tuple[Tensor, Products, Tensor, Tensor]


class WeightGradients:
    """The factors of weights' gradients, of each micro-batch in the order of their backwards."""

    def __init__(self) -> None:
        self._kept: deque[list[_Kept]] = deque()

    def begin(self) -> None:
        """Assign what comes from here on to another micro-batch's backward."""
        self._kept.append([])

    def take_over(self, weight_WH: Tensor, products: Products) -> tuple[Tensor, Keep]:
        """Take a weight's gradient over from autograd.

        Args:
            weight_WH: A parameter.
            products: Compute its gradient.

        Returns:
            The weight as a number that needs no gradient, and what a backward calls instead of computing one.
        """
        return weight_WH.detach(), partial(self._keep, weight_WH, products)

    def _keep(self, weight_WH: Tensor, products: Products, input_H: Tensor, gradient_W: Tensor) -> None:
        self._kept[-1].append((weight_WH, products, input_H, gradient_W))

    def add(self) -> None:
        """Add the earliest micro-batch's gradients to the weights' as autograd does it: hooks of the parameters are
        called."""
        kept = self._kept.popleft()
        while kept:
            weight_WH, products, input_H, gradient_W = kept.pop()
            with torch.no_grad():
                gradient_WH = products.compute_weight_gradient(gradient_W.flatten(0, -2), input_H.flatten(0, -2))
            torch.autograd.backward(weight_WH, gradient_WH)


def delay_weights(model: GPT, products: Products, later: WeightGradients) -> None:
    """Have the weights of all layers get their gradients later than all else.

    Args:
        model: The model, built.
        products: Compute results and all other gradients.
        later: Keeps what the weights' gradients are computed from.
    """
    for layer in model.list_layers():
        attention = layer.self_attention
        mlp = layer.mlp
        assert isinstance(mlp, MLP), "experts' backward is one piece"
        of_attention = (*attention.columns, *attention.replicated, attention.linear_proj)
        for module in (*of_attention, mlp.linear_fc1, mlp.linear_fc2):
            replace_method(module, "forward", partial(_apply, module, products, later))


def _apply(module: nn.Linear, products: Products, later: WeightGradients, input_H: Tensor) -> Tensor:
    weight_WH, keep = later.take_over(module.weight, products)
    return multiply_by_hand(input_H, weight_WH, module.bias, products, keep)
