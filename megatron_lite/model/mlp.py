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
    """GELU by its approximation with tanh, for a tensor of any shape."""
    return F.gelu(x, approximate="tanh")


def gelu_erf(x: Tensor) -> Tensor:
    """GELU by its definition, for a tensor of any shape."""
    return F.gelu(x)


def squared_relu(x: Tensor) -> Tensor:
    """Square of ReLU (So et al. 2021), for a tensor of any shape."""
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """SiLU of a gate times a value, [..., 2F] -> [..., F]: the first half is the gate (Shazeer 2020)."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


ACTIVATIONS = {
    "gelu_tanh": gelu_tanh,
    "gelu_erf": gelu_erf,
    "squared_relu": squared_relu,
    "swiglu": swiglu,
}


class MLP(nn.Module):
    """Two linear layers around an activation: hidden_BTH -> fc1 -> activation -> fc2 -> BTH.

    For swiglu the rows of fc1 are all gates, then all values.
    """

    def __init__(self, shape: ModelShape, width: int | None = None):
        """Build the layers. width: F, the activation's outputs; the shape's if None."""
        super().__init__()
        inner = shape.ffn_hidden_size if width is None else width
        rows = shape.count_fc1_rows(inner)
        self.linear_fc1 = nn.Linear(shape.hidden_size, rows, bias=shape.linear_bias)
        self.linear_fc2 = nn.Linear(inner, shape.hidden_size, bias=shape.linear_bias)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[shape.activation]

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        out_BTH: Tensor = self.linear_fc2(self.activation(self.linear_fc1(hidden_BTH)))
        return out_BTH
