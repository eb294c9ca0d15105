"""LayerNorm and RMSNorm with the switches of Megatron. Letters: W normalised width."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config.shape import ModelShape


class Norm(nn.Module):
    """Normalises the last dimension; input and output (..., W), same dtype.

    Parameters: weight_W, and bias_W for LayerNorm only. With layernorm_1p the stored weight is the real one minus 1.
    """

    def __init__(self, width: int, shape: ModelShape):
        super().__init__()
        self.width = (width,)
        self.eps = shape.norm_epsilon
        self.minus_one = shape.layernorm_1p
        self.weight = nn.Parameter(torch.zeros(width) if self.minus_one else torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if shape.normalization == "LayerNorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.minus_one:
            return self._normalise(x, self.weight, self.bias)
        # 1 + weight is formed in fp32: in bf16 the sum would round away the digits that storing it minus one preserves.
        bias = None if self.bias is None else self.bias.float()
        return self._normalise(x.float(), self.weight.float() + 1, bias).to(x.dtype)

    def _normalise(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return F.rms_norm(x, self.width, weight, self.eps)
        return F.layer_norm(x, self.width, weight, bias, self.eps)
