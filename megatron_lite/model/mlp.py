"""The two-matrix MLP. Letters: B batch, T positions, H hidden, F width of fc1's output."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.shape import ModelShape
from megatron_lite.model.gelu import gelu_tanh


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

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.linear_fc1 = nn.Linear(shape.hidden_size, shape.fc1_width, bias=shape.linear_bias)
        self.linear_fc2 = nn.Linear(shape.ffn_hidden_size, shape.hidden_size, bias=shape.linear_bias)
        self.activation = ACTIVATIONS[shape.activation]

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        return self.linear_fc2(self.activation(self.linear_fc1(hidden_BTH)))
