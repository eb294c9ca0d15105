"""Ranks in lists and in words."""

from collections.abc import Iterable, Sequence
from typing import Protocol

MAX_RANKS_LISTED = 8
UNNAMED = "a rank that the log does not name"


class _OfRank(Protocol):
    """A record that may name its rank."""

    @property
    def rank(self) -> int | None: ...


def list_ranks(records: Iterable[_OfRank]) -> tuple[int, ...]:
    """List the ranks that records name, ascending, each once."""
    named = {record.rank for record in records}
    return tuple(sorted(rank for rank in named if rank is not None))


def find_earliest(times: Iterable[float | None]) -> float | None:
    """Find the first of the times that are known; None where none is."""
    return min((time for time in times if time is not None), default=None)


def name_ranks(ranks: Sequence[int]) -> str:
    """Write "rank 3", "ranks 0 and 1" or "ranks 0, 1, 2 and 9 more"."""
    named = [str(rank) for rank in ranks[:MAX_RANKS_LISTED]]
    if len(ranks) == 1:
        return f"rank {named[0]}"
    more = len(ranks) - MAX_RANKS_LISTED
    if more > 0:
        named.append(f"{more:,} more")
    *first, last = named
    return f"ranks {', '.join(first)} and {last}"


def does(ranks: Sequence[int], one: str, several: str) -> str:
    """Choose the verb for one rank or several."""
    return one if len(ranks) == 1 else several
