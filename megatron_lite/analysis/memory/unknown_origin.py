"""Memory without stack or tag that was there before the record: told apart by counting equal sizes.

Each gradient has one weight of its size, and an optimizer's state and masters come in whole sets of such sizes. The set that
explains the most bytes is taken; what it does not explain stays unknown.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.memory.lives import Lives
from megatron_lite.analysis.memory.phases import NOT_SAID, NUMBER, ZERO_GRAD

MOST_UNEXPLAINED = 0.5  # of the candidates' bytes; beyond it the sizes do not fit and nothing is claimed


@dataclass(frozen=True)
class Sets:
    """How many tensors of which kind go with each gradient. wide: states are fp32 beside 16-bit weights."""

    masters: int
    moments: int
    wide: bool

    @property
    def order(self) -> tuple[tuple[str, int, int], ...]:
        """(category, how many, times the gradient's size)."""
        factor = 2 if self.wide else 1
        return (("parameters", 1, 1), ("master weights", self.masters, factor), ("moments", self.moments, factor))


HYPOTHESES = (
    Sets(0, 0, False),
    Sets(0, 1, False),
    Sets(0, 2, False),
    Sets(1, 2, True),
    Sets(1, 1, True),
    Sets(0, 2, True),
)


def assign_unknown(lives: Lives, found: np.ndarray, freed_in: np.ndarray, index: dict[str, int]):
    """Writes into `found` (indices of categories; negative where undecided) what sizes tell."""
    open_rows = np.flatnonzero((found < 0) & (lives.begin < 0))
    gradients = _one_set(lives, np.flatnonzero(found == index["gradients"]))
    if not len(open_rows) or not gradients:
        return
    known_sizes = np.fromiter(gradients, np.int64)
    moments = lives.requested[found == index["moments"]]
    freed = freed_in[open_rows]
    replaced = (freed == NUMBER["optimizer_step"]) & np.isin(lives.requested[open_rows], moments)
    found[open_rows[replaced]] = index["moments"]
    cleared = np.isin(
        freed, [NUMBER[ZERO_GRAD], NUMBER["forward"], NUMBER["data"], NUMBER["data_to_device"], NUMBER[""]]
    )
    cleared &= np.isin(lives.requested[open_rows], known_sizes)
    found[open_rows[cleared]] = index["gradients"]
    staying = open_rows[freed == NOT_SAID]
    _by_count(lives, staying, found, gradients, index)


def _one_set(lives: Lives, gradients: np.ndarray) -> Counter:
    """{size: how many} of the gradients that were alive together when most were."""
    if not len(gradients):
        return Counter()
    begins, ends = lives.begin[gradients], np.sort(lives.end[gradients])
    alive = np.arange(1, len(begins) + 1) - np.searchsorted(ends, begins, side="right")
    moment = begins[np.argmax(alive)]
    together = gradients[(begins <= moment) & (lives.end[gradients] > moment)]
    return Counter(lives.requested[together].tolist())


def _by_count(lives: Lives, staying: np.ndarray, found: np.ndarray, gradients: Counter, index: dict[str, int]):
    have = Counter(lives.requested[staying].tolist())
    total = sum(size * count for size, count in have.items())
    errors = [_unexplained(sets, have, gradients) for sets in HYPOTHESES]
    best = int(np.argmin(errors))
    if not total or errors[best] > MOST_UNEXPLAINED * total:
        return
    rows_of: dict[int, list[int]] = {}
    for row in staying[np.argsort(lives.address[staying], kind="stable")].tolist():
        rows_of.setdefault(int(lives.requested[row]), []).append(row)
    for category, times, factor in HYPOTHESES[best].order:
        for size, count in gradients.items():
            rows = rows_of.get(size * factor, [])
            found[rows[: times * count]] = index[category]
            del rows[: times * count]


def _unexplained(sets: Sets, have: Counter, gradients: Counter) -> int:
    """Bytes by which what should be there and what is there differ."""
    expected = Counter()
    for _, times, factor in sets.order:
        for size, count in gradients.items():
            expected[size * factor] += times * count
    return sum(abs(have[size] - expected[size]) * size for size in set(have) | set(expected))
