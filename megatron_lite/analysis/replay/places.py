"""Finds the first module of a step whose output leaves its range or is not finite, and weights out of proportion."""

import re
import statistics
from collections.abc import Callable, Iterator, Sequence

from megatron_lite.analysis.replay.attempts import find_own, order_tensor
from megatron_lite.formats.replay_record import SEEN_BACKWARD, SEEN_FORWARD, AttemptKind, ModuleRecord, RankRecord
from megatron_lite.formats.replay_report import ReplayPlace
from megatron_lite.units import significant

# an output leaves its range where its largest absolute value is so many times that of the step before
RANGE_FACTOR = 10.0
# a weight is out of proportion where it is so many times that of the middle one of its kind
WEIGHT_FACTOR = 20.0
MIN_KIND = 2  # other layers with such a weight
LAYER = re.compile(r"\.\d+\.")


def list_places(records: Sequence[RankRecord]) -> list[ReplayPlace]:
    """List the first module in forward that leaves its range, the first that is not finite, and the first gradient
    in backward that is not finite.

    Args:
        records: Of all ranks.
    """
    places = []
    before = _list_largest(records)
    leaving = _find_first(records, SEEN_FORWARD, lambda rank, one: _leaves_range(one, before.get((rank, one.module))))
    if leaving is not None:
        module, ranks = leaving
        then = before[ranks[0], module.module]
        figures = f"{significant(module.largest, 3)}, {significant(then, 3)} in the step before"
        factor = f"more than {RANGE_FACTOR:g} times as large"
        places.append(
            ReplayPlace(
                what="first output out of its range", module=module.module, ranks=ranks, evidence=f"{figures}: {factor}"
            )
        )
    for direction, what in (
        (SEEN_FORWARD, "first output that is not finite"),
        (SEEN_BACKWARD, "first gradient that is not finite"),
    ):
        broken = _find_first(records, direction, lambda rank, one: bool(one.nonfinite))
        if broken is not None:
            module, ranks = broken
            share = f"{module.nonfinite} of {module.values} values, first in micro-batch {module.micro_batch}"
            largest = f"largest finite one {significant(module.largest, 3)}"
            places.append(ReplayPlace(what=what, module=module.module, ranks=ranks, evidence=f"{share}; {largest}"))
    return places


def _list_largest(records: Sequence[RankRecord]) -> dict[tuple[int, str], float]:
    """List by rank and module the largest output of the step before."""
    found = {}
    for record in records:
        attempt = find_own(record, AttemptKind.FIRST)
        for one in attempt.before if attempt is not None else ():
            if one.direction == SEEN_FORWARD:
                found[record.rank, one.module] = one.largest
    return found


def _leaves_range(module: ModuleRecord, before: float | None) -> bool:
    return before is not None and module.largest > RANGE_FACTOR * before


def _find_first(
    records: Sequence[RankRecord], direction: str, shows: Callable[[int, ModuleRecord], bool]
) -> tuple[ModuleRecord, tuple[int, ...]] | None:
    """Find the first module that shows something in the first attempt, and the ranks on which it does.

    Args:
        records: Of all ranks.
        direction: SEEN_FORWARD or SEEN_BACKWARD.
        shows: Called with a rank and what a module computed on it.
    """
    found = []
    for record in records:
        attempt = find_own(record, AttemptKind.FIRST)
        for place, one in enumerate(attempt.modules if attempt is not None else ()):
            if one.direction == direction and shows(record.rank, one):
                found.append((order_tensor(record, direction, place), record.rank, one))
                break
    if not found:
        return None
    first, _, module = min(found, key=lambda entry: entry[:2])
    return module, tuple(rank for order, rank, _ in found if order == first)


def find_large_weights(records: Sequence[RankRecord]) -> Iterator[str]:
    """Find weights that are out of proportion to those of other layers, with their figures.

    Args:
        records: Of all ranks.
    """
    sizes = {weight.name: weight.rms for record in records for weight in record.weights}
    kinds: dict[str, dict[str, float]] = {}
    for name, rms in sizes.items():
        if rms is None:
            yield f"{name} holds NaN or Inf"
        elif LAYER.search(name):
            kinds.setdefault(LAYER.sub(".*.", name), {})[name] = rms
    for members in kinds.values():
        for name, rms in members.items():
            others = [value for other, value in members.items() if other != name]
            if len(others) + 1 < MIN_KIND:
                continue
            middle = statistics.median(others)
            if middle and rms > WEIGHT_FACTOR * middle:
                factor = f"{significant(rms / middle, 2)} times those of other layers"
                yield f"{name} has a root mean square of {significant(rms, 3)}, {factor}"
