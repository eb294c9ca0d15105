"""Computes learning rate and weight decay from the number of consumed samples, on the device where that is.

Source of the formulas: the schedule of Megatron-LM 0.16, whose unit is samples of successful steps.
"""

import math

import torch
from torch import Tensor

from megatron_lite.config.plan import LearningRatePlan


def compute_learning_rates(plan: LearningRatePlan, samples: Tensor) -> Tensor:
    """Learning rate of the step that starts after `samples` successfully consumed samples; float64, same shape."""
    samples = torch.as_tensor(samples, dtype=torch.float64)
    warming = (samples <= plan.warmup_samples) & (plan.warmup_samples > 0)
    warm = plan.init + (plan.peak - plan.init) * samples / (plan.warmup_samples or 1)
    if plan.style == "constant":
        return torch.where(warming, warm, plan.peak)
    if plan.style == "inverse-square-root":
        warmup = max(plan.warmup_samples, 1)
        rate = (plan.peak * math.sqrt(warmup) / samples.clamp(min=1).sqrt()).clamp(min=plan.floor)
    else:
        rate = plan.floor + (plan.peak - plan.floor) * _compute_remaining(plan, samples)
    return torch.where(warming, warm, torch.where(samples > plan.decay_samples, plan.floor, rate))


def _compute_remaining(plan: LearningRatePlan, samples: Tensor) -> Tensor:
    """Share of (peak - floor) that is left: 1 after the warm-up, 0 at the end of the decay."""
    if plan.style != "WSD":
        span = (plan.decay_samples - plan.warmup_samples) or 1
        done = ((samples - plan.warmup_samples) / span).clamp(0, 1)
        return 1 - done if plan.style == "linear" else _cosine(done)
    # warm-up, stable, decay: everything stays until the last wsd_samples
    start = plan.decay_samples - plan.wsd_samples
    done = ((samples - start) / max(plan.wsd_samples, 1)).clamp(0, 1)
    shape = {
        "linear": lambda: 1 - done,
        "cosine": lambda: _cosine(done),
        "exponential": lambda: 2 * 0.5**done - 1,
        "minus_sqrt": lambda: 1 - done.sqrt(),
    }
    return torch.where(samples <= start, 1.0, shape[plan.wsd_style]())


def compute_weight_decays(plan: LearningRatePlan, samples: Tensor) -> Tensor:
    """Weight decay of the step that starts after `samples` samples: constant, or growing over the whole training; float64."""
    samples = torch.as_tensor(samples, dtype=torch.float64)
    if plan.weight_decay_style == "constant":
        return torch.full_like(samples, plan.end_weight_decay)
    share = (samples / max(plan.weight_decay_samples, 1)).clamp(max=1)
    grown = share if plan.weight_decay_style == "linear" else _cosine(1 - share)
    return plan.start_weight_decay + (plan.end_weight_decay - plan.start_weight_decay) * grown


def _cosine(done: Tensor) -> Tensor:
    """Half a cosine wave, from 1 to 0 while `done` goes from 0 to 1."""
    return 0.5 * (torch.cos(math.pi * done) + 1)
