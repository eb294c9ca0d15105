"""Arithmetic of the table: medians, spreads, ratios of rounds."""

from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from benchmarks.training.result import Result
from benchmarks.training.work import Work
from megatron_lite.config.flops import step_flops

FAST, SLOW = 10, 90  # percentiles of a step's time
CLOSE_LOSSES = 0.1  # of their mean: contestants start from different weights and read different windows
CLOSE_TIMES = 0.05


@dataclass(frozen=True)
class Line:
    """One contestant over all rounds; None where nothing was measured. Speeds are of all ranks together."""

    name: str
    ranks: int
    tokens_s: float | None = None  # of the median step
    slow_tokens_s: float | None = None  # 90 % of the steps were faster
    fast_tokens_s: float | None = None  # 10 % were
    step_s: float | None = None  # the median step after the warm-up
    first_step_s: float | None = None  # median over rounds
    peak_bytes: float | None = None  # largest
    tflops_full: float | None = None  # TFLOP/s of the whole job; all of the attention matrix counted
    tflops_causal: float | None = None  # the used half
    mfu_full: float | None = None  # of the GPUs' peak in the table
    mfu_causal: float | None = None
    ceiling_full: float | None = None  # share of what the machine's own matrix products reach
    ceiling_causal: float | None = None
    unexplained: float | None = None  # share of the time seen from outside that is in no step


@dataclass(frozen=True)
class Limits:
    """What a rate is compared with, in TFLOP/s; None: unknown."""

    peak: float | None = None  # of one GPU, from the table of hardware
    ceiling: float | None = None  # measured: of one GPU, or of the whole CPU

    def shares(self, tflops: float, ranks: int, device: str) -> tuple[float | None, float | None]:
        """(of the peak, of the ceiling) that a job with `tflops` on all its ranks reaches."""
        processors = ranks if device == "cuda" else 1
        return tuple(None if limit is None else tflops / processors / limit for limit in (self.peak, self.ceiling))


@dataclass(frozen=True)
class Ratio:
    """tokens/s of `ours` over those of `other`, in each round that both have finished."""

    ours: str
    other: str
    rounds: tuple[float, ...]

    @property
    def median(self) -> float | None:
        return median(self.rounds) if self.rounds else None


def line_of(name: str, ranks: int, results: list[Result], work: Work, warm_up: int, limits: Limits = Limits()) -> Line:
    """`results`: of all contestants; those of this one that succeeded count. The first `warm_up` steps do not."""
    good = [result for result in results if result.contestant == name and not result.failure]
    if not good:
        return Line(name, ranks)
    times = [seconds for result in good for seconds in result.step_s[warm_up:]]
    rate = work.tokens_per_step / median(times)
    fast, slow = (work.tokens_per_step / float(np.percentile(times, share)) for share in (FAST, SLOW))
    full, causal = (
        step_flops(work.shape, work.global_batch, causal) / median(times) / 1e12 for causal in (False, True)
    )
    mfu, ceiling = zip(*(limits.shares(tflops, ranks, work.device) for tflops in (full, causal)))
    return Line(
        name,
        ranks,
        rate,
        slow,
        fast,
        median(times),
        first_step_s=_of_known(median, [result.first_step_s for result in good]),
        peak_bytes=_of_known(max, [result.peak_bytes for result in good]),
        tflops_full=full,
        tflops_causal=causal,
        mfu_full=mfu[0],
        mfu_causal=mfu[1],
        ceiling_full=ceiling[0],
        ceiling_causal=ceiling[1],
        unexplained=_of_known(median, map(_unexplained, good)),
    )


def ratio_of(ours: str, others: str | list[str], results: list[Result], warm_up: int) -> Ratio:
    """Of several others the faster one of each round. Rounds in which one of all failed are left out."""
    others = [others] if isinstance(others, str) else others
    median_s = {
        (result.round, result.contestant): median(result.step_s[warm_up:]) for result in results if not result.failure
    }
    rounds = sorted({number for number, _ in median_s})
    complete = [number for number in rounds if {(number, name) for name in (ours, *others)} <= median_s.keys()]
    fastest_s = {number: min(median_s[number, other] for other in others) for number in complete}
    name = others[0] if len(others) == 1 else f"the faster of {' and '.join(others)}"
    return Ratio(ours, name, tuple(fastest_s[number] / median_s[number, ours] for number in complete))


def loss_table(results: list[Result]) -> dict[str, list[float | None]]:
    """{contestant: loss of each step, the mean over rounds}."""
    good = {}
    for result in results:
        if not result.failure:
            good.setdefault(result.contestant, []).append(result.losses)
    return {name: [_of_known(mean, step) for step in zip(*runs)] for name, runs in good.items()}


def loss_distance(losses: dict[str, list[float | None]]) -> float | None:
    """How far the contestants' losses are apart over the last half of the steps, as a share of their mean."""
    halves = [[loss for loss in column[len(column) // 2 :] if loss is not None] for column in losses.values()]
    means = [mean(half) for half in halves if half]
    return (max(means) - min(means)) / mean(means) if len(means) > 1 else None


def _unexplained(result: Result) -> float | None:
    return 1 - mean(result.step_s[1:]) / result.outside_s if result.outside_s else None


def _of_known(function, values) -> float | None:
    known = [value for value in values if value is not None]
    return function(known) if known else None
