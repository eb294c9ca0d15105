"""Learning rate and weight decay as functions of consumed samples, vectorised.

Source of the formulas: the schedule of Megatron-LM 0.16, whose unit is samples of successful steps.
"""

import numpy as np

from megatron_lite.config.plan import LearningRatePlan


def learning_rates(plan: LearningRatePlan, samples: np.ndarray) -> np.ndarray:
    """Learning rate of the step that starts after `samples` successfully consumed samples; float64, same shape."""
    samples = np.asarray(samples, dtype=np.float64)
    warming = (samples <= plan.warmup_samples) & (plan.warmup_samples > 0)
    warm = plan.init + (plan.peak - plan.init) * samples / (plan.warmup_samples or 1)
    return np.where(warming, warm, _decayed(plan, samples))


def weight_decays(plan: LearningRatePlan, samples: np.ndarray) -> np.ndarray:
    """Weight decay likewise: constant, or growing from start to end over the whole training."""
    share = np.minimum(np.asarray(samples, dtype=np.float64) / max(plan.weight_decay_samples, 1), 1.0)
    shape = {"constant": 1.0, "linear": share, "cosine": 0.5 * (np.cos(np.pi * (1 - share)) + 1)}
    span = plan.end_weight_decay - plan.start_weight_decay
    return plan.start_weight_decay + span * shape[plan.weight_decay_style] + 0 * share


def _decayed(plan: LearningRatePlan, samples: np.ndarray) -> np.ndarray:
    if plan.style == "constant":
        return np.full_like(samples, plan.peak)
    if plan.style == "inverse-square-root":
        warmup = max(plan.warmup_samples, 1)
        rate = np.maximum(plan.floor, plan.peak * np.sqrt(warmup) / np.sqrt(np.maximum(samples, 1)))
    else:
        rate = plan.floor + (plan.peak - plan.floor) * _remaining(plan, samples)
    return np.where(samples > plan.decay_samples, plan.floor, rate)


def _remaining(plan: LearningRatePlan, samples: np.ndarray) -> np.ndarray:
    """Share of (peak - floor) that is left: 1 after the warm-up, 0 at the end of the decay."""
    if plan.style == "WSD":
        return _wsd_remaining(plan, samples)
    span = (plan.decay_samples - plan.warmup_samples) or 1
    done = np.clip((samples - plan.warmup_samples) / span, 0, 1)
    return 1 - done if plan.style == "linear" else 0.5 * (np.cos(np.pi * done) + 1)


def _wsd_remaining(plan: LearningRatePlan, samples: np.ndarray) -> np.ndarray:
    """Warm-up, stable, decay: everything stays until the last wsd_samples."""
    start = plan.decay_samples - plan.wsd_samples
    done = np.clip((samples - start) / max(plan.wsd_samples, 1), 0, 1)
    shape = {
        "linear": lambda: 1 - done,
        "cosine": lambda: 0.5 * (np.cos(np.pi * done) + 1),
        "exponential": lambda: 2 * 0.5**done - 1,
        "minus_sqrt": lambda: 1 - np.sqrt(done),
    }
    return np.where(samples <= start, 1.0, shape[plan.wsd_style]())
