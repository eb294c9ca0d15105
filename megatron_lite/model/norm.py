"""LayerNorm and RMSNorm.

Letter: W normalized width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.shape import ModelShape


class Norm(nn.Module):
    """Normalizes the last dimension; input and output (..., W), same dtype.

    Parameters: weight_W, and bias_W for LayerNorm only. With layernorm_1p the stored weight is the real one minus 1.
    """

    def __init__(self, width: int, shape: ModelShape):
        super().__init__()
        self.width = (width,)
        self.eps = shape.norm_epsilon
        self.minus_one = shape.layernorm_1p
        start = torch.zeros(width) if self.minus_one else torch.ones(width)
        self.weight = nn.Parameter(start)
        self.bias = None
        if shape.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.minus_one:
            # 1 + weight is formed in fp32: in bf16 the sum would round away the digits that storing it minus one
            # preserves.
            wide = x.float()
            weight = weight.float() + 1
            bias = None if bias is None else bias.float()
        if bias is None:
            normalized = F.rms_norm(wide, self.width, weight, self.eps)
        else:
            normalized = F.layer_norm(wide, self.width, weight, bias, self.eps)
        return normalized.to(x.dtype) if self.minus_one else normalized
