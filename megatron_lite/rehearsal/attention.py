"""scaled_dot_product_attention as a GPU or a CPU computes it, for tensors without data.

torch looks at a tensor's device to choose the kernel, and what a kernel keeps for backward depends on it. Fake tensors
look like the CPU's here whatever they stand for, so the choice is made by the rules below.

Letters: B batch, N query heads, G key heads, T positions, D width of one head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from megatron_lite.estimate.attention_kernel import EFFICIENT_HEAD_BYTES, WIDEST_FLASH_HEAD
from megatron_lite.estimate.core_attention import FLASH_HEAD_STEP

HALF = (torch.float16, torch.bfloat16)
MASK_STEP = 16  # elements: rows of a mask are padded to it


def cuda_choice(
    q_BNTD, k_BGTD, v_BGTD, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> int:
    """What torch._fused_sdp_choice answers on a GPU since Ampere (sdp_utils.cpp of torch 2.13), as a number of SDPBackend.

    cuDNN is never named: it keeps what flash and the memory-efficient kernel keep. Where torch prefers it, it alone takes
    grouped keys with a mask; here they are then repeated for each head, more than it needs.
    """
    flags, width = torch.backends.cuda, q_BNTD.shape[-1]
    fits = attn_mask is None and q_BNTD.dtype in HALF and width <= WIDEST_FLASH_HEAD
    if fits and (flags.flash_sdp_enabled() or flags.cudnn_sdp_enabled()):
        return int(SDPBackend.FLASH_ATTENTION)
    grouped = q_BNTD.shape[1] != k_BGTD.shape[1]
    if flags.mem_efficient_sdp_enabled() and not grouped and width * q_BNTD.element_size() % EFFICIENT_HEAD_BYTES == 0:
        return int(SDPBackend.EFFICIENT_ATTENTION)
    return _math_or_error(q_BNTD, attn_mask)


def cpu_choice(
    q_BNTD, k_BGTD, v_BGTD, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> int:
    """The same on a CPU, whose flash kernel knows no dropout."""
    if torch.backends.cuda.flash_sdp_enabled() and not dropout_p:
        return int(SDPBackend.FLASH_ATTENTION)
    return _math_or_error(q_BNTD, attn_mask)


def cuda_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Tensor:
    """out_BNTD as scaled_dot_product_attention on a GPU (attention.cpp of torch 2.13)."""
    choice = SDPBackend(cuda_choice(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if choice == SDPBackend.FLASH_ATTENTION:
        width = q.shape[-1]
        q, k, v = (_padded(tensor, FLASH_HEAD_STEP) for tensor in (q, k, v))
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
        return out[..., :width]
    if choice == SDPBackend.EFFICIENT_ATTENTION:
        keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v))
        bias = None if attn_mask is None else _bias(attn_mask, q, k)
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, keep, dropout_p, is_causal, scale=scale
        )[0]
    return _math(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def cpu_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> Tensor:
    """The same on a CPU."""
    choice = SDPBackend(cpu_choice(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa))
    if choice == SDPBackend.FLASH_ATTENTION:
        mask = None if attn_mask is None else _as_numbers(attn_mask, q)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
    return _math(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _math(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> Tensor:
    return torch.ops.aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _math_or_error(q_BNTD: Tensor, attn_mask: Tensor | None) -> int:
    if torch.backends.cuda.math_sdp_enabled():
        return int(SDPBackend.MATH)
    masked = "a mask" if attn_mask is not None else "no mask"
    raise RuntimeError(f"no such kernel for {q_BNTD.dtype}, heads of {q_BNTD.shape[-1]} and {masked}")


def _padded(tensor: Tensor, step: int) -> Tensor:
    missing = -tensor.shape[-1] % step
    return F.pad(tensor, (0, missing)) if missing else tensor


def _as_numbers(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), -torch.inf, dtype=like.dtype))


def _bias(mask_B1TT: Tensor, q_BNTD: Tensor, k_BNTD: Tensor) -> Tensor:
    positions = mask_B1TT.shape[-1]
    rows = _padded(_as_numbers(mask_B1TT, q_BNTD), MASK_STEP)[..., :positions]
    return rows.expand(*q_BNTD.shape[:3], positions)
