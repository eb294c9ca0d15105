"""Predictions of a run's memory and speed. Every number has the formula that it came from."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lite.formats.run_record import LedgerRow, Moment
from megatron_lite.phases import Phase


@dataclass(frozen=True)
class ListedMoment:
    """A moment whose rows of the same name are not added up yet, which takes longer than to find how much they are."""

    phase: Phase
    where: str
    rows: Sequence[LedgerRow]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(row.num_bytes for row in self.rows)


def sum_moment(listed: ListedMoment) -> Moment:
    """A Moment with the sums of rows of the same name, largest first."""
    alike: dict[str, list[LedgerRow]] = {}
    for row in listed.rows:
        if row.num_bytes:
            alike.setdefault(row.name, []).append(row)
    merged = []
    for name, rows in alike.items():
        num_bytes = sum(row.num_bytes for row in rows)
        formula = " + ".join(row.formula for row in rows)
        merged.append(
            LedgerRow(
                category=rows[0].category,
                name=name,
                num_bytes=num_bytes,
                formula=formula,
            )
        )
    return Moment(listed.phase.value, listed.where, tuple(sorted(merged, key=lambda row: -row.num_bytes)))
