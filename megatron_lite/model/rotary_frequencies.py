"""How fast each pair of channels rotates with the position: plain, or changed for sequences longer than pretraining's.

Both changes leave pairs that turn often within the original length as they are, slow down those that turn less than
once, and blend in between. Letters: R channels that rotate, P pairs of them (R/2).
"""

import math

import torch
from torch import Tensor

from megatron_lite.config.shape import LatentShape, ModelShape

# Llama 3.1's own numbers, which Megatron-LM gives no flags for. Source: RotaryEmbedding._apply_scaling of megatron-core
LLAMA_LENGTH = 8192  # positions of its pretraining
LLAMA_SLOW_TURNS = 1.0  # within that length: pairs that turn less are slowed down by the whole factor
LLAMA_FAST_TURNS = 4.0  # pairs that turn more stay as they are


def compute_rotary_frequencies(shape: ModelShape, device: torch.device) -> Tensor:
    """Radians per position of each pair of channels, fp32 [P]."""
    width = int(shape.rotary_width * shape.rotary_percent)
    channels_P = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    exponents_P = channels_P / width
    frequencies_P = 1.0 / shape.rotary_base**exponents_P
    if shape.rope_scaling_factor is not None:
        return _scale_as_llama(frequencies_P, shape.rope_scaling_factor)
    if shape.yarn_scaling_factor is not None:
        return _scale_as_yarn(frequencies_P, shape, shape.yarn_scaling_factor)
    return frequencies_P


def compute_rotary_scale(shape: ModelShape) -> float:
    """The factor of cosines and sines, with which YaRN sharpens attention (section 3.4 of its paper); else 1."""
    if shape.yarn_scaling_factor is None:
        return 1.0
    factor = shape.yarn_scaling_factor
    whole = _sharpen(factor, shape.yarn_mscale)
    return whole / _sharpen(factor, shape.yarn_mscale_all_dim)


def compute_score_factor(latent: LatentShape) -> float:
    """The factor of latent attention's scores, beside 1 / sqrt(width of a query)."""
    return _sharpen(latent.scaling_factor, latent.mscale_all_dim) ** 2


def _sharpen(factor: float, strength: float) -> float:
    """YaRN's temperature for sequences that are `factor` times as long."""
    if factor <= 1:
        return 1.0
    return 0.1 * strength * math.log(factor) + 1.0


def _scale_as_llama(frequencies_P: Tensor, factor: float) -> Tensor:
    """Llama 3.1's scaling, in Megatron-Core's order of operations."""
    lengths_P = 2 * math.pi / frequencies_P  # positions of one turn
    is_fast_P = lengths_P < LLAMA_LENGTH / LLAMA_FAST_TURNS
    is_slow_P = lengths_P > LLAMA_LENGTH / LLAMA_SLOW_TURNS
    slowed_P = torch.where(is_slow_P, frequencies_P / factor, frequencies_P)
    turns_P = LLAMA_LENGTH / lengths_P
    share_P = (turns_P - LLAMA_SLOW_TURNS) / (LLAMA_FAST_TURNS - LLAMA_SLOW_TURNS)
    blended_P = (1 - share_P) * slowed_P / factor + share_P * slowed_P
    return torch.where(is_fast_P | is_slow_P, slowed_P, blended_P)


def _scale_as_yarn(frequencies_P: Tensor, shape: ModelShape, factor: float) -> Tensor:
    """YaRN's "NTK by parts" (Peng et al. 2023, arXiv 2309.00071, section 3.2)."""
    pairs = len(frequencies_P)
    first = _find_channel(shape.yarn_beta_fast, shape)
    last = _find_channel(shape.yarn_beta_slow, shape)
    if shape.yarn_round_to_int:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001  # as in Megatron-Core: no division by zero
    numbers_P = torch.arange(pairs, dtype=torch.float32, device=frequencies_P.device)
    slowed_P = (numbers_P - first) / (last - first)
    kept_P = 1 - slowed_P.clamp(0, 1)
    return frequencies_P / factor * (1 - kept_P) + frequencies_P * kept_P


def _find_channel(turns: float, shape: ModelShape) -> float:
    """The pair of channels, as a fraction, that turns so often within the original length."""
    length = shape.yarn_original_max_position_embeddings
    ratio = length / (turns * 2 * math.pi)
    return shape.rotary_width * math.log(ratio) / (2 * math.log(shape.rotary_base))
