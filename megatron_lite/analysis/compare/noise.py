"""Is a difference between two runs more than their steps differ anyway?"""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, median, variance

from megatron_lite.analysis.compare.compare_results import Change, Pair

BLOCKS = 5  # of consecutive steps: their medians also show a drift, which single steps' spread hides
MIN_STEPS = 3
FLOOR = 0.01  # of the larger number: two starts of one command differ by that much, which no single run shows
TOO_NOISY = 0.2  # a band wider than this cannot say "not changed"
# Student's t, two-sided 99%, 1 to 8 degrees of freedom: a comparison has dozens of numbers, of which 95% would call two wrongly
T_99 = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36)


def paired(a: float | None, b: float | None, band: float | None) -> Pair:
    """Two numbers and the noise of their difference."""
    return Pair(a, b, band, _change(a, b, band))


def paired_samples(a: Sequence[float], b: Sequence[float], centre=median) -> Pair:
    """The centres of two runs' steps (fewer than MIN_STEPS of either: no band)."""
    return paired(centre(a) if a else None, centre(b) if b else None, band_of(a, b))


def band_of(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Half the 99% confidence interval of B - A, from medians of blocks of steps; None for too few steps."""
    if min(len(a), len(b)) < MIN_STEPS:
        return None
    blocks_a, blocks_b = _block_medians(a), _block_medians(b)
    error = sqrt(variance(blocks_a) / len(blocks_a) + variance(blocks_b) / len(blocks_b))
    freedom = min(len(blocks_a) + len(blocks_b) - 2, len(T_99))
    return max(T_99[freedom - 1] * error, FLOOR * max(fmean(blocks_a), fmean(blocks_b)))


def exact(a: float | None, b: float | None) -> Pair:
    """Numbers that do not vary from step to step, such as bytes at a peak: changed by FLOOR of the larger or more."""
    return Pair(a, b, 0.0, _change(a, b, FLOOR * max(a or 0.0, b or 0.0)))


def _block_medians(values: Sequence[float]) -> list[float]:
    blocks = min(BLOCKS, len(values))
    bounds = [len(values) * at // blocks for at in range(blocks + 1)]
    return [median(values[first:last]) for first, last in pairwise(bounds)]


def _change(a: float | None, b: float | None, band: float | None) -> Change:
    if a is None or b is None:
        return Change.UNCLEAR if a is b else Change.ONLY_B if a is None else Change.ONLY_A
    if band is None:
        return Change.UNCLEAR
    if abs(b - a) > band:
        return Change.MORE if b > a else Change.LESS
    return Change.UNCLEAR if band > TOO_NOISY * max(abs(a), abs(b)) else Change.SAME
