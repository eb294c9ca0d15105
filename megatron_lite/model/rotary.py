"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

Letters: B batch, N heads, T positions, D width of one head, R rotated part of D.
"""

import torch
from torch import Tensor

from megatron_lite.config.shape import ModelShape


def rotary_width(shape: ModelShape) -> int:
    """R: how many leading channels of each head are rotated."""
    return int(shape.kv_channels * shape.rotary_percent)


def rotary_tables(positions_BT: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """cos_B1TR, sin_B1TR in fp32: angle = position / factor * base^(-2i/R) for the i-th pair of channels.

    Calculated anew in each forward pass, because a table kept as a buffer would not survive meta-device construction.
    """
    width = rotary_width(shape)
    channels = torch.arange(0, width, 2, dtype=torch.float32, device=positions_BT.device)
    frequencies = 1.0 / shape.rotary_base ** (channels / width)
    positions = positions_BT.float()
    if shape.rotary_seq_len_interpolation_factor is not None:
        positions = positions * (1 / shape.rotary_seq_len_interpolation_factor)
    angles = positions[:, None, :, None] * frequencies
    if shape.rotary_interleaved:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x_BNTD: Tensor, cos_B1TR: Tensor, sin_B1TR: Tensor, interleaved: bool) -> Tensor:
    """Turns the first R channels of each head; the rest passes unchanged.

    A pair is (i, i + R/2), or (2i, 2i + 1) when interleaved.
    """
    width = cos_B1TR.shape[-1]
    cos, sin = cos_B1TR.to(x_BNTD.dtype), sin_B1TR.to(x_BNTD.dtype)
    turned, rest = x_BNTD[..., :width], x_BNTD[..., width:]
    turned = turned * cos + _quarter_turn(turned, interleaved) * sin
    return torch.cat((turned, rest), dim=-1)


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """(a, b) -> (-b, a) for each pair."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
