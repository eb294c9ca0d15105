"""GELU without data: on a CPU the tensors of model/gelu.py's pieces, without the loop over them, which takes minutes to walk."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.model.gelu import room_for


def rehearsed_gelu(x: Tensor) -> Tensor:
    """As gelu_tanh on a CPU."""
    return _Pieces.apply(x)


def cuda_gelu(x: Tensor) -> Tensor:
    """As gelu_tanh on a GPU."""
    return F.gelu(x, approximate="tanh")


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()
        result, slope = torch.empty_like(x), torch.empty_like(x)
        room_for(x)
        ctx.save_for_backward(slope)
        return result

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return gradient * slope
