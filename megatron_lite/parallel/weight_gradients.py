"""Backward in two halves: gradients of inputs at once, since other stages of a pipeline wait for them; gradients of
weights when there is time.

Qi et al. 2023, arXiv 2401.10241. Put on from outside: linear layers keep what their weights' gradients are computed
from. Letters: W output, H input channels.
"""

from collections import deque
from functools import partial

import torch
from torch import Tensor, nn

from megatron_lite.model.products import Keep, LinearByHand, Products


class WeightGradients:
    """What gradients of weights are computed from, of each micro-batch in the order of their backwards."""

    def __init__(self):
        self._kept: deque[list[tuple[nn.Parameter, Products, Tensor, Tensor]]] = deque()

    def begin(self):
        """From here on belongs to another micro-batch's backward."""
        self._kept.append([])

    def take_over(self, weight_WH: nn.Parameter, products: Products) -> tuple[Tensor, Keep]:
        """The weight as a number that needs no gradient,
        and what a backward calls instead of computing one by `products`."""
        return weight_WH.detach(), partial(self._keep, weight_WH, products)

    def _keep(self, weight_WH: nn.Parameter, products: Products, input_H: Tensor, gradient_W: Tensor):
        self._kept[-1].append((weight_WH, products, input_H, gradient_W))

    def add(self):
        """The earliest micro-batch's, to the weights' gradients as autograd does it:
        hooks of the parameters are called."""
        kept = self._kept.popleft()
        while kept:
            weight_WH, products, input_H, gradient_W = kept.pop()
            with torch.no_grad():
                gradient_WH = products.compute_weight_gradient(gradient_W.flatten(0, -2), input_H.flatten(0, -2))
            torch.autograd.backward(weight_WH, gradient_WH)


def delay_weights(model: nn.Module, products: Products, later: WeightGradients):
    """Have the layers' weights get their gradients from `later`, and all else by these products."""
    for layer in model.decoder.layers:
        for module in (
            layer.self_attention.linear_qkv,
            layer.self_attention.linear_proj,
            layer.mlp.linear_fc1,
            layer.mlp.linear_fc2,
        ):
            module.forward = partial(_apply, module, products, later)


def _apply(module: nn.Linear, products: Products, later: WeightGradients, input_H: Tensor) -> Tensor:
    weight_WH, keep = later.take_over(module.weight, products)
    return LinearByHand.apply(input_H, weight_WH, module.bias, products, keep)
