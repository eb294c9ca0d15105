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
        usual = max((other for other in counts if len(other) == len(order)), key=lambda other: counts[other])
        is_within = name.startswith(f"{difference.where}.")
        if is_within and counts[usual] > counts[order]:
            return msgspec.structs.replace(
                difference,
                kind=ErrorKind.WRONG_SHARD,
                evidence=f"{difference.evidence}; ranks have blocks {list(order)} of {name}, {list(usual)} of others",
                remedy="look at which block each rank takes: all layers must be cut in the same order",
                confidence="high",
            )
    return difference


def _list_orders(places: Places) -> dict[str, Order]:
    """List the number of the block that each rank has, of parameters whose contents tell."""
    orders = {}
    for name, parts in places.group().items():
        told = sorted((rank, place) for rank, _, place in parts if _is_told(place))
        if len(told) == len(parts):
            orders[name] = tuple(_count_blocks_before(place) for _, place in told)
    return orders


def _is_told(place: Place) -> bool:
    return place.is_same and not place.is_whole and not place.is_guessed and not place.is_constant


def _count_blocks_before(place: Place) -> int:
    cut = [dim for dim, length in enumerate(place.shape) if length != place.whole[dim]]
    return place.starts[cut[0]] // place.shape[cut[0]]
