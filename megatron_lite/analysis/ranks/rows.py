"""Collectives by kind, size and phase: waiting apart from transfer, what is not hidden, and the bandwidth."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_lite.analysis.ranks.calls import Calls, What
from megatron_lite.analysis.ranks.kinds import bus_bytes
from megatron_lite.analysis.ranks.rank_results import CollectiveRow

MAX_SIZES = 32  # of one kind in one phase; more (an all-to-all of experts, say) are one row of their mean size
MANY = -1


def collective_rows(
    ranks: Sequence[Calls],
    slots: Sequence[np.ndarray],
    transfer_ns: Sequence[np.ndarray],
    steps: int,
    group_size: int | None,
) -> tuple[CollectiveRow, ...]:
    """Most exposed first; means over the ranks that take part. slots (-1: does not count), transfer_ns (-1: not matched): by
    rank, per call. steps: that the slots are of. group_size: of collectives whose trace does not say; None if nothing shows it."""
    parts = defaultdict(list)
    for calls, slot, transfer in zip(ranks, slots, transfer_ns):
        for key, sums in _of_rank(calls, slot >= 0, transfer, group_size).items():
            parts[key].append(sums / steps)
    rows = [_row(key, np.mean(sums, axis=0)) for key, sums in parts.items()]
    return tuple(sorted(rows, key=lambda row: (-row.exposed_ms, -row.kernel_ms)))


def _of_rank(calls: Calls, keep: np.ndarray, transfer: np.ndarray, group_size: int | None) -> dict[tuple, np.ndarray]:
    """(number, ns, exposed ns, transfer ns, not matched, bus bytes, bytes), added up by what rows tell apart."""
    kept, kinds = np.flatnonzero(keep), {}
    kind = np.array([kinds.setdefault((calls.whats[i], calls.phase[i]), len(kinds)) for i in kept.tolist()], np.int64)
    moved = np.array([_moved(what, group_size) for what, _ in kinds]).reshape(-1, 2)[kind]
    columns = (
        np.ones(len(kept)),
        (calls.end_ns - calls.start_ns)[kept],
        calls.exposed_ns[kept],
        np.maximum(transfer[kept], 0),
        transfer[kept] < 0,
        *moved.T,
    )
    table = np.stack([np.bincount(kind, column, len(kinds)) for column in columns], axis=1)
    sizes = Counter((what.kind, phase) for what, phase in kinds)
    sums = defaultdict(lambda: np.zeros(len(columns)))
    for (what, phase), values in zip(kinds, table):
        several = what.num_bytes is not None and sizes[what.kind, phase] > MAX_SIZES
        size = MANY if several else what.num_bytes
        sums[what.kind, what.algorithm, phase, what.group_size or group_size, size, what.dtype] += values
    return sums


def _moved(what: What, group_size: int | None) -> tuple[float, float]:
    """(bytes for the bus bandwidth, bytes) of one; 0 where unknown."""
    ranks, num_bytes = what.group_size or group_size, what.num_bytes
    return (bus_bytes(what.kind, num_bytes, ranks) if num_bytes and ranks else 0.0), num_bytes or 0


def _row(key: tuple, sums: np.ndarray) -> CollectiveRow:
    kind, algorithm, phase, ranks, size, dtype = key
    number, ns, exposed, transfer, unmatched, bus, num_bytes = sums.tolist()
    known = not unmatched
    return CollectiveRow(
        name=kind,
        algorithm=algorithm,
        phase=phase,
        group_size=ranks,
        per_step=number,
        num_bytes=round(num_bytes / number) if size == MANY else size,
        dtype=dtype,
        kernel_ms=ns / 1e6,
        transfer_ms=transfer / 1e6 if known else None,
        wait_ms=(ns - transfer) / 1e6 if known else None,
        exposed_ms=exposed / 1e6,
        bus_gb_s=bus / transfer if known and bus and transfer else None,  # bytes per ns = GB/s
    )
