"""Says whether ranks took the blocks of their layers in one order."""

from collections import Counter

import msgspec

from megatron_lite.analysis.equality.placing import Place, Places
from megatron_lite.formats.prove_report import Difference, ErrorKind

Order = tuple[int, ...]


def name_wrong_order(difference: Difference, places: Places) -> Difference:
    """Name a difference whose module has blocks in another order than the other layers.

    Args:
        difference: The first output that differs.
        places: What the ranks' parameters are of the reference, by the contents of the weights.
    """
    if difference.kind is not ErrorKind.UNKNOWN:
        return difference
    orders = _list_orders(places)
    counts = Counter(orders.values())
    for name, order in orders.items():
        if not name.startswith(f"{difference.where}."):
            continue
        of_same_length = [other for other in counts if len(other) == len(order)]
        usual = max(of_same_length, key=counts.__getitem__)
        if counts[usual] > counts[order]:
            mine = list(order)
            others = list(usual)
            return msgspec.structs.replace(
                difference,
                kind=ErrorKind.WRONG_SHARD,
                evidence=f"{difference.evidence}; ranks have blocks {mine} of {name}, {others} of others",
                remedy="look at which block each rank takes: all layers must be cut in the same order",
                confidence="high",
            )
    return difference


def _list_orders(places: Places) -> dict[str, Order]:
    """List the number of the block that each rank has, of parameters whose contents tell."""
    orders = {}
    for name, parts in places.group().items():
        if not all(_is_told(place) for _, _, place in parts):
            continue
        numbers = []
        for rank, _, place in parts:
            number = _count_blocks_before(place)
            numbers.append((rank, number))
        numbers.sort()
        orders[name] = tuple(number for _, number in numbers)
    return orders


def _is_told(place: Place) -> bool:
    """Whether the contents of a part tell which block it is."""
    if place.is_whole or not place.is_same:
        return False
    return not place.is_guessed and not place.is_constant


def _count_blocks_before(place: Place) -> int:
    for start, length, room in zip(place.starts, place.shape, place.whole):
        if length != room:
            return start // length
    return 0
