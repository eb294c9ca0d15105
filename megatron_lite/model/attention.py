"""The attention kernels.

Letters: B batch, N query heads, G query groups (key/value heads), T positions, D width of one head.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

EXPLICIT = "explicit"  # the name of explicit_attention


@dataclass(frozen=True)
class Attend:
    """An attention kernel that was chosen.

    function(q_BNTD, k_BGTD, v_BGTD, mask_B1TT, dropout, layer_number) -> out_BNTD; mask True = may attend, None =
    causal; dropout is a probability; layer_number counts from 1.
    name: what will run. why_not: one line for each fused kernel that cannot run here, if it was asked for. timed: what
    a race of kernels measured, in words. recomputes: it keeps its arguments only, and computes again in backward.
    """

    function: Callable[..., Tensor]
    name: str
    why_not: tuple[str, ...] = ()
    timed: str = ""
    recomputes: bool = False


def make_document_mask(documents_BT: Tensor) -> Tensor:
    """mask_B1TT, True where the row's token may attend to the column's: same document number, not later."""
    same = documents_BT[:, None, :, None] == documents_BT[:, None, None, :]
    return same.tril()


def narrow_mask(mask_B1TT: Tensor | None, length: int, window: int, device: torch.device) -> Tensor:
    """The mask, causal if None, of a token that attends to `window` tokens before itself only."""
    if mask_B1TT is None:
        mask_B1TT = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
    return mask_B1TT.triu(-window)


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
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with the scores held in memory; arguments and result as in Attend.

    scale_by_layer: the stored scores are divided by layer_number, which keeps them in fp16's range, and multiplied back
    inside the softmax (which then is in fp32).
    """
    k_BNTD, v_BNTD = repeat_heads(k_BGTD, q_BNTD), repeat_heads(v_BGTD, q_BNTD)
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
        k_BGTD, v_BGTD = repeat_heads(k_BGTD, q_BNTD), repeat_heads(v_BGTD, q_BNTD)
    arguments = make_sdpa_arguments(q_BNTD, k_BGTD, mask_B1TT, dropout)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q_BNTD, k_BGTD, v_BGTD, **arguments)


def make_sdpa_arguments(q_BNTD: Tensor, k_BGTD: Tensor, mask_B1TT: Tensor | None, dropout: float) -> dict[str, Any]:
    return {
        "attn_mask": mask_B1TT,
        "dropout_p": dropout,
        "is_causal": mask_B1TT is None,
        "enable_gqa": q_BNTD.shape[1] != k_BGTD.shape[1],
    }


def repeat_heads(x_BGTD: Tensor, q_BNTD: Tensor) -> Tensor:
    """Keys or values repeated for each head of their group."""
    repeats = q_BNTD.shape[1] // x_BGTD.shape[1]
    return x_BGTD if repeats == 1 else x_BGTD.repeat_interleave(repeats, dim=1)
