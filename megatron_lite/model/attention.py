"""The attention kernels.

Letters: B batch, N query heads, G query groups (key/value heads), T positions, D width of one head.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_lite.model.kernel_choice import QUERIES_AT_ONCE

softmax_backward = torch.ops.aten._softmax_backward_data.out


@dataclass(frozen=True)
class Attend:
    """An attention kernel that was chosen.

    function(q_BNTD, k_BGTD, v_BGTD, mask_B1TT, dropout, layer_number) -> out_BNTD; mask True = may attend, None =
    causal; dropout is a probability; layer_number counts from 1.
    name: what will run. why_not: one line for each fused kernel that cannot run here, if it was asked for. timed: what a race
    of kernels measured, in words.
    """

    function: Callable[..., Tensor]
    name: str
    why_not: tuple[str, ...] = ()
    timed: str = ""


def make_document_mask(documents_BT: Tensor) -> Tensor:
    """mask_B1TT, True where the row's token may attend to the column's: same document number, not later."""
    same = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
    return same.tril()


def explicit_attention(
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    mask_B1TT: Tensor | None,
    dropout: float,
    layer_number: int,
    *,
    fp32_softmax: bool,
    scale_by_layer: bool,
    skip_future: bool = False,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with the scores held in memory; arguments and result as in Attend.

    skip_future: by blocks of queries, where kernel_choice.skips_future_scores allows it. scale_by_layer: the stored scores are divided by layer_number, which keeps them in fp16's range, and multiplied
    back inside the softmax (which then is in fp32).
    """
    if skip_future:
        return _CausalAttention.apply(q_BNTD, _repeat_heads(k_BGTD, q_BNTD), _repeat_heads(v_BGTD, q_BNTD))
    k_BNTD, v_BNTD = _repeat_heads(k_BGTD, q_BNTD), _repeat_heads(v_BGTD, q_BNTD)
    damping = layer_number if scale_by_layer else 1
    scale = 1 / (math.sqrt(q_BNTD.shape[-1]) * damping)
    scores = _compute_scores(q_BNTD, k_BNTD, scale, mask_B1TT)
    if fp32_softmax or scale_by_layer:
        scores = scores.float() * damping
    probabilities = scores.softmax(dim=-1).to(v_BNTD.dtype)
    if dropout:
        probabilities = F.dropout(probabilities, dropout)
    return probabilities @ v_BNTD


def _compute_scores(q_BNTD: Tensor, k_BNTD: Tensor, scale: float, mask_B1TT: Tensor | None) -> Tensor:
    """scale * q k^T, -inf where a token must not look; BNTT."""
    if mask_B1TT is not None:
        return ((q_BNTD * scale) @ k_BNTD.transpose(-2, -1)).masked_fill(~mask_B1TT, -math.inf)
    rows, positions, width = q_BNTD.shape[:2].numel(), *q_BNTD.shape[2:]
    future = torch.full((positions, positions), -math.inf, dtype=q_BNTD.dtype, device=q_BNTD.device).triu(1)
    # scaling and masking within the product: no pass of their own over the scores
    scores = torch.baddbmm(
        future.expand(rows, -1, -1),
        q_BNTD.reshape(rows, positions, width),
        k_BNTD.reshape(rows, positions, width).transpose(1, 2),
        alpha=scale,
    )
    return scores.view(*q_BNTD.shape[:3], positions)


class _CausalAttention(torch.autograd.Function):
    """softmax(q k^T / sqrt(D)) v by blocks of queries, none of which meets the keys behind its end. Letters: L = B * N.

    Less work than the whole square, in larger products than a fused kernel's; on CPUs in fp32 the fastest (docs/benchmarks.md).
    """

    @staticmethod
    def forward(ctx, q_BNTD: Tensor, k_BNTD: Tensor, v_BNTD: Tensor) -> Tensor:
        q_LTD, k_LTD, v_LTD = (x_BNTD.flatten(0, 1) for x_BNTD in (q_BNTD, k_BNTD, v_BNTD))
        length, width = q_LTD.shape[1:]
        future_TT = torch.full((length, length), -math.inf, dtype=q_LTD.dtype, device=q_LTD.device).triu(1)
        out_BTND, blocks = torch.empty_like(q_BNTD.transpose(1, 2), memory_format=torch.contiguous_format), []
        for start in range(0, length, QUERIES_AT_ONCE):
            end = min(start + QUERIES_AT_ONCE, length)
            future_L1T = future_TT[start:end, :end].expand(len(q_LTD), -1, -1)
            scores = torch.baddbmm(future_L1T, q_LTD[:, start:end], k_LTD[:, :end].mT, alpha=width**-0.5)
            torch.softmax(scores, -1, out=scores)
            _write_rows(out_BTND, start, scores @ v_LTD[:, :end])
            blocks.append(scores)
        ctx.save_for_backward(q_LTD, k_LTD, v_LTD, *blocks)
        return out_BTND.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient_BNTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_LTD, k_LTD, v_LTD, *blocks = ctx.saved_tensors
        gradient_LTD, scale = gradient_BNTD.flatten(0, 1), q_LTD.shape[-1] ** -0.5
        of_q_BTND = torch.empty_like(gradient_BNTD.transpose(1, 2), memory_format=torch.contiguous_format)
        of_k_LTD = of_v_LTD = None
        for probabilities in reversed(blocks):  # the last one meets all keys
            end = probabilities.shape[-1]
            start = end - probabilities.shape[1]
            of_v = probabilities.mT @ gradient_LTD[:, start:end]
            of_scores = gradient_LTD[:, start:end] @ v_LTD[:, :end].mT
            softmax_backward(of_scores, probabilities, -1, probabilities.dtype, grad_input=of_scores)
            _write_rows(of_q_BTND, start, (of_scores @ k_LTD[:, :end]).mul_(scale))
            of_k = of_scores.mT @ q_LTD[:, start:end]
            if of_k_LTD is None:
                of_k_LTD, of_v_LTD = of_k, of_v
            else:
                of_k_LTD[:, :end].add_(of_k)
                of_v_LTD[:, :end].add_(of_v)
        return of_q_BTND.transpose(1, 2), of_k_LTD.mul_(scale).view_as(gradient_BNTD), of_v_LTD.view_as(gradient_BNTD)


def _write_rows(whole_BTND: Tensor, start: int, rows_LRD: Tensor):
    """Write rows in the layout that the output projection reads."""
    rows_BRND = rows_LRD.unflatten(0, (len(whole_BTND), -1)).transpose(1, 2)
    whole_BTND[:, start : start + rows_BRND.shape[1]] = rows_BRND


def sdpa_attention(
    q_BNTD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    mask_B1TT: Tensor | None,
    dropout: float,
    layer_number: int,
    *,
    backend: SDPBackend | None,
    expand: bool,
) -> Tensor:
    """torch's scaled_dot_product_attention, restricted to one backend unless that is None.

    expand: repeat keys and values per head, for kernels that know no groups. layer_number is not needed: the fused
    kernels keep scores in fp32, so that dividing by it and multiplying back would change nothing.
    """
    if expand:
        k_BGTD, v_BGTD = _repeat_heads(k_BGTD, q_BNTD), _repeat_heads(v_BGTD, q_BNTD)
    arguments = make_sdpa_arguments(q_BNTD, k_BGTD, mask_B1TT, dropout)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q_BNTD, k_BGTD, v_BGTD, **arguments)


def make_sdpa_arguments(q_BNTD: Tensor, k_BGTD: Tensor, mask_B1TT: Tensor | None, dropout: float) -> dict:
    return {
        "attn_mask": mask_B1TT,
        "dropout_p": dropout,
        "is_causal": mask_B1TT is None,
        "enable_gqa": q_BNTD.shape[1] != k_BGTD.shape[1],
    }


def _repeat_heads(x_BGTD: Tensor, q_BNTD: Tensor) -> Tensor:
    """Keys or values repeated for each head of their group."""
    repeats = q_BNTD.shape[1] // x_BGTD.shape[1]
    return x_BGTD if repeats == 1 else x_BGTD.repeat_interleave(repeats, dim=1)
