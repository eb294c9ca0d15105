"""GELU in its tanh form, as GPT-2 and Megatron have it.

On a CPU in 16 bits torch computes it more slowly than the memory could hand it the numbers (docs/benchmarks.md). There it is done here
in pieces that stay in the processor's cache, from operations that torch does fast, and backward is left one product.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.model.kernel_choice import COPIES, PIECE, works_in_pieces

# gelu(x) = x * (1 + tanh(sqrt(2 / pi) * (x + CUBIC * x^3))) / 2 = x * sigmoid(OUTER * (x + CUBIC * x^3))
CUBIC = 0.044715
OUTER = 2 * math.sqrt(2 / math.pi)


def gelu_tanh(x: Tensor) -> Tensor:
    """Any shape, any precision."""
    if torch.compiler.is_compiling():  # would keep torch's slow tanh, and fuses this formula
        wide = x.float()
        return (wide * torch.sigmoid(OUTER * wide * (1 + CUBIC * wide * wide))).to(x.dtype)
    if works_in_pieces(x.device.type == "cpu", x.element_size()):
        return _InPieces.apply(x)
    return F.gelu(x, approximate="tanh")


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
    room, outer = room_for(x)
    length, buffers = room.shape[1], room.unbind()
    slopes = itertools.repeat(None) if slope is None else slope.split(length)
    for piece, result_piece, slope_piece in zip(x.split(length), result.split(length), slopes):
        wide, inner, gate, spare = buffers if len(piece) == length else room[:, : len(piece)].unbind()
        wide.copy_(piece)
        torch.addcmul(outer, wide, wide, value=OUTER * CUBIC, out=inner).mul_(wide)
        torch.sigmoid(inner, out=gate)
        result_piece.copy_(torch.mul(wide, gate, out=spare))  # straight into the result it would take memory of its own
        if slope_piece is not None:
            # gate + x * gate' with gate' = gate * (1 - gate) * inner' and x * inner' = 3 * inner - 2 * OUTER * x
            inner.sub_(wide, alpha=2 / 3 * OUTER)
            torch.addcmul(gate, gate, gate, value=-1, out=spare)
            slope_piece.copy_(gate.addcmul_(spare, inner, value=3))


def room_for(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 buffers of a piece of x, and OUTER."""
    length = max(1, min(PIECE * torch.get_num_threads(), x.numel()))
    return torch.empty(COPIES, length, dtype=torch.float32), torch.full((), OUTER)
