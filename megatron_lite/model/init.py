"""How parameters start: normal with Megatron's standard deviations."""

import math

import torch
from torch import nn

from megatron_lite.config.shape import ModelShape

# Their outputs are summed over 2L residual additions; the smaller start keeps that sum's variance independent of L
# (Radford et al. 2019, section 2.3).
RESIDUAL_OUTPUTS = ("linear_proj", "linear_fc2")


@torch.no_grad()
def initialize(model: nn.Module, shape: ModelShape) -> None:
    """Fills every parameter in place, in the order of named_parameters; torch.manual_seed decides the numbers.

    Matrices normal(0, std), those that write into the residual stream std/sqrt(2L); biases 0; norm weights 1
    (0 with layernorm_1p, which stores them minus 1).
    """
    for name, parameter in model.named_parameters():
        owner, kind = name.split(".")[-2:]
        if kind == "bias":
            nn.init.zeros_(parameter)
        elif owner.endswith("layernorm"):
            nn.init.constant_(parameter, 0.0 if shape.layernorm_1p else 1.0)
        elif owner in RESIDUAL_OUTPUTS:
            nn.init.normal_(parameter, std=shape.init_method_std / math.sqrt(2 * shape.num_layers))
        else:
            nn.init.normal_(parameter, std=shape.init_method_std)
