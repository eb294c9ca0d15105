"""Clocks, temperatures and errors of every rank's hardware over a run, added up from the lines of steps.jsonl."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_lite.analysis.intervals import Numbers
from megatron_lite.formats.hardware_record import ClockLimit, HardwareFigures
from megatron_lite.formats.step_records import RankNumbers
from megatron_lite.xid_errors import choose_most_telling

FIGURES = frozenset(HardwareFigures.__struct_fields__)
# of samples in which the GPU was not idle
AT_WORK = frozenset(("sm_clock_mhz", "memory_clock_mhz", "slowed", "power_capped"))
EVENTS = frozenset(
    (
        "ecc_corrected",
        "ecc_uncorrected",
        "remapped_rows",
        "nvlink_errors",
        "pcie_replays",
        "xids",
        "cpu_slowdowns",
        "swapped_bytes",
    )
)
LOWEST = frozenset(("min_sm_clock_mhz", "pcie_width"))
HIGHEST = frozenset(("temperature_c", "repair", "lost"))
NEWEST = frozenset(("max_sm_clock_mhz", "power_limit_w", "slowdown_c", "max_pcie_width", "max_cpu_mhz"))
LIMITS = "clock_limits"
LAST_XID = "last_xid"
SAMPLES = "samples"


@dataclass(frozen=True)
class RanksHardware:
    """Figures of HardwareFigures over a run: means over samples, sums of events, extremes. NaN for unknown."""

    ranks: int = 0
    figures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # by name, a number for each rank

    def get(self, name: str) -> Numbers:
        """Numbers of all ranks, NaN for a rank that has none."""
        if name not in FIGURES:
            raise KeyError(name)
        if name not in self.figures:
            return np.full(self.ranks, math.nan)
        return np.array(self.figures[name])

    def get_one(self, name: str, rank: int) -> float | None:
        """Number of one rank; None where it is not known."""
        value = float(self.get(name)[rank]) if rank < self.ranks else math.nan
        return None if math.isnan(value) else value

    def get_limits(self, rank: int) -> ClockLimit:
        """Get what held the rank's clock down in any sample; nothing where it is not known."""
        return ClockLimit(int(self.get_one(LIMITS, rank) or 0))

    @property
    def has_gpu(self) -> bool:
        """Whether a rank's GPU told its clock or what limits it."""
        return "sm_clock_mhz" in self.figures or LIMITS in self.figures


MAX_RANKS_BESIDE = 2**16  # ranks whose own files may tell of: a damaged number takes no room


def complete_hardware(hardware: RanksHardware, of_ranks: Mapping[int, HardwareFigures]) -> RanksHardware:
    """Add the figures of ranks that the lines of a run do not know.

    Args:
        hardware: by the lines.
        of_ranks: by rank, what its own trace tells.
    """
    known = ~np.isnan(hardware.get(SAMPLES))
    others = {}
    for rank, figures in of_ranks.items():
        is_known = rank < hardware.ranks and known[rank]
        if rank < MAX_RANKS_BESIDE and not is_known:
            others[rank] = figures
    if not others:
        return hardware
    last = max(others)
    ranks = max(hardware.ranks, last + 1)
    completed = {}
    for name in FIGURES:
        column = np.full(ranks, math.nan)
        column[: hardware.ranks] = hardware.get(name)
        for rank, figures in others.items():
            value = getattr(figures, name)
            if value is not None:
                column[rank] = value
        is_unknown = np.isnan(column)
        if not is_unknown.all():
            completed[name] = tuple(column.tolist())
    return RanksHardware(ranks, completed)


Merge = Callable[[Numbers, Numbers], Numbers]


def _take_newest(before: Numbers, values: Numbers) -> Numbers:
    """The later ones of two rows of numbers."""
    return values


def _join_bits(before: Numbers, values: Numbers) -> Numbers:
    """Every bit that is set in one of two rows of whole numbers."""
    joined: Numbers = (before.astype(np.int64) | values.astype(np.int64)).astype(float)
    return joined


def _keep_telling_xids(before: Numbers, values: Numbers) -> Numbers:
    """The later ones of two rows of numbers of Xids, or the earlier where only those are of hardware."""
    pairs = zip(before.tolist(), values.tolist())
    return np.array([choose_most_telling([int(one), int(later)]) for one, later in pairs], float)


# how two numbers of a rank become one; those of other names are means over samples
MERGES: dict[str, Merge] = {
    SAMPLES: np.add,
    LIMITS: _join_bits,
    LAST_XID: _keep_telling_xids,
    **dict.fromkeys(EVENTS, np.add),
    **dict.fromkeys(LOWEST, np.minimum),
    **dict.fromkeys(HIGHEST, np.maximum),
    **dict.fromkeys(NEWEST, _take_newest),
}


class HardwareTally:
    """Adds up what lines tell of the ranks' hardware, each line once."""

    def __init__(self) -> None:
        self._ranks = 0
        self._merged: dict[str, Numbers] = {}
        self._sums: dict[str, Numbers] = {}
        self._weights: dict[str, Numbers] = {}

    def add_line(self, of_ranks: Mapping[str, RankNumbers], ranks: int) -> None:
        """Add a line of all ranks.

        Args:
            of_ranks: by figure a number for each rank, or one for all of them.
            ranks: how many there are.
        """
        if ranks != self._ranks:
            # ranks of another number are others
            self._forget(ranks)
        table: dict[str, Numbers] = {}
        for name, numbers in of_ranks.items():
            if name in FIGURES and len(numbers) in (1, ranks):
                values = np.array(numbers, float)
                table[name] = np.broadcast_to(values, ranks)
        self._add(table)

    def add_record(self, rank: int, figures: HardwareFigures) -> None:
        """Add samples of one rank."""
        if rank >= self._ranks:
            self._forget(rank + 1)
        table: dict[str, Numbers] = {}
        for name in FIGURES:
            value = getattr(figures, name)
            if value is not None:
                table[name] = np.full(self._ranks, math.nan)
                table[name][rank] = value
        self._add(table)

    def build(self) -> RanksHardware:
        """Make the run's figures of what was added."""
        figures = {name: values.copy() for name, values in self._merged.items()}
        for name, sums in self._sums.items():
            weights = self._weights[name]
            means = np.full(self._ranks, math.nan)
            np.divide(sums, weights, out=means, where=weights > 0)
            figures[name] = means
        known = {}
        for name, values in figures.items():
            is_unknown = np.isnan(values)
            if not is_unknown.all():
                known[name] = tuple(values.tolist())
        return RanksHardware(self._ranks, known)

    def _forget(self, ranks: int) -> None:
        """Begin anew with so many ranks."""
        self._ranks = ranks
        self._merged.clear()
        self._sums.clear()
        self._weights.clear()

    def _add(self, table: Mapping[str, Numbers]) -> None:
        """Add a row of numbers of each figure, a number for each rank; NaN for unknown."""
        if SAMPLES not in table:
            return
        samples = np.nan_to_num(table[SAMPLES])
        at_work = samples
        if "idle" in table:
            at_work = samples * (1 - np.nan_to_num(table["idle"]))
        for name, values in table.items():
            merge = MERGES.get(name)
            if merge is not None:
                self._merge(name, values, merge)
            elif name in AT_WORK:
                self._add_to_mean(name, values, at_work)
            else:
                self._add_to_mean(name, values, samples)

    def _merge(self, name: str, values: Numbers, merge: Merge) -> None:
        """Merge known numbers with those before; where one is unknown, the other one stays."""
        before = self._merged.setdefault(name, np.full(self._ranks, math.nan))
        is_new = np.isnan(before)
        both = ~is_new & ~np.isnan(values)
        before[both] = merge(before[both], values[both])
        before[is_new] = values[is_new]

    def _add_to_mean(self, name: str, values: Numbers, weights: Numbers) -> None:
        """Add known numbers to what becomes their mean."""
        is_known = ~np.isnan(values) & (weights > 0)
        sums = self._sums.setdefault(name, np.zeros(self._ranks))
        all_weights = self._weights.setdefault(name, np.zeros(self._ranks))
        weighted = values * weights
        sums[is_known] += weighted[is_known]
        all_weights[is_known] += weights[is_known]
