"""Does memory grow over a run? Steadily or not at all: warming up and a single jump are no growth."""

from collections.abc import Sequence

from megatron_lite.analysis.run.figures import Growth, RankMedians
from megatron_lite.notable import GROWTH_PARTS, steady_growth

FEWEST_STEPS = 3 * GROWTH_PARTS


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
        found.append(_growth(rank, rows[1:]) if len(rows) > GROWTH_PARTS else None)  # the first line's steps fill caches
    return tuple(growth for growth in found if growth)


def _growth(rank: int | None, rows: list[tuple[int, float]]) -> Growth | None:
    """`rows`: (iteration, bytes), at least GROWTH_PARTS of them."""
    found = steady_growth(rows)
    return Growth(rank, round(found[0]), found[1], round(rows[-1][1])) if found else None
