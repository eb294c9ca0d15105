"""Does memory grow over a run? Steadily or not at all: warming up and a single jump are no growth."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from megatron_lite.analysis.run.figures import Growth, RankMedians
from megatron_lite.notable import has_grown

PARTS = 4  # of the run, each of which must hold more than the one before
FEWEST_STEPS = 3 * PARTS
LEAST_SHARE = 0.1  # of the growth from one part to the next; a leak has a third in each, a jump all in one


def growths_of_writer(iterations: Sequence[int], num_bytes: Sequence[float], ordinary: Sequence[bool]) -> tuple[Growth, ...]:
    """Of the rank that writes, from a value per step."""
    rows = [(at, value) for at, value, plain in zip(iterations, num_bytes, ordinary) if plain and value > 0]
    growth = _growth(None, rows) if len(rows) >= FEWEST_STEPS else None
    return (growth,) if growth else ()


def growths_of_ranks(ranks: RankMedians | None, what: str) -> tuple[Growth, ...]:
    """Of every rank, from a value per console line. `what`: host_memory_bytes or peak_memory_bytes."""
    found = []
    for rank in range(len(ranks.step_ms) if ranks else 0):
        values = [(interval.last, getattr(interval, what)[rank]) for interval in ranks.intervals]
        rows = [(at, value) for at, value in values if value > 0]  # NaN is not
        found.append(_growth(rank, rows[1:]) if len(rows) > PARTS else None)  # the first line's steps fill caches
    return tuple(growth for growth in found if growth)


def _growth(rank: int | None, rows: list[tuple[int, float]]) -> Growth | None:
    """`rows`: (iteration, bytes), at least PARTS of them."""
    bounds = [len(rows) * part // PARTS for part in range(PARTS + 1)]
    parts = [rows[first:last] for first, last in pairwise(bounds)]
    levels = [median(value for _, value in part) for part in parts]
    centres = [median(at for at, _ in part) for part in parts]
    by, steps = levels[-1] - levels[0], centres[-1] - centres[0]
    steadily = all(later - earlier >= LEAST_SHARE * by for earlier, later in pairwise(levels))
    if not has_grown(by, levels[0]) or not steadily or steps <= 0:
        return None
    return Growth(rank, round(by), by / steps, round(rows[-1][1]))
