"""Collectives by group and by kind, size and phase: waiting apart from transfer, what is not hidden, and the bandwidth.

Figures are means per shared step over the ranks that take part.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers, difference, intersection, joined, union
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.calls import Calls, What, bus_bytes
from megatron_lite.analysis.ranks.rank_results import CollectiveRow, GroupRow
from megatron_lite.analysis.trace.columns import ProcessGroup

MAX_SIZES = 32  # of one kind in one phase; more (an all-to-all of experts, say) are one row of their mean size
MANY = -1  # in place of the bytes of such a row


def _count_last(group: str) -> tuple[bool, bool, str]:
    """Order groups as they are charged with what several have under way.

    Those that layers wait for come before those that run beside them.
    """
    return "pipeline" in group, "data" in group, group


def build_group_rows(
    seen: Sequence[RankFacts],
    ranks: Sequence[Calls],
    slots: Sequence[Integers],
    steps: int,
    labels: Mapping[ProcessGroup, str],
) -> tuple[GroupRow, ...]:
    """Add up the communication of each dimension of the layout.

    Args:
        seen: what is known of each trace.
        ranks: the collectives of each rank.
        slots: by rank, int [c], the shared step of each call; -1 for what does not count.
        steps: how many shared steps there are.
        labels: the dimension of each process group.

    Returns:
        A row per dimension, means per step over the ranks that take part, the most exposed first.
    """
    sums_of_label: dict[str, list[_GroupSums]] = defaultdict(list)
    for one, calls, slot in zip(seen, ranks, slots):
        for label, sums in _sum_groups(one, calls, slot, labels).items():
            sums_of_label[label].append(sums)
    groups = [_build_group_row(label, of_ranks, steps) for label, of_ranks in sums_of_label.items()]
    groups.sort(key=lambda row: (-row.exposed_ms, -row.busy_ms))
    return tuple(groups)


@dataclass(frozen=True)
class _GroupSums:
    """Communication of one rank along one dimension in all shared steps."""

    rank: int | None
    number: int  # of calls
    num_bytes: float  # NaN if it is unknown of any call
    busy_ms: float  # in which any call is under way
    exposed_ms: float  # of it, what neither computing nor a dimension charged before hides


def _build_group_row(label: str, of_ranks: Sequence[_GroupSums], steps: int) -> GroupRow:
    """Build the row of one dimension.

    Args:
        label: the dimension.
        of_ranks: the communication of each rank that takes part.
        steps: how many shared steps there are.
    """

    def average(values: list[float]) -> float:
        return float(np.mean(values)) / steps

    num_bytes = average([sums.num_bytes for sums in of_ranks])
    most = max(of_ranks, key=lambda sums: sums.exposed_ms)
    return GroupRow(
        group=label,
        per_step=average([sums.number for sums in of_ranks]),
        num_bytes=None if math.isnan(num_bytes) else num_bytes,
        busy_ms=average([sums.busy_ms for sums in of_ranks]),
        exposed_ms=average([sums.exposed_ms for sums in of_ranks]),
        most_exposed_rank=most.rank,
        most_exposed_ms=most.exposed_ms / steps,
    )


def _sum_groups(
    one: RankFacts, calls: Calls, slot: Integers, labels: Mapping[ProcessGroup, str]
) -> dict[str, _GroupSums]:
    """Add up one rank's communication by dimension.

    Args:
        one: what is known of the rank's trace.
        calls: its collectives.
        slot: int [c], the shared step of each call; -1 for what does not count.
        labels: the dimension of each process group.
    """
    rows_of_label: dict[str, list[int]] = defaultdict(list)
    for row in np.flatnonzero(slot >= 0).tolist():
        label = labels[calls.whats[row].group]
        rows_of_label[label].append(row)
    steady = [step for step in one.placing.steps if step.steady]
    within = union([step.start_ns for step in steady], [step.end_ns for step in steady])
    taken = calls.compute
    found = {}
    for label in sorted(rows_of_label, key=_count_last):
        rows = rows_of_label[label]
        sizes = [calls.whats[row].num_bytes for row in rows]
        under_way = union(calls.start_ns[rows], calls.end_ns[rows])
        busy = intersection(within, under_way)
        exposed = difference(busy, taken)
        found[label] = _GroupSums(
            rank=one.time.rank,
            number=len(rows),
            num_bytes=sum(math.nan if size is None else size for size in sizes),
            busy_ms=busy.length / 1e6,
            exposed_ms=exposed.length / 1e6,
        )
        taken = joined(taken, busy)
    return found


class _Key(NamedTuple):
    """Traits by which rows of collectives are told apart."""

    kind: str
    group: str  # the dimension
    algorithm: str
    phase: str
    group_size: int | None
    num_bytes: int | None  # of one; MANY where a row holds several sizes
    dtype: str


@dataclass(frozen=True)
class _Sums:
    """Sums over one rank's calls of a row, or means of several ranks."""

    number: float  # of calls
    ns: float
    exposed_ns: float
    transfer_ns: float  # that no rank waits for
    unmatched: float  # calls of which the transfer is not known
    bus_bytes: float  # that links carry; 0 where it is not known
    num_bytes: float  # of all calls


def build_collective_rows(
    ranks: Sequence[tuple[Calls, Integers, Integers]],
    steps: int,
    labels: Mapping[ProcessGroup, str],
    group_size: int | None,
) -> tuple[CollectiveRow, ...]:
    """Add up collectives by kind, size and phase.

    Args:
        ranks: each rank's calls, the shared step of each call (-1: does not count), its transfer in ns (-1: not
            matched).
        steps: how many shared steps there are.
        labels: the dimension of each process group.
        group_size: of collectives whose trace does not say; None if nothing shows it.

    Returns:
        Means per step over the ranks that take part, the most exposed first.
    """
    sums_of_key: dict[_Key, list[_Sums]] = defaultdict(list)
    for calls, slot, transfer_ns in ranks:
        for key, sums in _sum_by_kind(calls, slot >= 0, transfer_ns, labels, group_size).items():
            sums_of_key[key].append(sums)
    rows = [_build_collective_row(key, _average(of_ranks, steps)) for key, of_ranks in sums_of_key.items()]
    rows.sort(key=lambda row: (-row.exposed_ms, -row.kernel_ms))
    return tuple(rows)


def _average(of_ranks: Sequence[_Sums], steps: int) -> _Sums:
    """Average the sums of ranks; means per step."""
    means = {}
    for field in fields(_Sums):
        per_step = [getattr(sums, field.name) / steps for sums in of_ranks]
        means[field.name] = sum(per_step) / len(per_step)
    return _Sums(**means)


def _build_collective_row(key: _Key, mean: _Sums) -> CollectiveRow:
    """Build a row of its traits and its means per step; waiting only where every call was matched."""
    num_bytes = key.num_bytes
    if num_bytes == MANY:
        num_bytes = round(mean.num_bytes / mean.number)
    row = CollectiveRow(
        name=key.kind,
        group=key.group,
        algorithm=key.algorithm,
        phase=key.phase,
        group_size=key.group_size,
        per_step=mean.number,
        num_bytes=num_bytes,
        dtype=key.dtype,
        kernel_ms=mean.ns / 1e6,
        transfer_ms=None,
        wait_ms=None,
        exposed_ms=mean.exposed_ns / 1e6,
        bus_gb_s=None,
    )
    if mean.unmatched:
        return row
    bus_gb_s = None
    if mean.bus_bytes and mean.transfer_ns:
        # bytes per ns are GB/s
        bus_gb_s = mean.bus_bytes / mean.transfer_ns
    return replace(
        row,
        transfer_ms=mean.transfer_ns / 1e6,
        wait_ms=(mean.ns - mean.transfer_ns) / 1e6,
        bus_gb_s=bus_gb_s,
    )


def _sum_by_kind(
    calls: Calls,
    keep: Flags,
    transfer_ns: Integers,
    labels: Mapping[ProcessGroup, str],
    group_size: int | None,
) -> dict[_Key, _Sums]:
    """Add up one rank's calls by what rows tell apart.

    Args:
        calls: the rank's collectives.
        keep: bool [c], the calls that count.
        transfer_ns: int64 [c], the part of each call in which no rank waits; -1: not matched.
        labels: the dimension of each process group.
        group_size: of collectives whose trace does not say; None if nothing shows it.
    """
    times_of_kind = _sum_times(calls, keep, transfer_ns)
    sizes = Counter((what.kind, phase) for what, phase in times_of_kind)
    found: dict[_Key, _Sums] = {}
    for (what, phase), times in times_of_kind.items():
        ranks = what.group_size or group_size
        num_bytes = what.num_bytes or 0
        on_bus = bus_bytes(what.kind, num_bytes, ranks) if num_bytes and ranks else 0.0
        sums = _Sums(
            number=times.number,
            ns=times.ns,
            exposed_ns=times.exposed_ns,
            transfer_ns=times.transfer_ns,
            unmatched=times.unmatched,
            bus_bytes=times.number * on_bus,
            num_bytes=times.number * num_bytes,
        )
        key = _make_key(what, phase, labels[what.group], ranks, sizes[what.kind, phase])
        if key in found:
            sums = _add(found[key], sums)
        found[key] = sums
    return found


class _Times(NamedTuple):
    """Sums over one rank's equal calls in one phase; fields as in _Sums."""

    number: float
    ns: float
    exposed_ns: float
    transfer_ns: float
    unmatched: float


def _sum_times(calls: Calls, keep: Flags, transfer_ns: Integers) -> dict[tuple[What, str], _Times]:
    """Add up the times of one rank's equal calls in one phase.

    Args:
        calls: the rank's collectives.
        keep: bool [c], the calls that count.
        transfer_ns: int64 [c], the part of each call in which no rank waits; -1: not matched.
    """
    kept = np.flatnonzero(keep)
    kinds: dict[tuple[What, str], int] = {}
    numbers = []
    for row in kept.tolist():
        kind = (calls.whats[row], calls.phase[row])
        number = kinds.setdefault(kind, len(kinds))
        numbers.append(number)
    of_kind = np.array(numbers, np.int64)
    columns = (  # in the order of _Times
        keep,
        calls.end_ns - calls.start_ns,
        calls.exposed_ns,
        np.maximum(transfer_ns, 0),
        transfer_ns < 0,
    )
    table = [np.bincount(of_kind, column[kept], len(kinds)).tolist() for column in columns]
    return {kind: _Times(*sums) for kind, sums in zip(kinds, zip(*table))}


def _make_key(what: What, phase: str, label: str, ranks: int | None, sizes: int) -> _Key:
    """Make the key of the row to which a call belongs.

    Args:
        what: the call.
        phase: in which it is made.
        label: the dimension of its group.
        ranks: how many take part; None if unknown.
        sizes: how many sizes calls of the kind have in the phase; one row holds all of them where they are many.
    """
    num_bytes = what.num_bytes
    if num_bytes is not None and sizes > MAX_SIZES:
        num_bytes = MANY
    return _Key(
        kind=what.kind,
        group=label,
        algorithm=what.algorithm,
        phase=phase,
        group_size=ranks,
        num_bytes=num_bytes,
        dtype=what.dtype,
    )


def _add(one: _Sums, other: _Sums) -> _Sums:
    """Add two sums field by field."""
    names = [field.name for field in fields(_Sums)]
    return _Sums(**{name: getattr(one, name) + getattr(other, name) for name in names})
