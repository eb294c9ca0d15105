"""Kernels of two runs, matched by what they are for: names change with the precision, shapes and libraries."""

from statistics import fmean

from megatron_lite.analysis.compare.figures import KernelPair
from megatron_lite.analysis.compare.noise import paired, paired_samples
from megatron_lite.analysis.compare.work import Work

Purposes = dict[tuple[str, str], Work]  # by operator and phase


def kernels_of(a: Purposes, b: Purposes) -> tuple[KernelPair, ...]:
    """Largest difference first. On CPUs operators take the place of kernels."""
    found = [_pair(key, a.get(key), b.get(key)) for key in {**a, **b}]
    return tuple(sorted(found, key=lambda pair: -abs((pair.ms.b or 0.0) - (pair.ms.a or 0.0))))


def _pair(key: tuple[str, str], one: Work | None, other: Work | None) -> KernelPair:
    samples = [work.ms.tolist() if work else [] for work in (one, other)]
    return KernelPair(
        (one or other).role,
        *key,
        one.names if one else (),
        other.names if other else (),
        paired(one and one.per_step, other and other.per_step, 0.0),
        paired_samples(*samples, centre=fmean),
    )
