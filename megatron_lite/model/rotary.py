"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

Letters: B batch, T positions, N heads, D width of one head, R rotated part of D, P pairs of channels (R/2).
"""

import torch
from torch import Tensor

from megatron_lite.config.shape import ModelShape
from megatron_lite.model.rotary_frequencies import compute_rotary_frequencies, compute_rotary_scale


def make_rotary_tables(positions_BT: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines by which channels rotate.

    The i-th pair of channels turns by position / factor * base^(-2i/R), or by a scaled frequency in place of the power.
    Tables are computed anew in each forward pass: a buffer would not survive construction on the meta device.

    Args:
        positions_BT: int64, the position of each token.
        shape: The model's shape.

    Returns:
        cos_B1TR and sin_B1TR, fp32.
    """
    frequencies_P = compute_rotary_frequencies(shape, positions_BT.device)
    positions_BT = positions_BT.float()
    if shape.rotary_seq_len_interpolation_factor is not None:
        positions_BT = positions_BT * (1 / shape.rotary_seq_len_interpolation_factor)
    angles_B1TP = positions_BT[:, None, :, None] * frequencies_P
    if shape.rotary_interleaved:
        angles_B1TR = angles_B1TP.repeat_interleave(2, dim=-1)
    else:
        angles_B1TR = torch.cat((angles_B1TP, angles_B1TP), dim=-1)
    cos_B1TR = angles_B1TR.cos()
    sin_B1TR = angles_B1TR.sin()
    scale = compute_rotary_scale(shape)
    if scale != 1:
        cos_B1TR = cos_B1TR * scale
        sin_B1TR = sin_B1TR * scale
    return cos_B1TR, sin_B1TR


def rotate(
    x_BNTD: Tensor,
    cos_B1TR: Tensor,
    sin_B1TR: Tensor,
    interleaved: bool,
) -> Tensor:
    """Rotate the first R channels of each head; the rest passes unchanged.

    Args:
        x_BNTD: Queries or keys.
        cos_B1TR: Cosines by make_rotary_tables, fp32. They are rounded to the precision of x.
        sin_B1TR: Sines likewise.
        interleaved: Whether channels 2i and 2i + 1 are a pair; else i and i + R/2 are.

    Returns:
        A tensor like x_BNTD.
    """
    width = cos_B1TR.shape[-1]
    cos_B1TR = cos_B1TR.to(x_BNTD.dtype)
    sin_B1TR = sin_B1TR.to(x_BNTD.dtype)
    turned_BNTR = x_BNTD[..., :width]
    rest = x_BNTD[..., width:]
    # a quarter turn: (a, b) -> (-b, a) for each pair
    if interleaved:
        even = turned_BNTR[..., 0::2]
        odd = turned_BNTR[..., 1::2]
        quarter_BNTR = torch.stack((-odd, even), dim=-1).flatten(-2)
    else:
        first, second = turned_BNTR.chunk(2, dim=-1)
        quarter_BNTR = torch.cat((-second, first), dim=-1)
    rotated_BNTR = turned_BNTR * cos_B1TR + quarter_BNTR * sin_B1TR
    return torch.cat((rotated_BNTR, rest), dim=-1)
