"""Matching of one rank's collectives with another's: the k-th of a process group is the same on all its members."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers, Numbers
from megatron_lite.analysis.ranks.calls import END_TOGETHER, POINT_TO_POINT, Calls
from megatron_lite.analysis.ranks.process_groups import drop_name
from megatron_lite.analysis.trace.columns import ProcessGroup
from megatron_lite.units import significant

MAX_OFFSET = 64  # collectives by which traces of two ranks may begin apart, beyond what they differ in number
MAX_IN_A_NOTE = 4
MAX_COALESCED = 2**20  # collectives of one sequence number
MIN_ALIKE = 0.9  # share of pairs of the same kind and size; below it the order is no guide


@dataclass(frozen=True)
class Group:
    """A process group's collectives: K of them on G ranks."""

    members: Integers  # int64 [G], index of the rank in the given order
    call: Integers  # int64 [K, G], index into that rank's calls; every one is there
    is_pair: bool = False  # sends of one rank and what another receives of them

    def list_members(self) -> list[tuple[int, Integers]]:
        """List each member with int64 [K], its calls."""
        return list(zip(self.members.tolist(), self.call.T))


def match(
    ranks: Sequence[Calls], slots: Sequence[Integers], clock_ns: Sequence[int | None]
) -> tuple[list[Group], list[str]]:
    """Match the collectives of ranks with each other.

    Args:
        ranks: the collectives of each rank.
        slots: by rank, int [c], the step of each call among those that all ranks have; -1: none.
        clock_ns: when each rank's clock begins, None if unknown.

    Returns:
        Groups of two ranks or more, and a sentence on each one that could not be matched.
    """
    rows_of_group, rows_of_pair = _sort_calls(ranks)
    groups = []
    for by_rank in rows_of_pair.values():
        members = _as_arrays(by_rank)
        if len(members) != 2:
            continue
        call = _match_by_order(members, ranks, slots, clock_ns)
        if call is not None and len(call):
            both = np.array(list(members))
            groups.append(Group(both, call, is_pair=True))
    notes = []
    for process_group, by_rank in rows_of_group.items():
        members = _as_arrays(by_rank)
        if len(members) < 2:
            continue
        if _has_too_many(members, ranks):
            notes.append(_describe_unmatched(process_group, "more ranks use the name than the group has members"))
            continue
        call = _match_by_sequence(members, ranks)
        if call is None:
            call = _match_by_order(members, ranks, slots, clock_ns)
        if call is None or not len(call):
            notes.append(_describe_unmatched(process_group, "the ranks' traces hold different collectives"))
            continue
        groups.append(Group(np.array(list(members)), call))
    return groups, notes


def _describe_unmatched(group: ProcessGroup, why: str) -> str:
    """Write that a group's collectives are not matched, and why."""
    return f"{_describe(group)}: {why}, so starts are not compared"


RowsByRank = dict[int, list[int]]  # by index of the rank in the given order, rows of that rank's calls


def _sort_calls(ranks: Sequence[Calls]) -> tuple[dict[ProcessGroup, RowsByRank], dict[Any, RowsByRank]]:
    """Sort calls by process group, and sends and receives by their two ends as well."""
    rows_of_group: dict[ProcessGroup, RowsByRank] = defaultdict(_make_rows)
    rows_of_pair: dict[Any, RowsByRank] = defaultdict(_make_rows)
    for at, calls in enumerate(ranks):
        for row, what in enumerate(calls.whats):
            group = drop_name(what.group)
            if what.kind not in POINT_TO_POINT:
                rows_of_group[group][at].append(row)
            for kind, peer in what.transfers:
                # sender and receiver
                ends = (calls.rank, peer) if kind == "send" else (peer, calls.rank)
                rows_of_pair[ends, group][at].append(row)
    return rows_of_group, rows_of_pair


def _make_rows() -> RowsByRank:
    """An empty list for each rank that is asked for."""
    return defaultdict(list)


def _as_arrays(by_rank: RowsByRank) -> dict[int, Integers]:
    """Make an array of each rank's rows."""
    return {at: np.array(rows, np.int64) for at, rows in by_rank.items()}


def _has_too_many(members: Mapping[int, Integers], ranks: Sequence[Calls]) -> bool:
    """Tell whether more ranks use a group than it has members: then several groups have the same name."""
    for at, rows in members.items():
        size = ranks[at].whats[rows[0]].group_size
        if size is not None and size < len(members):
            return True
    return False


def _describe(group: ProcessGroup) -> str:
    """Name a process group by its ranks, its name or its dimension, whichever is known first."""
    if group.ranks:
        named = ", ".join(map(str, group.ranks[:MAX_IN_A_NOTE]))
        more = len(group.ranks) - MAX_IN_A_NOTE
        if more > 0:
            named += f" and {more} more"
        return f"collectives of ranks {named}"
    if group.name:
        return f"process group {group.name!r}"
    if group.description:
        return f"{group.description} parallel collectives"
    return "collectives"


def _match_by_sequence(members: Mapping[int, Integers], ranks: Sequence[Calls]) -> Integers | None:
    """Match calls by the sequence numbers that the file gives.

    Returns:
        int64 [K, G], rows of each rank's calls; None if any number is missing, or kinds do not agree.
    """
    keys = {}
    for at, rows in members.items():
        numbers = ranks[at].sequence[rows]
        if numbers.min() < 0:
            return None
        keys[at] = _number_calls(numbers)
    shared = reduce(np.intersect1d, keys.values())
    if not len(shared):
        return None
    columns = []
    kinds = []
    for at, rows in members.items():
        own = keys[at]
        order = np.argsort(own, kind="stable")
        places = np.searchsorted(own[order], shared)
        column = rows[order[places]]
        columns.append(column)
        whats = ranks[at].whats
        kinds.append([whats[row].kind for row in column.tolist()])
    alike = 0
    for of_all in zip(*kinds):
        if len(set(of_all)) == 1:
            alike += 1
    if alike < MIN_ALIKE * len(shared):
        return None
    return np.stack(columns, axis=1)


def _number_calls(sequence: Integers) -> Integers:
    """Number each call as no other call is numbered, by its sequence number; int64 [k].

    Coalesced ones share a sequence number, in the same order everywhere: 7, 7, 8 are told apart by 0, 1, 0.
    """
    order = np.argsort(sequence, kind="stable")
    in_order = sequence[order]
    first = np.searchsorted(in_order, in_order, side="left")
    ordinal = np.empty(len(sequence), np.int64)
    ordinal[order] = np.arange(len(sequence)) - first
    return sequence * MAX_COALESCED + ordinal


@dataclass(frozen=True)
class _Order:
    """A rank's collectives of a group, n of them, in order."""

    kind: Integers  # [n], a code of kind and size
    slot: Integers  # [n], the shared step; -1: none
    end_ns: Integers | None  # [n], on the common clock; None without one

    def __len__(self) -> int:
        return len(self.kind)


def _match_by_order(
    members: Mapping[int, Integers],
    ranks: Sequence[Calls],
    slots: Sequence[Integers],
    clock_ns: Sequence[int | None],
) -> Integers | None:
    """Match calls by their order, each rank's laid over the longest one.

    Args:
        members: by index of the rank, rows of that rank's calls.
        ranks: the collectives of each rank.
        slots: by rank, int [c], the step of each call among those that all ranks have; -1: none.
        clock_ns: when each rank's clock begins; None if unknown.

    Returns:
        int64 [K, G], rows of each rank's calls; None if an order does not fit anywhere.
    """
    codes: dict[Any, int] = {}
    orders = {}
    for at, rows in members.items():
        end_ns = None
        base_ns = clock_ns[at]
        if base_ns is not None:
            end_ns = ranks[at].end_ns[rows] + base_ns
        orders[at] = _Order(
            kind=_number_kinds(ranks[at], rows, codes),
            slot=slots[at][rows],
            end_ns=end_ns,
        )
    longest = max(orders.values(), key=len)
    columns = []
    for at, rows in members.items():
        shift = _find_shift(longest, orders[at])
        if shift is None:
            return None
        here, there = _overlap(longest, orders[at], shift)
        column = np.full(len(longest), -1, np.int64)
        column[here] = rows[there]
        columns.append(column)
    call = np.stack(columns, axis=1)
    on_all_ranks = (call >= 0).all(axis=1)
    return call[on_all_ranks]


def _number_kinds(
    calls: Calls,
    rows: Integers,
    codes: dict[Any, int],
) -> Integers:
    """Number the kind and size of calls.

    Args:
        calls: the collectives of a rank.
        rows: [n], those to number.
        codes: numbers by kind and size; grows by what it does not have.

    Returns:
        int64 [n], a code of each call.
    """
    numbers = []
    for row in rows.tolist():
        what = calls.whats[row]
        # what is sent and what is received are one, and may be part of a larger exchange
        kind = None
        if what.kind not in POINT_TO_POINT:
            kind = (what.kind, what.num_bytes)
        number = codes.setdefault(kind, len(codes))
        numbers.append(number)
    return np.array(numbers)


def _overlap(one: _Order, other: _Order, shift: int) -> tuple[slice, slice]:
    """Find the part of each that lies over the other where `other` begins at position `shift` of `one`."""
    first = max(shift, 0)
    last = min(shift + len(other), len(one))
    here = slice(first, last)
    there = slice(first - shift, last - shift)
    return here, there


def _find_shift(one: _Order, other: _Order) -> int | None:
    """Find the position in `one` at which `other` begins, so that kinds and sizes agree.

    Of equally good ones it is that where the steps agree best, then that where ends lie closest. None if no position
    fits.
    """
    reach = MAX_OFFSET + abs(len(one) - len(other))
    earliest = max(-reach, 1 - len(other))
    latest = min(reach, len(one) - 1)
    scores = {}
    for shift in range(earliest, latest + 1):
        score = _score_shift(one, other, shift)
        if score is not None:
            scores[shift] = score
    return max(scores, key=scores.__getitem__, default=None)


def _score_shift(one: _Order, other: _Order, shift: int) -> tuple[int, int, float, int] | None:
    """Score how well `other` fits at a position of `one`: the larger, the better; None where it does not."""
    here, there = _overlap(one, other, shift)
    is_alike = one.kind[here] == other.kind[there]
    alike = int(is_alike.sum())
    if alike < MIN_ALIKE * len(is_alike):
        return None
    slot = one.slot[here]
    in_same_step = (slot == other.slot[there]) & (slot >= 0)
    apart_ns = 0.0
    if one.end_ns is not None and other.end_ns is not None:
        distances_ns = np.abs(one.end_ns[here] - other.end_ns[there])
        apart_ns = float(np.median(distances_ns))
    same_step = int(in_same_step.sum())
    return alike, same_step, -apart_ns, -abs(shift)


# --- are the ranks' clocks one? Ends of collectives coincide, so that they show by how much each clock is off

OFF_NS = 1_000_000  # a clock that is off by less is left as it is: collectives do not end closer than that everywhere
NOISE = 3.0  # times the spread of its ends that a correction must be


@dataclass(frozen=True)
class Clocks:
    """Corrections to each rank's own time that make one clock of all."""

    start_ns: tuple[int, ...]  # by rank in the given order
    aligned: bool | None  # None: nothing to see it by
    notes: tuple[str, ...] = ()


def align_clocks(
    ranks: Sequence[Calls],
    groups: list[Group],
    base_ns: Sequence[int | None],
    hosts: Sequence[str],
) -> Clocks:
    """Bring the ranks' clocks to one, by the clock that the files name or by the ends of collectives.

    Args:
        ranks: the collectives of each rank.
        groups: which of them belong together.
        base_ns: each trace's own first moment on the clock that its file names; None where it names none.
        hosts: each rank's host; "" where unknown.
    """
    named = None not in base_ns
    start = _compute_starts(base_ns)
    matched = sum(len(group.call) for group in groups)
    if len(ranks) < 2 or not matched:
        return Clocks(start, None)
    is_one_host = hosts[0] != "" and len(set(hosts)) == 1
    if named and is_one_host:
        return Clocks(start, True)
    offsets, spreads = measure_offsets(ranks, groups, start)
    if np.isnan(offsets).all():
        return Clocks(start, True if named else None)
    off_ns = np.nan_to_num(_share_offsets(offsets, hosts))
    note = "the traces name no common clock: they are aligned at the ends of collectives"
    wrong = np.ones(len(off_ns), bool)
    if named:
        apart_ns = np.abs(off_ns)
        is_beyond_noise = apart_ns > NOISE * np.nan_to_num(spreads)
        wrong = is_beyond_noise & (apart_ns > OFF_NS)
        note = _describe_corrections(off_ns, wrong, hosts)
    if wrong.any():
        corrected = []
        for start_ns, by_ns, is_wrong in zip(start, off_ns, wrong):
            corrected.append(int(start_ns - by_ns) if is_wrong else start_ns)
        return Clocks(tuple(corrected), True, (note,))
    if np.abs(off_ns).max() <= OFF_NS:
        return Clocks(start, True)
    doubt = "the ranks' collectives do not end together, so their clocks may differ: waits are uncertain"
    return Clocks(start, False, (doubt,))


def _compute_starts(base_ns: Sequence[int | None]) -> tuple[int, ...]:
    """When each trace begins, ns since the first of them; 0 where one of them names no clock."""
    bases = [base for base in base_ns if base is not None]
    if len(bases) < len(base_ns):
        return (0,) * len(base_ns)
    first_ns = min(bases)
    return tuple(base - first_ns for base in bases)


def _share_offsets(offsets: Numbers, hosts: Sequence[str]) -> Numbers:
    """Replace offsets by the median of each host, whose ranks share a clock; float64 [R ranks]."""
    shared = offsets.copy()
    # a rank whose host is unknown stands for itself
    for host in set(hosts) - {""}:
        here = np.array([name == host for name in hosts])
        if not np.isnan(offsets[here]).all():
            shared[here] = np.nanmedian(offsets[here])
    return shared


def _describe_corrections(off_ns: Numbers, wrong: Flags, hosts: Sequence[str]) -> str:
    """Write by how much clocks are corrected.

    Args:
        off_ns: [R ranks], by how much each clock is off.
        wrong: [R], which of them are corrected.
        hosts: by which they are named; "" where unknown.
    """
    by_name = {}
    for at in np.flatnonzero(wrong).tolist():
        name = hosts[at] or f"rank {at}"
        by_name[name] = off_ns[at] / 1e6
    corrections = [f"{name} by {significant(off_ms, signed=True)} ms" for name, off_ms in by_name.items()]
    named = ", ".join(corrections[:MAX_IN_A_NOTE])
    more = len(corrections) - MAX_IN_A_NOTE
    if more > 0:
        named += f" and {more} more"
    return f"clocks differ, and were aligned at the ends of collectives: {named}"


def measure_offsets(
    ranks: Sequence[Calls],
    groups: list[Group],
    start: Sequence[int],
) -> tuple[Numbers, Numbers]:
    """Measure by how much each rank's collectives end later than the median rank's.

    Args:
        ranks: the collectives of each rank.
        groups: which of them belong together.
        start: what to add to each rank's own time, ns.

    Returns:
        [R ranks] each, ns: the median of that difference, and how far it scatters around it; NaN where none was seen.
    """
    seen: list[list[Numbers]] = [[] for _ in ranks]
    for group in groups:
        members = group.list_members()
        columns = []
        for at, calls in members:
            own_ns = ranks[at].end_ns[calls]
            columns.append(own_ns + start[at])
        first, calls = members[0]
        whats = ranks[first].whats
        kinds = [whats[row].kind for row in calls.tolist()]
        end_together = np.isin(kinds, END_TOGETHER)
        ends_ns = np.stack(columns, axis=1)[end_together]
        if not len(ends_ns):
            continue
        apart_ns = ends_ns - np.median(ends_ns, axis=1, keepdims=True)
        for (at, _), of_rank in zip(members, apart_ns.T):
            seen[at].append(of_rank)
    offsets = []
    spreads = []
    unknown = np.array([np.nan])
    for parts in seen:
        values = np.concatenate(parts) if parts else unknown
        middle = np.median(values)
        distances = np.abs(values - middle)
        offsets.append(middle)
        spreads.append(np.median(distances))
    return np.array(offsets), np.array(spreads)
