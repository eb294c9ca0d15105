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
        if self.pattern is not Pattern.EQUAL or not self.is_telling:
            return False
        if self.worst is not None and self.worst.is_small:
            return False
        allowed = 2 * self.ratio_tolerance
        return all(abs(ratio - 1.0) <= allowed for ratio in self.ratios.values())

    def denies(self, factor: float) -> bool:
        """Whether this gradient has certainly not that factor."""
        distance = abs(factor - 1.0)
        return self.is_right and 4 * self.ratio_tolerance < distance

    @property
    def ratio(self) -> float:
        """The middle one of the ranks' ratios."""
        if not self.ratios:
            return 0.0
        values = list(self.ratios.values())
        return float(np.median(values))


def is_same_ratio(one: float, other: float, tolerance: float = 0.0) -> bool:
    """Whether two ratios are the same but for rounding.

    Args:
        one: A ratio of a tensor to what it should be.
        other: Another such ratio.
        tolerance: Relative difference that rounding makes; more is allowed where that is very small.
    """
    allowed = max(SAME_RATIO, 2 * tolerance)
    larger = max(abs(one), abs(other))
    return abs(one - other) <= allowed * larger


def show_pattern(entries: Sequence[ComparedPart]) -> Shown:
    """Find the pattern of one parameter's parts."""
    measured = [entry.measured for entry in entries]
    tolerance = max(one.ratio_tolerance for one in measured)
    is_any_telling = any(one.is_telling for one in measured)
    shown = Shown(
        pattern=_find_scaling(entries),
        ratios={entry.rank: entry.measured.ratio for entry in entries},
        worst=max(measured, key=lambda one: one.error / one.tolerance),
        is_telling=is_any_telling and tolerance < MOST_RATIO_TOLERANCE,
        ratio_tolerance=tolerance,
    )
    is_by_rank = shown.pattern is Pattern.SCALED_BY_RANK
    # of a single number, or one that is zero, any other one is a multiple
    is_doubtful = is_by_rank and not shown.is_telling
    if shown.pattern is not Pattern.OTHER and not is_doubtful:
        return shown
    unreduced = _find_unreduced(entries)
    if unreduced is not None:
        count, sum_ratio = unreduced
        names = [get_parameter_name(entry.own_name) for entry in entries]
        return replace(
            shown,
            pattern=Pattern.UNREDUCED,
            replicas=count,
            sum_ratio=sum_ratio,
            own_names=tuple(dict.fromkeys(names)),
        )
    if is_by_rank:
        return shown
    elsewhere = _find_elsewhere(entries)
    if not elsewhere:
        return shown
    return replace(shown, pattern=Pattern.ELSEWHERE, elsewhere=elsewhere)


def _find_scaling(entries: Sequence[ComparedPart]) -> Pattern:
    """Whether parts are right, one multiple of what they should be, or one of each rank."""
    if not any(entry.measured.differs for entry in entries):
        return Pattern.EQUAL
    if not all(entry.measured.is_scaled for entry in entries):
        return Pattern.OTHER
    first = entries[0].measured
    size = max(1.0, abs(first.ratio))
    for entry in entries:
        other = entry.measured
        allowed = 2 * (first.ratio_tolerance + other.ratio_tolerance)
        distance = abs(other.ratio - first.ratio)
        if distance > allowed * size:
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
        terms = distinct
        summed = _measure_sum(terms, group[0])
        if summed is None:
            # replicas that agree may each be a term of the sum
            terms = [entry.array for entry in group]
            summed = _measure_sum(terms, group[0])
        if summed is None:
            return None
        found.append((len(terms), summed))
    return max(found, default=None)


def list_distinct(group: Sequence[ComparedPart]) -> list[Array]:
    """List the replicas that differ by more than rounding, each once."""
    distinct: list[Array] = []
    for entry in group:
        measured = entry.measured
        scale = max(measured.reference_norm, measured.norm)
        allowed = 2 * measured.tolerance * scale
        distances = [np.linalg.norm(entry.array - other) for other in distinct]
        if not any(distance <= allowed for distance in distances):
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
    size = abs(ratio) * square**0.5
    tolerance = entry.measured.tolerance
    # what rounding makes of each of them stays, where they cancel each other
    if rest > 2 * tolerance * max(sizes, size):
        return None
    if reference.size > 1:
        return ratio
    # any sum is a multiple of a single number: it must be the one of a sum, or of a mean that was forgotten
    for plain in (1.0, len(arrays)):
        if is_same_ratio(ratio, plain, tolerance):
            return ratio
    return None


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
    counts = []
    for room, length in zip(entry.whole.shape, shape):
        count = room // max(length, 1)
        counts.append(max(count, 1))
    tolerance = 2 * entry.measured.tolerance
    for starts in np.ndindex(*counts):
        begin = tuple(int(at * length) for at, length in zip(starts, shape))
        block = select_block(entry.whole, begin, shape)
        if block is None or begin == entry.place.starts:
            continue
        distance = np.linalg.norm(entry.array - block)
        if distance <= tolerance * np.linalg.norm(block):
            return begin
    return None
