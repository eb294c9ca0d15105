"""GELU in its tanh form, as GPT-2 and Megatron have it.

On a CPU torch computes it several times slower than the memory could hand it the numbers (docs/benchmarks.md). There it is done here in
pieces that stay in the processor's cache, from operations that torch does fast, and backward is left one product.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.estimate.gelu import COPIES, PIECE

# gelu(x) = x * (1 + tanh(sqrt(2 / pi) * (x + CUBIC * x^3))) / 2 = x * sigmoid(OUTER * (x + CUBIC * x^3))
CUBIC = 0.044715
OUTER = 2 * math.sqrt(2 / math.pi)


def gelu_tanh(x: Tensor) -> Tensor:
    """Any shape, any precision."""
    if torch.compiler.is_compiling():  # would keep torch's slow tanh, and fuses this formula
        wide = x.float()
        return (wide * torch.sigmoid(OUTER * wide * (1 + CUBIC * wide * wide))).to(x.dtype)
    if x.device.type != "cpu":
        return F.gelu(x, approximate="tanh")
    return _InPieces.apply(x)


class _InPieces(torch.autograd.Function):
    """Keeps the slope instead of x."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()
        result = torch.empty_like(x)
        slope = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        _fill(x.view(-1), result.view(-1), None if slope is None else slope.view(-1))
        if slope is not None:
            ctx.save_for_backward(slope)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return gradient * slope


def _fill(x: Tensor, result: Tensor, slope: Tensor | None):
    """result = gelu(x) and, where it is asked for, slope = gelu'(x); flat."""
    room = room_for(x)
    length = room.shape[1]
    is_wide = x.dtype == room.dtype
    for first in range(0, x.numel(), length):
        piece, result_piece = x[first : first + length], result[first : first + length]
        wide, square, gate, spare = room[:, : len(piece)]
        wide = piece if is_wide else wide.copy_(piece)
        torch.mul(wide, wide, out=square)
        torch.addcmul(wide, wide, square, value=CUBIC, out=gate).mul_(OUTER).sigmoid_()
        torch.mul(wide, gate, out=result_piece if is_wide else spare)
        if not is_wide:  # an out of another precision would take memory of its own
            result_piece.copy_(spare)
        if slope is not None:
            # gate + x * gate' with gate' = gate * (1 - gate) * OUTER * (1 + 3 * CUBIC * x^2)
            torch.addcmul(wide, wide, square, value=3 * CUBIC, out=square)
            torch.addcmul(gate, gate, gate, value=-1, out=spare)
            slope[first : first + length].copy_(gate.addcmul_(spare, square, value=OUTER))


def room_for(x: Tensor) -> Tensor:
    """fp32 buffers of a piece of x."""
    return torch.empty(COPIES, max(1, min(PIECE * torch.get_num_threads(), x.numel())), dtype=torch.float32)
