"""Puts a CPU's kernels on a model that was written without them, from outside, as parallelism is."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from megatron_lite.config.cpu_kernel_rules import (
    MAX_EXPLICIT_POSITIONS,
    count_loss_logits,
    explicit_is_faster,
    gelu_works_in_blocks,
    skips_future_scores,
)
from megatron_lite.config.shape import ModelShape
from megatron_lite.cpu_kernels.attention import suit_attention
from megatron_lite.cpu_kernels.experts import compute_one_by_one
from megatron_lite.cpu_kernels.gelu import gelu_in_blocks
from megatron_lite.cpu_kernels.loss import exponentiate, multiply_logits
from megatron_lite.cpu_kernels.products import PRODUCTS, is_widened
from megatron_lite.model.experts import list_mixtures
from megatron_lite.model.gpt import DTYPES, GPT
from megatron_lite.model.kernels import Activation, Kernels
from megatron_lite.model.mlp import gelu_tanh
from megatron_lite.model.products import Products

WHY_EXPLICIT = f"on a CPU it is slower for up to {MAX_EXPLICIT_POSITIONS} positions"


def choose_cpu_kernels(
    shape: ModelShape, precision: str, *, masked: bool = False, compiled: bool = False, threads: int = 1
) -> Kernels:
    """Choose the operations of a model on a CPU.

    Args:
        shape: The shape of this rank's part of the model.
        precision: fp32, fp16 or bf16.
        masked: Whether attention takes a mask.
        compiled: Whether layers are compiled. torch.compile does not cache layers that compute a gradient in Python.
        threads: How many threads this rank's operations use.
    """
    dtype = DTYPES[precision]
    skips_future = skips_future_scores(shape, precision, masked) and not compiled
    is_preferred = explicit_is_faster(shape, precision, masked) and (skips_future or precision == "bf16")
    activations: Mapping[Activation, Activation] = {}
    if gelu_works_in_blocks(dtype.itemsize) and not compiled:
        activations = {gelu_tanh: gelu_in_blocks}
    return Kernels(
        products=PRODUCTS,
        activations=activations,
        multiply_logits=multiply_logits,
        exponentiate=exponentiate,
        max_logits=count_loss_logits(threads),
        compute_experts=compute_one_by_one,
        why_explicit=WHY_EXPLICIT if is_preferred else "",
        suit_attention=partial(
            suit_attention,
            skips_future=skips_future,
            widens=is_widened(dtype),
            drops=shape.attention_dropout > 0,
        ),
    )


def install_kernels(model: GPT, kernels: Kernels) -> None:
    """Have the layers of a model that is built compute with these kernels.

    Attention and loss are arguments of GPT, and get theirs there. Call it before anything else is put on the layers.
    """
    for _, mixture in list_mixtures(model):
        mixture.experts.compute = kernels.compute_experts
    for layer in model.list_layers():
        attention = layer.self_attention
        linears = [*attention.columns, *attention.replicated, attention.linear_proj]
        mlp = layer.dense_mlp
        if mlp is not None:
            mlp.activation = kernels.activations.get(mlp.activation, mlp.activation)
            linears += [mlp.linear_fc1, mlp.linear_fc2]
        for module in linears:
            module.__class__ = LinearByProducts
            assert isinstance(module, LinearByProducts)
            module.products = kernels.products


class LinearByProducts(nn.Linear):
    """A linear layer whose products a device's kernels compute.

    A layer that is built becomes one by a change of its class. A function put on each layer would do as well, but
    torch.compile would take each for another one and compile every layer of a model anew.
    """

    products: Products

    def forward(self, input: Tensor) -> Tensor:
        return self.products.linear(input, self.weight, self.bias)
