"""GELU in its tanh form, as GPT-2 and Megatron have it.

On many CPUs torch computes it more slowly than the memory could hand it the numbers (docs/benchmarks.md). There it is done here
in pieces that stay in the processor's cache, from operations that torch does fast, and backward is left one product.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.model.kernel_choice import PIECE, gelu_works_in_pieces

# gelu(x) = x * (1 + tanh(sqrt(2 / pi) * (x + CUBIC * x^3))) / 2 = x * sigmoid(OUTER * (x + CUBIC * x^3))
CUBIC = 0.044715
OUTER = 2 * math.sqrt(2 / math.pi)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU of a tensor of any shape and precision."""
    if torch.compiler.is_compiling():  # would keep torch's slow tanh, and fuses this formula
        wide = x.float()
        return (wide * torch.sigmoid(OUTER * wide * (1 + CUBIC * wide * wide))).to(x.dtype)
    if gelu_works_in_pieces(x.device.type == "cpu", x.element_size()):
        return _InPieces.apply(x)
    return F.gelu(x, approximate="tanh")


class _InPieces(torch.autograd.Function):
    """GELU computed in pieces, which keeps its slope for backward instead of its input."""

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
    in_fp32 = x.dtype == torch.float32
    slopes = itertools.repeat(None) if slope is None else slope.split(room.shape[1])
    for piece, result_piece, slope_piece in zip(x.split(room.shape[1]), result.split(room.shape[1]), slopes):
        inner, gate, *copies = room[:, : len(piece)].unbind()
        wide, out = (piece, result_piece) if in_fp32 else copies
        if not in_fp32:
            wide.copy_(piece)
        torch.addcmul(outer, wide, wide, value=OUTER * CUBIC, out=inner).mul_(wide)
        torch.sigmoid(inner, out=gate)
        torch.mul(wide, gate, out=out)
        if not in_fp32:
            result_piece.copy_(out)  # straight into the result the product would take memory of its own
        if slope_piece is None:
            continue
        # gate + x * gate' with gate' = gate * (1 - gate) * inner' and x * inner' = 3 * inner - 2 * OUTER * x
        inner.sub_(wide, alpha=2 / 3 * OUTER)
        out = slope_piece if in_fp32 else out
        torch.addcmul(gate, gate, gate, value=-1, out=out)
        torch.addcmul(gate, out, inner, value=3, out=out)
        if not in_fp32:
            slope_piece.copy_(out)


def room_for(x: Tensor) -> tuple[Tensor, Tensor]:
    """Buffers in fp32 for a piece of x, and OUTER."""
    length = max(1, min(PIECE * torch.get_num_threads(), x.numel()))
    copies = 2 if x.dtype == torch.float32 else 4
    return torch.empty(copies, length, dtype=torch.float32), torch.full((), OUTER)
