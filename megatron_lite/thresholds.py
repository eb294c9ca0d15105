"""From where on a slower rank or growing memory is worth a word,
on the console while a run goes on as in its report."""

from collections.abc import Sequence
from itertools import pairwise
from math import isnan
from statistics import median_low

import numpy as np

MIN_STEPS = 3  # ordinary ones of every rank; a median of fewer says little
MIN_BEFORE = 3  # steps before a profiled window, the run's first left out, to say what the profiler costs
SLOWER = 0.10  # than the median rank, in one phase
SHARE_OF_STEP = 0.02  # that a rank's delay must be, or it does not matter
MOSTLY = 0.75  # of the console lines in which the same rank must be that slow; a machine's noise changes sides
# allocators take and give back less by themselves
GROWN_SHARE = 0.02
GROWN_BYTES = 16 * 2**20
GROWTH_PARTS = 4  # of the time seen, each of which must hold more than the one before: warming up is no growth
MIN_GROWTH_STEPS = 3 * GROWTH_PARTS  # of a run, from which its memory can be said to grow or not
MIN_PART = 0.1  # of the growth from one part to the next; a leak has a third in each, a jump all in one
WITHOUT_CORE = 0.10  # of a step, in which a rank that is ready has no core: figures of time then tell of the machine
SWITCHES_PER_CPU_SECOND = 100.0  # involuntary ones; a scheduler that shares a core switches every 3 to 6 ms


def slowest_rank(
    times_ms: Sequence[float], step_ms: Sequence[float], stages: Sequence[int] = ()
) -> tuple[float, int] | None:
    """(lag behind the median rank in ms, rank), if one rank is notably slower. Both by rank; None if one has NaN.

    stages: by rank, of a pipeline; a rank is compared with others of its stage, which have the same work.
    """
    if len(times_ms) < 2:  # () of a phase that no rank has
        return None
    if len(set(stages)) > 1:
        found = []
        for stage in set(stages):
            ranks = [rank for rank, own in enumerate(stages) if own == stage]
            slow = slowest_rank([times_ms[rank] for rank in ranks], [step_ms[rank] for rank in ranks])
            found += [(slow[0], ranks[slow[1]])] if slow else []
        return max(found, default=None)
    if len(times_ms) < 2 or any(map(isnan, (*times_ms, *step_ms))):
        return None
    usual = median_low(times_ms)
    slowest = max(times_ms)
    least = max(SLOWER * usual, SHARE_OF_STEP * median_low(step_ms))
    return (slowest - usual, times_ms.index(slowest)) if slowest - usual > least else None


def rank_without_core(
    wait_ms: Sequence[float], switches: Sequence[float], cpu_ms: Sequence[float], step_ms: Sequence[float]
) -> tuple[int, float | None] | None:
    """(rank, ms per step) of the rank that waits longest for a core, if it waits notably; None for ms where the system
    counts involuntary switches only. All are by rank, NaN for unknown; None where every rank has its cores."""
    waits = [
        (wait / step, rank) for rank, (wait, step) in enumerate(zip(wait_ms, step_ms)) if wait / step >= WITHOUT_CORE
    ]
    if waits:
        rank = max(waits)[1]
        return rank, wait_ms[rank]
    if any(wait >= 0 for wait in wait_ms):  # never with NaN
        return None
    rates = [(1000 * number / cpu, rank) for rank, (number, cpu) in enumerate(zip(switches, cpu_ms)) if cpu > 0]
    often = [pair for pair in rates if pair[0] >= SWITCHES_PER_CPU_SECOND]
    return (max(often)[1], None) if often else None


def is_by_chance(lag_ms: float, without_core: tuple[int, float | None] | None) -> bool:
    """May waiting for a core explain this lag? `without_core`: of rank_without_core."""
    return without_core is not None and (without_core[1] is None or lag_ms <= without_core[1])


def is_mostly(rank: int, slowest: Sequence[int | None]) -> bool:
    """Is it the same rank nearly always? `slowest`: the notably slower rank of each console line."""
    return slowest.count(rank) >= MOSTLY * len(slowest)


def steady_growth(iterations: Sequence[float], values: Sequence[float]) -> tuple[float, float] | None:
    """(bytes, bytes per step) by which memory has grown over all of it; None where it has not.

    Args:
        iterations, values: in order, at least GROWTH_PARTS of both; values in bytes.
    """
    inner = [len(values) * part // GROWTH_PARTS for part in range(1, GROWTH_PARTS)]
    levels, centers = ([float(np.median(part)) for part in np.split(of, inner)] for of in (values, iterations))
    by = levels[-1] - levels[0]
    steps = centers[-1] - centers[0]
    grown = by > max(GROWN_SHARE * levels[0], GROWN_BYTES)
    steadily = all(later - earlier >= MIN_PART * by for earlier, later in pairwise(levels))
    return (by, by / steps) if grown and steadily and steps > 0 else None
