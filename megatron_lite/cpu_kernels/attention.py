"""Attention as a CPU computes it fastest (docs/decisions/034, 041).

Letters: B batch, N query heads, G query groups, T positions, D width of one head, L = B * N,
R positions of a block of queries, S positions of the keys that it meets.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from megatron_lite.config.cpu_kernel_rules import QUERY_BLOCK
from megatron_lite.model.attention import EXPLICIT, Attend, Scope, repeat_heads

softmax_backward = torch.ops.aten._softmax_backward_data.out


def suit_attention(attend: Attend, *, skips_future: bool, widens: bool, drops: bool) -> Attend:
    """A chosen attention kernel, as a CPU computes it best.

    Args:
        attend: The kernel that choose_attention has chosen.
        skips_future: Whether the explicit kernel goes by blocks of queries, without a mask.
        widens: Whether the processor multiplies these numbers in fp32 only.
        drops: Whether there is dropout of probabilities.
    """
    is_explicit = attend.name == EXPLICIT
    function = attend.function
    if skips_future and is_explicit:
        function = attend_causally
    if not widens or (drops and not is_explicit):  # torch's own attention with dropout converts to fp32 by itself
        return replace(attend, function=function)
    # rather than keeping queries, keys and values in fp32
    again = partial(checkpoint, partial(_attend_in_fp32, function), use_reentrant=False)
    return replace(attend, function=again, recomputes=True)


def _attend_in_fp32(function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    """Attention of 16-bit numbers, computed in fp32 and rounded once; arguments after `function` as in Attend."""
    wide = function(q.float(), k.float(), v.float(), *others)
    return wide.to(q.dtype)


def attend_causally(
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    scope: Scope,
    dropout: float,
    layer_number: int,
) -> Tensor:
    """Compute causal attention, softmax(q k^T / sqrt(D)) v, without future scores.

    Args:
        q_BNTD: Queries, fp32.
        k_BGTD: Keys.
        v_BGTD: Values.
        scope: Plain causal.
        dropout: Is 0; this and the layer's number are arguments of every Attend.
        layer_number: Unused.

    Returns:
        out_BNTD.
    """
    k_BNTD = repeat_heads(k_BGTD, q_BNTD)
    v_BNTD = repeat_heads(v_BGTD, q_BNTD)
    out_BNTD: Tensor = _CausalAttention.apply(q_BNTD, k_BNTD, v_BNTD)  # type: ignore[no-untyped-call]
    return out_BNTD


class _CausalAttention(torch.autograd.Function):
    """Causal attention by blocks of queries, none of which meets the keys behind its end.

    Less work than the whole square, in larger products than a fused kernel's; on CPUs in fp32 the fastest
    (docs/benchmarks.md).
    """

    @staticmethod
    def forward(ctx: Any, q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor) -> Tensor:
        q_LTD = q_BNTD.flatten(0, 1)
        k_LTD = k_BNTD.flatten(0, 1)
        v_LTD = v_BNTD.flatten(0, 1)
        length, width = q_LTD.shape[1:]
        hidden_TT = torch.full((length, length), -math.inf, dtype=q_LTD.dtype, device=q_LTD.device)
        future_TT = hidden_TT.triu(1)
        out_BTND = _make_room_like(q_BNTD)
        blocks = []
        for start in range(0, length, QUERY_BLOCK):
            end = min(start + QUERY_BLOCK, length)
            future_LRS = future_TT[start:end, :end].expand(len(q_LTD), -1, -1)
            keys_LSD = k_LTD[:, :end]
            values_LSD = v_LTD[:, :end]
            queries_LRD = q_LTD[:, start:end]
            scores_LRS = torch.baddbmm(future_LRS, queries_LRD, keys_LSD.mT, alpha=width**-0.5)
            torch.softmax(scores_LRS, -1, out=scores_LRS)
            _write_rows(out_BTND, start, scores_LRS @ values_LSD)
            blocks.append(scores_LRS)
        ctx.save_for_backward(q_LTD, k_LTD, v_LTD, *blocks)
        return out_BTND.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BNTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_LTD, k_LTD, v_LTD, *blocks = ctx.saved_tensors
        gradient_LTD = gradient_BNTD.flatten(0, 1)
        scale = q_LTD.shape[-1] ** -0.5
        of_q_BTND = _make_room_like(gradient_BNTD)
        sums: list[Tensor] = []  # the gradients of keys and values
        for softmax_LRS in reversed(blocks):  # the last one meets all keys
            end = softmax_LRS.shape[-1]
            start = end - softmax_LRS.shape[1]
            gradient_LRD = gradient_LTD[:, start:end]
            keys_LSD = k_LTD[:, :end]
            values_LSD = v_LTD[:, :end]
            of_v = softmax_LRS.mT @ gradient_LRD
            of_scores = gradient_LRD @ values_LSD.mT
            softmax_backward(of_scores, softmax_LRS, -1, softmax_LRS.dtype, grad_input=of_scores)
            of_q_LRD = of_scores @ keys_LSD
            _write_rows(of_q_BTND, start, of_q_LRD.mul_(scale))
            of_k = of_scores.mT @ q_LTD[:, start:end]
            if not sums:
                sums = [of_k, of_v]
                continue
            for total_LTD, part in zip(sums, (of_k, of_v)):
                total_LTD[:, :end].add_(part)
        of_k_BNTD = sums[0].mul_(scale).view_as(gradient_BNTD)
        of_v_BNTD = sums[1].view_as(gradient_BNTD)
        return of_q_BTND.transpose(1, 2), of_k_BNTD, of_v_BNTD


def _make_room_like(x_BNTD: Tensor) -> Tensor:
    """A tensor like x_BNTD in the layout BTND, which the output projection reads."""
    return torch.empty_like(x_BNTD.transpose(1, 2), memory_format=torch.contiguous_format)


def _write_rows(whole_BTND: Tensor, start: int, rows_LRD: Tensor) -> None:
    """Write the rows of a block of queries.

    Args:
        whole_BTND: Rows of all queries, to be filled in part.
        start: Position of the block's first query.
        rows_LRD: Rows of the block.
    """
    rows_BNRD = rows_LRD.unflatten(0, (len(whole_BTND), -1))
    end = start + rows_LRD.shape[1]
    whole_BTND[:, start:end] = rows_BNRD.transpose(1, 2)
