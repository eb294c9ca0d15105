"""GELU in its tanh form in blocks that stay in the processor's cache (docs/decisions/028).

On many CPUs torch computes it more slowly than the memory could hand it the numbers (docs/benchmarks.md). Here it is
made of operations that torch does fast, and backward is left one product.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.config.cpu_kernel_rules import GELU_BLOCK
from megatron_lite.model.mlp import GELU_CUBIC, GELU_SCALE


def gelu_in_blocks(x: Tensor) -> Tensor:
    """Compute gelu_tanh of a tensor of any shape and precision."""
    result: Tensor = _InBlocks.apply(x)  # type: ignore[no-untyped-call]
    return result


class _InBlocks(torch.autograd.Function):
    """GELU computed in blocks, which keeps its slope for backward instead of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        result = torch.empty_like(x)
        slope = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        room, scale = _make_room(x)
        if not _is_without_data(x):
            flat_slope = None if slope is None else slope.view(-1)
            _fill(x.view(-1), result.view(-1), flat_slope, room, scale)
        if slope is not None:
            ctx.save_for_backward(slope)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        slope: Tensor = ctx.saved_tensors[0]
        return gradient * slope


def _is_without_data(x: Tensor) -> bool:
    """Whether x has sizes only, as where memory is measured without running anything."""
    return x.untyped_storage().device.type == "meta"


def _make_room(x: Tensor) -> tuple[Tensor, Tensor]:
    """Buffers in fp32 for a block of x, and GELU_SCALE."""
    block = GELU_BLOCK * torch.get_num_threads()
    length = max(1, min(block, x.numel()))
    copies = 2 if x.dtype == torch.float32 else 4
    room = torch.empty(copies, length, dtype=torch.float32)
    return room, torch.full((), GELU_SCALE)


def _fill(
    x: Tensor,
    result: Tensor,
    slope: Tensor | None,
    room: Tensor,
    scale: Tensor,
) -> None:
    """Compute GELU and its slope.

    Args:
        x: Numbers, flat.
        result: Room for gelu(x).
        slope: Room for gelu'(x); None where no backward follows.
        room: Buffers, as _make_room returns them.
        scale: GELU_SCALE, as a scalar tensor.
    """
    in_fp32 = x.dtype == torch.float32
    length = room.shape[1]
    slopes = itertools.repeat(None) if slope is None else slope.split(length)
    for block, result_block, slope_block in zip(x.split(length), result.split(length), slopes):
        inner, gate, *copies = room[:, : len(block)].unbind()
        if in_fp32:
            wide = block
            out = result_block
        else:
            wide = copies[0].copy_(block)
            out = copies[1]
        torch.addcmul(scale, wide, wide, value=GELU_SCALE * GELU_CUBIC, out=inner).mul_(wide)
        torch.sigmoid(inner, out=gate)
        torch.mul(wide, gate, out=out)
        if not in_fp32:
            result_block.copy_(out)  # straight into the result the product would take memory of its own
        if slope_block is None:
            continue
        # gate + x * gate' with gate' = gate * (1 - gate) * inner' and x * inner' = 3 * inner - 2 * GELU_SCALE * x
        inner.sub_(wide, alpha=2 / 3 * GELU_SCALE)
        if in_fp32:
            out = slope_block
        torch.addcmul(gate, gate, gate, value=-1, out=out)
        torch.addcmul(gate, out, inner, value=3, out=out)
        if not in_fp32:
            slope_block.copy_(out)
