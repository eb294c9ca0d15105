"""Attention within documents and windows, and with an offset of its softmax, by flash kernels, which take no masks.

A GPU's kernel takes where documents begin and end, and the window. A CPU's knows causal attention alone: it computes
each document, and each part of a window, by itself.

No kernel knows an offset. With m = log(sum(exp(scores))), which they return, it multiplies a result by
s = sigmoid(m - offset) and makes m to m' = log(exp(m) + exp(offset)). Backward computes probabilities as
exp(scores - m') and subtracts from their gradients the product of the result and its gradient: given the new result and
m', it gives the gradients of the whole softmax. That of the offset is -exp(offset - m') times that product.

Letters as in attention.py; L = B * T or B * S, the tokens of all sequences one after another.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.config.shape import MIN_WINDOW_BLOCK
from megatron_lite.model.attention import Scope, cut_edges, make_mask, make_sdpa_arguments, repeat_heads

HEAD_STEP = 8  # channels: a GPU's flash kernel takes heads of a multiple of them


def flash_attention(
    q_BNTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scope: Scope,
    dropout: float,
    layer_number: int,
) -> Tensor:
    """Attend as explicit_attention does, without scores or masks in memory.

    The arguments are those of explicit_attention, as is the result.
    """
    if scope.is_plain and q_BNTD.shape[2] == k_BGSD.shape[2]:
        arguments = make_sdpa_arguments(q_BNTD, k_BGSD, None, dropout)
        out_BNTD: Tensor = F.scaled_dot_product_attention(q_BNTD, k_BGSD, v_BGSD, **arguments)
        return out_BNTD
    return _attend_uncompiled(q_BNTD, k_BGSD, v_BGSD, scope, dropout)


def _attend_within(q_BNTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scope: Scope, dropout: float) -> Tensor:
    """Attend as flash_attention does, where that is not plain causal."""
    if q_BNTD.is_cuda:
        return _attend_on_gpu(q_BNTD, k_BGSD, v_BGSD, scope, dropout)
    if scope.edges_E is None:
        return _attend_in_blocks(q_BNTD, k_BGSD, v_BGSD, scope, dropout)
    return _attend_by_document(q_BNTD, k_BGSD, v_BGSD, scope, dropout)


# how many documents there are is data, by which no graph is compiled; torch gives the decorator no types
_attend_uncompiled: Callable[..., Tensor] = torch.compiler.disable(_attend_within)

# --- on a CPU


def _attend_by_document(q_BNTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scope: Scope, dropout: float) -> Tensor:
    """Attend within one document after another."""
    queries = q_BNTD.shape[2]
    keys = k_BGSD.shape[2]
    assert scope.edges_E is not None
    edges_of_keys = scope.edges_E.tolist()
    edges_of_queries = cut_edges(scope.edges_E, keys, keys - queries, keys).tolist()
    rows: list[list[Tensor]] = [[] for _ in q_BNTD]
    for of_queries, of_keys in zip(pairwise(edges_of_queries), pairwise(edges_of_keys)):
        row = of_queries[0] // queries
        own_queries = slice(*(place - row * queries for place in of_queries))
        own_keys = slice(*(place - row * keys for place in of_keys))
        if own_queries.start == own_queries.stop:
            continue
        own_q = _take_part(q_BNTD, row, own_queries)
        own_k = _take_part(k_BGSD, row, own_keys)
        own_v = _take_part(v_BGSD, row, own_keys)
        rows[row].append(_attend_in_blocks(own_q, own_k, own_v, scope, dropout))
    return torch.cat([torch.cat(parts, dim=2) for parts in rows])


def _take_part(x_BNTD: Tensor, row: int, positions: slice) -> Tensor:
    """Take some positions of one sequence, as a batch of 1."""
    return x_BNTD[row : row + 1, :, positions]


def _attend_in_blocks(q_BNTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scope: Scope, dropout: float) -> Tensor:
    """Attend within one document, to all of it or to a window.

    With a window, a block of queries at a time meets the keys that any of them sees.

    Args:
        q_BNTD: Queries of the last positions of the keys.
        k_BGSD: Keys.
        v_BGSD: Values.
        scope: Whose window and offset count.
        dropout: The probability with which probabilities become 0.
    """
    queries = q_BNTD.shape[2]
    earlier = k_BGSD.shape[2] - queries
    window = scope.window
    block = queries if window is None else max(window, MIN_WINDOW_BLOCK)
    parts = []
    for start in range(0, queries, block):
        end = min(start + block, queries)
        first_key = 0 if window is None else max(earlier + start - window, 0)
        own_q = q_BNTD[:, :, start:end]
        own_k = k_BGSD[:, :, first_key : earlier + end]
        own_v = v_BGSD[:, :, first_key : earlier + end]
        mask_11TS = make_mask(Scope(window=window), 1, own_q.shape[2], own_k.shape[2], q_BNTD.device)
        if scope.offset_N is not None:
            parts.append(_attend_with_offset(own_q, own_k, own_v, mask_11TS, scope.offset_N))
            continue
        arguments = make_sdpa_arguments(own_q, own_k, mask_11TS, dropout)
        parts.append(F.scaled_dot_product_attention(own_q, own_k, own_v, **arguments))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _attend_with_offset(
    q_BNTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask_11TS: Tensor | None, offset_N: Tensor
) -> Tensor:
    """Attend, softmax(q k^T / sqrt(D)) v, with an offset of the softmax.

    Args:
        q_BNTD: Queries.
        k_BGSD: Keys.
        v_BGSD: Values.
        mask_11TS: True where a query attends to a key; None: plain causal.
        offset_N: The offset.
    """
    bias_11TS: Tensor | None = None
    if mask_11TS is not None:
        bias_11TS = torch.zeros_like(mask_11TS, dtype=q_BNTD.dtype).masked_fill_(~mask_11TS, -math.inf)
    k_BNSD = repeat_heads(k_BGSD, q_BNTD)
    v_BNSD = repeat_heads(v_BGSD, q_BNTD)
    return attend_offset(q_BNTD, k_BNSD, v_BNSD, bias_11TS, offset_N)


class _OffsetAttention(torch.autograd.Function):
    """A CPU's flash kernel with an offset of its softmax; gradients as at the head of this file."""

    @staticmethod
    def forward(
        ctx: Any, q_BNTD: Tensor, k_BNSD: Tensor, v_BNSD: Tensor, bias_11TS: Tensor | None, offset_N: Tensor
    ) -> Tensor:
        is_causal = bias_11TS is None
        out_BNTD, logsumexp_BNT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNTD, k_BNSD, v_BNSD, 0.0, is_causal, attn_mask=bias_11TS
        )
        offset_N1 = offset_N.float()[:, None]
        share_BNT = torch.sigmoid(logsumexp_BNT - offset_N1)
        result_BNTD: Tensor = out_BNTD * share_BNT[..., None].to(out_BNTD.dtype)
        whole_BNT = torch.logaddexp(logsumexp_BNT, offset_N1)
        ctx.save_for_backward(q_BNTD, k_BNSD, v_BNSD, result_BNTD, whole_BNT, bias_11TS, offset_N)
        return result_BNTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BNTD: Tensor) -> tuple[Tensor | None, ...]:
        q_BNTD, k_BNSD, v_BNSD, result_BNTD, whole_BNT, bias_11TS, offset_N = ctx.saved_tensors
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient_BNTD, q_BNTD, k_BNSD, v_BNSD, result_BNTD, whole_BNT, 0.0, bias_11TS is None, attn_mask=bias_11TS
        )
        taken_BNT = (offset_N.float()[:, None] - whole_BNT).exp()
        products_BNT = (gradient_BNTD * result_BNTD).sum(-1, dtype=torch.float32)
        of_offset_N = -(taken_BNT * products_BNT).sum((0, 2))
        return (*gradients, None, of_offset_N.to(offset_N.dtype))


# torch gives `apply` no types
attend_offset: Callable[..., Tensor] = _OffsetAttention.apply

# --- on a GPU


def _attend_on_gpu(q_BNTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scope: Scope, dropout: float) -> Tensor:
    """Attend by the flash kernel for sequences of several lengths, as torch.nn.attention.varlen does."""
    batch, _, queries, width = q_BNTD.shape
    keys = k_BGSD.shape[2]
    edges_E = scope.edges_E
    if edges_E is None:
        edges_E = torch.arange(batch + 1, dtype=torch.int32, device=q_BNTD.device) * keys
    of_queries_E = cut_edges(edges_E, keys, keys - queries, keys)
    q_LND, k_LGD, v_LGD = (_pack(x) for x in (q_BNTD, k_BGSD, v_BGSD))
    window = -1 if scope.window is None else scope.window
    sizes = (queries, keys, window, dropout, width**-0.5)
    out_LND = attend_varlen(q_LND, k_LGD, v_LGD, scope.offset_N, of_queries_E, edges_E, *sizes)
    out_BTND: Tensor = out_LND[..., :width].unflatten(0, (batch, queries))
    return out_BTND.transpose(1, 2)


def _pack(x_BNTD: Tensor) -> Tensor:
    """LND, with zeros behind the last channel up to a width that the kernel takes."""
    x_LND = x_BNTD.transpose(1, 2).flatten(0, 1)
    lacking = -x_LND.shape[-1] % HEAD_STEP
    return F.pad(x_LND, (0, lacking)) if lacking else x_LND


class _Varlen(torch.autograd.Function):
    """Flash kernel of torch for sequences of several lengths, causal from the end of each (pytorch/pytorch,
    torch/nn/attention/varlen.py, which has no dropout)."""

    @staticmethod
    def forward(
        ctx: Any,
        q_LND: Tensor,
        k_LGD: Tensor,
        v_LGD: Tensor,
        offset_N: Tensor | None,
        query_edges_E: Tensor,
        key_edges_E: Tensor,
        queries: int,
        keys: int,
        window: int,
        dropout: float,
        scale: float,
    ) -> Tensor:
        ctx.sizes = (queries, keys, dropout, window < 0)
        ctx.options = {"scale": scale, "window_size_left": window, "window_size_right": 0}
        out_LND, logsumexp_NL, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q_LND, k_LGD, v_LGD, query_edges_E, key_edges_E, *ctx.sizes, False, **ctx.options
        )
        if offset_N is not None:
            offset_N1 = offset_N.float()[:, None]
            share_NL = torch.sigmoid(logsumexp_NL - offset_N1)
            out_LND = out_LND * share_NL.T[..., None].to(out_LND.dtype)
            logsumexp_NL = torch.logaddexp(logsumexp_NL, offset_N1)
        tensors = (q_LND, k_LGD, v_LGD, out_LND, logsumexp_NL, query_edges_E, key_edges_E)
        ctx.save_for_backward(offset_N, *tensors, state, unused)
        result: Tensor = out_LND
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_LND: Tensor) -> tuple[Tensor | None, ...]:
        offset_N, *tensors, state, unused = ctx.saved_tensors
        gradients = torch.ops.aten._flash_attention_backward(
            gradient_LND.contiguous(), *tensors, *ctx.sizes, state, unused, **ctx.options
        )
        of_offset_N: Tensor | None = None
        if offset_N is not None:
            out_LND, logsumexp_NL = tensors[3:5]
            taken_NL = (offset_N.float()[:, None] - logsumexp_NL).exp()
            products_LN = (gradient_LND * out_LND).sum(-1, dtype=torch.float32)
            of_offset_N = -(taken_NL * products_LN.T).sum(1).to(offset_N.dtype)
        return (*gradients, of_offset_N, *[None] * 7)


# torch gives `apply` no types
attend_varlen: Callable[..., Tensor] = _Varlen.apply
