"""Does memory grow over a run? Steadily or not at all: warming up and a single jump are no growth.

A profile in the middle takes memory that what grows fills afterwards, unseen: then the longest stretch without one decides.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby

from megatron_lite.analysis.run.run_results import Growth, RankMedians
from megatron_lite.thresholds import GROWTH_PARTS, steady_growth

MIN_STEPS = 3 * GROWTH_PARTS


def growths_of_writer(
    iterations: Sequence[int], num_bytes: Sequence[float], ordinary: Sequence[bool], profiled: Sequence[int]
) -> tuple[Growth, ...]:
    """Of the rank that writes, from a value per step. `profiled`: iterations, rising."""
    rows = [(at, value) for at, value, plain in zip(iterations, num_bytes, ordinary) if plain and value > 0]
    growth = _growth(None, rows, profiled, MIN_STEPS)
    return (growth,) if growth else ()


def growths_of_ranks(ranks: RankMedians | None, what: str, profiled: Sequence[int]) -> tuple[Growth, ...]:
    """Of every rank, from a value per console line. `what`: host_memory_bytes or peak_memory_bytes."""
    found = []
    for rank in range(len(ranks.step_ms) if ranks else 0):
        values = [(interval.last, getattr(interval, what)[rank]) for interval in ranks.intervals]
        rows = [(at, value) for at, value in values if value > 0]  # NaN is not
        found.append(_growth(rank, rows[1:], profiled, GROWTH_PARTS))  # the first line's steps fill caches
    return tuple(growth for growth in found if growth)


def _growth(rank: int | None, rows: list[tuple[int, float]], profiled: Sequence[int], fewest: int) -> Growth | None:
    """`rows`: (iteration, bytes); `fewest`: of them, at least GROWTH_PARTS."""
    stretches = [list(stretch) for _, stretch in groupby(rows, lambda row: bisect_left(profiled, row[0]))]
    for part in (rows, max(stretches, key=len, default=[])):
        found = steady_growth(part) if len(part) >= fewest else None
        if found:
            return Growth(rank, round(found[0]), found[1], round(part[-1][1]))
    return None
