"""Tensors on paper as a moment of a ledger."""

from collections import Counter

from megatron_lite.estimate.liveness import Sized
from megatron_lite.estimate.prediction import LedgerRow, Moment
from megatron_lite.phases import Phase
from megatron_lite.units import count


def moment(phase: Phase, where: str, tensors: Counter[Sized]) -> Moment:
    """One row for each name, largest first."""
    named: dict[tuple[str, str], list[tuple[Sized, int]]] = {}
    for sized, times in tensors.items():
        if times and sized.num_bytes:
            named.setdefault((sized.category, sized.name), []).append((sized, times))
    rows = [_row(category, name, found) for (category, name), found in named.items()]
    return Moment(phase.value, where, tuple(sorted(rows, key=lambda row: -row.num_bytes)))


def times(tensors: Counter[Sized], number: int) -> Counter[Sized]:
    """All of them, `number` times."""
    return Counter({sized: each * number for sized, each in tensors.items()})


def _row(category: str, name: str, found: list[tuple[Sized, int]]) -> LedgerRow:
    largest_first = sorted(found, key=lambda pair: -pair[0].num_bytes * pair[1])
    num_bytes = sum(sized.num_bytes * number for sized, number in found)
    return LedgerRow(category, name, num_bytes, " + ".join(_formula(sized, number) for sized, number in largest_first))


def _formula(sized: Sized, number: int) -> str:
    if sized.is_element:
        return f"{sized.num_bytes} bytes x {count(number)} {sized.formula}"
    return sized.formula if number == 1 else f"{count(number)} x {sized.formula}"
