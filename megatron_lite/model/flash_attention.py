"""Attention within documents and windows by flash kernels, which take no masks.

A GPU's kernel takes where documents begin and end, and the window. A CPU's knows causal attention alone: it computes
each document, and each part of a window, by itself.

Letters as in attention.py; L = B * T or B * S, the tokens of all sequences one after another.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.config.shape import MIN_WINDOW_BLOCK
from megatron_lite.model.attention import Scope, cut_edges, make_mask, make_sdpa_arguments

HEAD_STEP = 8  # channels: a GPU's flash kernel takes heads of a multiple of them


def flash_attention(
    q_BNTD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    scope: Scope,
    dropout: float,
    layer_number: int,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v without scores or masks in memory; arguments and result as in Attend."""
    if scope.is_causal and q_BNTD.shape[2] == k_BGSD.shape[2]:
        arguments = make_sdpa_arguments(q_BNTD, k_BGSD, None, dropout)
        out_BNTD: Tensor = F.scaled_dot_product_attention(q_BNTD, k_BGSD, v_BGSD, **arguments)
        return out_BNTD
    return _attend_uncompiled(q_BNTD, k_BGSD, v_BGSD, scope, dropout)


def _attend_within(q_BNTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scope: Scope, dropout: float) -> Tensor:
    """flash_attention of what is not plain causal."""
    if q_BNTD.is_cuda:
        return _attend_on_gpu(q_BNTD, k_BGSD, v_BGSD, scope, dropout)
    if scope.edges_E is None:
        return _attend_in_blocks(q_BNTD, k_BGSD, v_BGSD, scope.window, dropout)
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
        rows[row].append(_attend_in_blocks(own_q, own_k, own_v, scope.window, dropout))
    return torch.cat([torch.cat(parts, dim=2) for parts in rows])


def _take_part(x_BNTD: Tensor, row: int, positions: slice) -> Tensor:
    """Some positions of one sequence, a batch of 1."""
    return x_BNTD[row : row + 1, :, positions]


def _attend_in_blocks(q_BNTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, window: int | None, dropout: float) -> Tensor:
    """Attend to a window, a block of queries at a time with the keys that any of them sees.

    Args:
        q_BNTD: Queries of the last positions of the keys.
        k_BGSD: Keys.
        v_BGSD: Values.
        window: How many tokens before itself a query attends to; None: all.
        dropout: The probability with which probabilities become 0.
    """
    queries = q_BNTD.shape[2]
    earlier = k_BGSD.shape[2] - queries
    block = queries if window is None else max(window, MIN_WINDOW_BLOCK)
    parts = []
    for start in range(0, queries, block):
        end = min(start + block, queries)
        first_key = 0 if window is None else max(earlier + start - window, 0)
        own_q = q_BNTD[:, :, start:end]
        own_k = k_BGSD[:, :, first_key : earlier + end]
        own_v = v_BGSD[:, :, first_key : earlier + end]
        mask_11TS = make_mask(Scope(window=window), 1, own_q.shape[2], own_k.shape[2], q_BNTD.device)
        arguments = make_sdpa_arguments(own_q, own_k, mask_11TS, dropout)
        parts.append(F.scaled_dot_product_attention(own_q, own_k, own_v, **arguments))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


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
    out_LND = attend_varlen(q_LND, k_LGD, v_LGD, of_queries_E, edges_E, queries, keys, window, dropout, width**-0.5)
    out_BTND: Tensor = out_LND[..., :width].unflatten(0, (batch, queries))
    return out_BTND.transpose(1, 2)


def _pack(x_BNTD: Tensor) -> Tensor:
    """LND, with zeros behind the last channel up to a width that the kernel takes."""
    x_LND = x_BNTD.transpose(1, 2).flatten(0, 1)
    lacking = -x_LND.shape[-1] % HEAD_STEP
    return F.pad(x_LND, (0, lacking)) if lacking else x_LND


class _Varlen(torch.autograd.Function):
    """torch's flash kernel for sequences of several lengths, causal from the end of each (pytorch/pytorch,
    torch/nn/attention/varlen.py, which has no dropout)."""

    @staticmethod
    def forward(
        ctx: Any,
        q_LND: Tensor,
        k_LGD: Tensor,
        v_LGD: Tensor,
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
        ctx.save_for_backward(q_LND, k_LGD, v_LGD, out_LND, logsumexp_NL, query_edges_E, key_edges_E, state, unused)
        result: Tensor = out_LND
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_LND: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, state, unused = ctx.saved_tensors
        gradients = torch.ops.aten._flash_attention_backward(
            gradient_LND.contiguous(), *tensors, *ctx.sizes, state, unused, **ctx.options
        )
        return (*gradients, *[None] * 7)


# torch gives `apply` no types
attend_varlen: Callable[..., Tensor] = _Varlen.apply
