"""The MLP of a layer, and its activations.

Letters: B batch, T positions, H hidden, F width of the activation's output.
"""

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.shape import ModelShape

# gelu_tanh(x) = x * (1 + tanh(sqrt(2 / pi) * (x + CUBIC * x^3))) / 2 = x * sigmoid(SCALE * (x + CUBIC * x^3))
GELU_CUBIC = 0.044715
GELU_SCALE = 2 * math.sqrt(2 / math.pi)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_erf(x: Tensor) -> Tensor:
    return F.gelu(x)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """(..., 2F) -> (..., F): the first half is the gate, the second the value."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


ACTIVATIONS = {f.__name__: f for f in (gelu_tanh, gelu_erf, squared_relu, swiglu)}


class MLP(nn.Module):
    """hidden_BTH -> fc1 -> activation -> fc2 -> BTH. For swiglu the rows of fc1 are all gates, then all values."""

    def __init__(self, shape: ModelShape, width: int | None = None):
        """width: F; None: the shape's."""
        super().__init__()
        inner = shape.ffn_hidden_size if width is None else width
        self.linear_fc1 = nn.Linear(shape.hidden_size, shape.count_fc1_rows(inner), bias=shape.linear_bias)
        self.linear_fc2 = nn.Linear(inner, shape.hidden_size, bias=shape.linear_bias)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[shape.activation]

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        out_BTH: Tensor = self.linear_fc2(self.activation(self.linear_fc1(hidden_BTH)))
        return out_BTH
