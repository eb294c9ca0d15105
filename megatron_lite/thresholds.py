"""Limits from which a slower rank or growing memory is worth a word, on the console as in a report."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isnan
from statistics import median_low

import numpy as np

MIN_RANK_STEPS = 3  # ordinary ones of every rank; a median of fewer says little
MAX_BEFORE = 50  # the last ones of them that are compared with profiled steps
MIN_BEFORE = 3  # steps before a profiled window, the run's first left out, to say what the profiler costs
SLOWER = 0.10  # than the median rank, in one phase
SHARE_OF_STEP = 0.02  # that a rank's delay must be, or it does not matter
MIN_SLOWEST_SHARE = (
    0.75  # of the console lines in which the same rank must be that slow; a machine's noise changes sides
)
# allocators take and give back less by themselves
GROWN_SHARE = 0.02
GROWN_BYTES = 16 * 2**20
GROWTH_PARTS = 4  # of the time seen, each of which must hold more than the one before: warming up is no growth
MIN_GROWTH_STEPS = 3 * GROWTH_PARTS  # of a run, from which its memory can be said to grow or not
MIN_PART = 0.1  # of the growth from one part to the next; a leak has a third in each, a jump all in one
MIN_SLOWED_SHARE = 0.10  # of the samples in which a GPU works, from which on its board or driver slows it down
# of the highest clock, or of the other ranks': boards reach more where nothing holds them
LOW_CLOCK = 0.95
MIN_QUOTA_SHARE = 0.10  # of the periods of a CPU quota, in which it is used up
MIN_STOLEN = 0.05  # of the machine's CPU time, that other virtual machines take
WITHOUT_CORE = 0.10  # of a step, in which a rank that is ready has no core: figures of time then tell of the machine
SWITCHES_PER_CPU_SECOND = 100.0  # involuntary ones; a scheduler that shares a core switches every 3 to 6 ms


def slowest_rank(
    times_ms: Sequence[float], step_ms: Sequence[float], stages: Sequence[int] = ()
) -> tuple[float, int] | None:
    """Find the one rank that is notably slower than the others.

    Args:
        times_ms: Milliseconds of a phase, by rank.
        step_ms: Milliseconds of the step, by rank.
        stages: Stage of each rank of a pipeline. A rank is compared with others of its stage, which have the same work.

    Returns:
        Its lag behind the median rank, in milliseconds, and its number; None if there is none, or a time is NaN.
    """
    if len(times_ms) < 2:  # () of a phase that no rank has
        return None
    if len(set(stages)) > 1:
        found = []
        for stage in set(stages):
            ranks = [rank for rank, own in enumerate(stages) if own == stage]
            slow = slowest_rank([times_ms[rank] for rank in ranks], [step_ms[rank] for rank in ranks])
            if slow is not None:
                lag_ms, place = slow
                found.append((lag_ms, ranks[place]))
        return max(found, default=None)
    if any(map(isnan, (*times_ms, *step_ms))):
        return None
    usual_ms = median_low(times_ms)
    slowest_ms = max(times_ms)
    lag_ms = slowest_ms - usual_ms
    least_ms = max(SLOWER * usual_ms, SHARE_OF_STEP * median_low(step_ms))
    if lag_ms <= least_ms:
        return None
    return lag_ms, times_ms.index(slowest_ms)


def rank_without_core(
    wait_ms: Sequence[float], switches: Sequence[float], cpu_ms: Sequence[float], step_ms: Sequence[float]
) -> tuple[int, float | None] | None:
    """Find the rank that waits longest for a core, if it waits notably.

    Args:
        wait_ms: Waits for a core, by rank; NaN for unknown, as in all of these.
        switches: Involuntary switches.
        cpu_ms: CPU time.
        step_ms: Times of a step.

    Returns:
        (rank, ms per step), the latter None where the system counts involuntary switches only. None where every rank
        has its cores.
    """
    waits = {rank: wait / step for rank, (wait, step) in enumerate(zip(wait_ms, step_ms))}
    rank = _find_highest(waits, WITHOUT_CORE)
    if rank is not None:
        return rank, wait_ms[rank]
    if any(wait >= 0 for wait in wait_ms):  # never with NaN
        return None
    rates = {}
    for rank, (number, cpu) in enumerate(zip(switches, cpu_ms)):
        if cpu > 0:
            rates[rank] = 1000 * number / cpu
    rank = _find_highest(rates, SWITCHES_PER_CPU_SECOND)
    return None if rank is None else (rank, None)


def _find_highest(of_ranks: Mapping[int, float], least: float) -> int | None:
    """The last of the ranks with the highest number, if that is at least `least`; None without one. NaN never is."""
    high = [(number, rank) for rank, number in of_ranks.items() if number >= least]
    return max(high)[1] if high else None


def is_by_chance(lag_ms: float, without_core: tuple[int, float | None] | None) -> bool:
    """May waiting for a core explain this lag? `without_core`: of rank_without_core."""
    return without_core is not None and (without_core[1] is None or lag_ms <= without_core[1])


def is_mostly(rank: int, slowest: Sequence[int | None]) -> bool:
    """Whether a rank is the slowest one nearly always.

    Args:
        rank: The rank.
        slowest: The notably slower rank of each console line.
    """
    return slowest.count(rank) >= MIN_SLOWEST_SHARE * len(slowest)


def steady_growth(iterations: Sequence[float], values: Sequence[float]) -> tuple[float, float] | None:
    """Measure memory that grows steadily.

    Args:
        iterations: Iterations, in order, at least GROWTH_PARTS.
        values: Bytes at each of them.

    Returns:
        Bytes, and bytes per step, by which it has grown over all of it; None where it has not.
    """
    inner = [len(values) * part // GROWTH_PARTS for part in range(1, GROWTH_PARTS)]
    levels = [float(np.median(part)) for part in np.split(values, inner)]
    centers = [float(np.median(part)) for part in np.split(iterations, inner)]
    growth = levels[-1] - levels[0]
    steps = centers[-1] - centers[0]
    grows = growth > max(GROWN_SHARE * levels[0], GROWN_BYTES)
    grows_steadily = all(later - earlier >= MIN_PART * growth for earlier, later in pairwise(levels))
    if not grows or not grows_steadily or steps <= 0:
        return None
    return growth, growth / steps
