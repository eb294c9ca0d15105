"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

Letters: B batch, T positions, N heads, D width of one head, R rotated part of D.
"""

import torch
from torch import Tensor

from megatron_lite.config.shape import ModelShape
from megatron_lite.model.rotary_frequencies import compute_rotary_frequencies, compute_rotary_scale


def make_rotary_tables(positions_BT: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """cos_B1TR, sin_B1TR in fp32: angle = position / factor * base^(-2i/R) for the i-th pair of channels, or a scaled
    frequency in place of that power.

    Calculated anew in each forward pass, because a table kept as a buffer would not survive meta-device construction.
    """
    frequencies = compute_rotary_frequencies(shape, positions_BT.device)
    positions = positions_BT.float()
    if shape.rotary_seq_len_interpolation_factor is not None:
        positions = positions * (1 / shape.rotary_seq_len_interpolation_factor)
    angles = positions[:, None, :, None] * frequencies
    if shape.rotary_interleaved:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat((angles, angles), dim=-1)
    scale = compute_rotary_scale(shape)
    if scale == 1:
        return angles.cos(), angles.sin()
    return angles.cos() * scale, angles.sin() * scale


def rotate(x_BNTD: Tensor, cos_B1TR: Tensor, sin_B1TR: Tensor, interleaved: bool) -> Tensor:
    """Turns the first R channels of each head; the rest passes unchanged.

    A pair is (i, i + R/2), or (2i, 2i + 1) when interleaved.
    """
    width = cos_B1TR.shape[-1]
    cos, sin = cos_B1TR.to(x_BNTD.dtype), sin_B1TR.to(x_BNTD.dtype)
    turned, rest = x_BNTD[..., :width], x_BNTD[..., width:]
    # a quarter turn: (a, b) -> (-b, a) for each pair
    if interleaved:
        quarter = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        quarter = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos + quarter * sin, rest), dim=-1)
