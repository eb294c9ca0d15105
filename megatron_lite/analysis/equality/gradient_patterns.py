"""Tells what ranks' gradients of one parameter are of the gradient that they should be."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_lite.analysis.equality.compared_parts import ComparedPart, group_replicas
from megatron_lite.analysis.equality.measure import Measured
from megatron_lite.analysis.equality.proved_run import Array, get_parameter_name
from megatron_lite.analysis.equality.wholes import select_block

SAME_RATIO = 1e-3  # relative: ratios nearer than this, or than rounding makes them, are one ratio
MOST_RATIO_TOLERANCE = 0.1  # a ratio that rounding may make more of says nothing


class Pattern(enum.Enum):
    """The patterns that parts of a gradient show."""

    EQUAL = enum.auto()
    # all parts are the same multiple
    SCALED = enum.auto()
    # each rank's part is a multiple, which differs between ranks
    SCALED_BY_RANK = enum.auto()
    # replicas differ, and only together they are the gradient
    UNREDUCED = enum.auto()
    # a part is another block of the whole
    ELSEWHERE = enum.auto()
    LACKING = enum.auto()
    OTHER = enum.auto()


@dataclass(frozen=True)
class Shown:
    """The pattern of one parameter."""

    pattern: Pattern
    # by rank: its part over the reference's
    ratios: dict[int, float]
    # of the different replicas: their number, and their sum over the reference
    replicas: int = 0
    sum_ratio: float = 0.0
    # names that the ranks gave, where they are several: weights that should be one
    own_names: tuple[str, ...] = ()
    # (rank, the rank whose block its part is)
    elsewhere: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # the part that is farthest from what it should be
    worst: Measured | None = None
    # whether a ratio of this parameter says something
    is_telling: bool = True
    # what rounding may make of a ratio
    ratio_tolerance: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether all ratios are 1, by more than the tolerance that small gradients have."""
        is_near = all(abs(ratio - 1.0) <= 2 * self.ratio_tolerance for ratio in self.ratios.values())
        is_small = self.worst is not None and self.worst.is_small
        return self.pattern is Pattern.EQUAL and self.is_telling and is_near and not is_small

    def denies(self, factor: float) -> bool:
        """Whether this gradient has certainly not that factor."""
        return self.is_right and 4 * self.ratio_tolerance < abs(factor - 1.0)

    @property
    def ratio(self) -> float:
        """The middle one of the ranks' ratios."""
        return float(np.median(list(self.ratios.values()))) if self.ratios else 0.0


def is_same_ratio(one: float, other: float, tolerance: float = 0.0) -> bool:
    """Whether two ratios are the same but for rounding.

    Args:
        one: A ratio of a tensor to what it should be.
        other: Another such ratio.
        tolerance: Relative difference that rounding makes; more is allowed where that is very small.
    """
    return abs(one - other) <= max(SAME_RATIO, 2 * tolerance) * max(abs(one), abs(other))


def show_pattern(entries: Sequence[ComparedPart]) -> Shown:
    """Find the pattern of one parameter's parts."""
    tolerance = max(entry.measured.ratio_tolerance for entry in entries)
    shown = Shown(
        _find_scaling(entries),
        {entry.rank: entry.measured.ratio for entry in entries},
        worst=max((entry.measured for entry in entries), key=lambda measured: measured.error / measured.tolerance),
        is_telling=any(entry.measured.is_telling for entry in entries) and tolerance < MOST_RATIO_TOLERANCE,
        ratio_tolerance=tolerance,
    )
    is_by_rank = shown.pattern is Pattern.SCALED_BY_RANK
    if shown.pattern is not Pattern.OTHER and not (is_by_rank and not shown.is_telling):
        return shown
    unreduced = _find_unreduced(entries)
    if unreduced is not None:
        count, sum_ratio = unreduced
        own_names = tuple(dict.fromkeys(get_parameter_name(entry.own_name) for entry in entries))
        return replace(shown, pattern=Pattern.UNREDUCED, replicas=count, sum_ratio=sum_ratio, own_names=own_names)
    elsewhere = () if is_by_rank else _find_elsewhere(entries)
    return replace(shown, pattern=Pattern.ELSEWHERE, elsewhere=elsewhere) if elsewhere else shown


def _find_scaling(entries: Sequence[ComparedPart]) -> Pattern:
    """Whether parts are right, one multiple of what they should be, or one of each rank."""
    if not any(entry.measured.differs for entry in entries):
        return Pattern.EQUAL
    if not all(entry.measured.is_scaled for entry in entries):
        return Pattern.OTHER
    first = entries[0].measured
    for entry in entries:
        allowed = 2 * (first.ratio_tolerance + entry.measured.ratio_tolerance)
        if abs(entry.measured.ratio - first.ratio) > allowed * max(1.0, abs(first.ratio)):
            return Pattern.SCALED_BY_RANK
    return Pattern.SCALED


def _find_unreduced(entries: Sequence[ComparedPart]) -> tuple[int, float] | None:
    """Find out whether replicas that differ add up to the gradient: how many differ, and their sum over it."""
    found = []
    for group in group_replicas(entries):
        distinct = list_distinct(group)
        if len(distinct) < 2:
            if any(entry.measured.differs for entry in group):
                return None
            continue
        summed = _measure_sum(distinct, group[0])
        if summed is None:
            summed = _measure_sum([entry.array for entry in group], group[0])
            distinct = [entry.array for entry in group]
        if summed is None:
            return None
        found.append((len(distinct), summed))
    return max(found) if found else None


def list_distinct(group: Sequence[ComparedPart]) -> list[Array]:
    """List the replicas that differ by more than rounding, each once."""
    distinct: list[Array] = []
    for entry in group:
        scale = max(entry.measured.reference_norm, entry.measured.norm)
        allowed = 2 * entry.measured.tolerance * scale
        if not any(np.linalg.norm(entry.array - other) <= allowed for other in distinct):
            distinct.append(entry.array)
    return distinct


def _measure_sum(arrays: Sequence[Array], entry: ComparedPart) -> float | None:
    """The sum of arrays over the reference's block; None where it is no multiple of it."""
    total = np.sum(arrays, axis=0)
    reference = entry.reference
    square = float((reference * reference).sum())
    if not square or not np.isfinite(total).all():
        return None
    ratio = float((total * reference).sum()) / square
    rest = float(np.linalg.norm(total - ratio * reference))
    sizes = sum(float(np.linalg.norm(array)) for array in arrays)
    # what rounding makes of each of them stays, where they cancel each other
    if rest > 2 * entry.measured.tolerance * max(sizes, abs(ratio) * square**0.5):
        return None
    is_plain = any(is_same_ratio(ratio, plain, entry.measured.tolerance) for plain in (1.0, len(arrays)))
    if reference.size == 1 and not is_plain:
        return None
    return ratio


def _find_elsewhere(entries: Sequence[ComparedPart]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Find parts that are another block of the whole, and where that block begins; () unless all that differ are."""
    found = []
    for entry in entries:
        if not entry.measured.differs:
            continue
        starts = find_block(entry)
        if starts is None:
            return ()
        found.append((entry.rank, starts))
    return tuple(found)


def find_block(entry: ComparedPart) -> tuple[int, ...] | None:
    """Find where else in the whole a part's numbers lie, at a multiple of its own length."""
    shape = entry.array.shape
    if shape == entry.whole.shape or entry.array.size < 2:
        return None
    for starts in np.ndindex(*(max(room // max(length, 1), 1) for room, length in zip(entry.whole.shape, shape))):
        begin = tuple(int(at * length) for at, length in zip(starts, shape))
        block = select_block(entry.whole, begin, shape)
        if block is None or begin == entry.place.starts:
            continue
        if np.linalg.norm(entry.array - block) <= 2 * entry.measured.tolerance * np.linalg.norm(block):
            return begin
    return None
