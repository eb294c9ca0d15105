"""Which collective of one rank is which of another: the k-th of a process group is the same on all its members."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers, Numbers
from megatron_lite.analysis.ranks.calls import END_TOGETHER, POINT_TO_POINT, Calls
from megatron_lite.analysis.trace.columns import ProcessGroup
from megatron_lite.units import significant

MAX_APART = 64  # collectives by which traces of two ranks may begin apart, beyond what they differ in number
MAX_NAMED = 4
MAX_COALESCED = 2**20  # collectives of one sequence number
MIN_ALIKE = 0.9  # share of pairs of the same kind and size; below it the order is no guide


@dataclass(frozen=True)
class Group:
    """One process group's collectives: K of them on G ranks."""

    members: Integers  # int64 [G], index of the rank in the given order
    call: Integers  # int64 [K, G], index into that rank's calls; every one is there
    is_pair: bool = False  # sends of one rank and what another receives of them


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
            groups.append(Group(np.array(list(members)), call, is_pair=True))
    notes = []
    for process_group, by_rank in rows_of_group.items():
        members = _as_arrays(by_rank)
        if len(members) < 2:
            continue
        if _has_too_many(members, ranks):
            why = "more ranks use the name than the group has members"
        else:
            call = _match_by_sequence(members, ranks)
            if call is None:
                call = _match_by_order(members, ranks, slots, clock_ns)
            if call is not None and len(call):
                groups.append(Group(np.array(list(members)), call))
                continue
            why = "the ranks' traces hold different collectives"
        notes.append(f"{_describe(process_group)}: {why}, so starts are not compared")
    return groups, notes


RowsByRank = dict[int, list[int]]  # by index of the rank in the given order, rows of that rank's calls


def _sort_calls(ranks: Sequence[Calls]) -> tuple[dict[ProcessGroup, RowsByRank], dict[Any, RowsByRank]]:
    """Sort calls by process group, and sends and receives by their two ends as well."""
    rows_of_group: dict[ProcessGroup, RowsByRank] = defaultdict(lambda: defaultdict(list))
    rows_of_pair: dict[Any, RowsByRank] = defaultdict(lambda: defaultdict(list))
    for at, calls in enumerate(ranks):
        for row, what in enumerate(calls.whats):
            # ranks number their groups differently: known members tell which is which
            group = replace(what.group, name="") if what.group.ranks else what.group
            if what.kind not in POINT_TO_POINT:
                rows_of_group[group][at].append(row)
            for kind, peer in what.transfers:
                ends = (calls.rank, peer) if kind == "send" else (peer, calls.rank)
                rows_of_pair[ends, group][at].append(row)
    return rows_of_group, rows_of_pair


def _as_arrays(by_rank: RowsByRank) -> dict[int, Integers]:
    """Make an array of each rank's rows."""
    return {at: np.array(rows, np.int64) for at, rows in by_rank.items()}


def _has_too_many(members: Mapping[int, Integers], ranks: Sequence[Calls]) -> bool:
    """Tell whether more ranks use a group than it has members: then several groups have the same name."""
    sizes = {ranks[at].whats[rows[0]].group_size for at, rows in members.items()}
    return any(size is not None and size < len(members) for size in sizes)


def _describe(group: ProcessGroup) -> str:
    """Name a process group by its ranks, its name or its dimension, whichever is known first."""
    if group.ranks:
        named = ", ".join(map(str, group.ranks[:MAX_NAMED]))
        more = len(group.ranks) - MAX_NAMED
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
        order = np.argsort(keys[at], kind="stable")
        places = np.searchsorted(keys[at][order], shared)
        column = rows[order[places]]
        columns.append(column)
        kinds.append([ranks[at].whats[row].kind for row in column.tolist()])
    alike = [of_all for of_all in zip(*kinds) if len(set(of_all)) == 1]
    if len(alike) < MIN_ALIKE * len(shared):
        return None
    return np.stack(columns, axis=1)


def _number_calls(sequence: Integers) -> Integers:
    """int64 [k]: a number of each call that no other call has, from its sequence number.

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
    """One rank's collectives of a group, n of them, in order."""

    kind: Integers  # [n], a code of kind and size
    slot: Integers  # [n], the shared step; -1: none
    end_ns: Integers | None  # [n], on the common clock; None without one

    def __len__(self) -> int:
        return len(self.kind)


def _match_by_order(
    members: Mapping[int, Integers],  # by index of the rank, rows of that rank's calls
    ranks: Sequence[Calls],
    slots: Sequence[Integers],
    clock_ns: Sequence[int | None],
) -> Integers | None:
    """Match calls by their order, each rank's laid over the longest one.

    Returns:
        int64 [K, G], rows of each rank's calls; None if an order does not fit anywhere.
    """
    codes: dict[Any, int] = {}
    orders = {}
    for at, rows in members.items():
        clock = clock_ns[at]
        orders[at] = _Order(
            kind=_number_kinds(ranks[at], rows, codes),
            slot=slots[at][rows],
            end_ns=None if clock is None else ranks[at].end_ns[rows] + clock,
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
    rows: Integers,  # [n]
    codes: dict[Any, int],  # grows by what it does not have
) -> Integers:
    """int64 [n]: a code of each call's kind and size."""
    numbers = []
    for row in rows.tolist():
        what = calls.whats[row]
        # what is sent and what is received are one, and may be part of a larger exchange
        kind = None if what.kind in POINT_TO_POINT else (what.kind, what.num_bytes)
        numbers.append(codes.setdefault(kind, len(codes)))
    return np.array(numbers)


def _overlap(one: _Order, other: _Order, shift: int) -> tuple[slice, slice]:
    """The part of each that lies over the other where `other` begins at position `shift` of `one`."""
    first = max(shift, 0)
    last = min(shift + len(other), len(one))
    return slice(first, last), slice(first - shift, last - shift)


def _find_shift(one: _Order, other: _Order) -> int | None:
    """Find the position in `one` at which `other` begins, so that kinds and sizes agree.

    Of equally good ones it is that where the steps agree best, then that where ends lie closest. None if no position
    fits.
    """
    reach = MAX_APART + abs(len(one) - len(other))
    earliest = max(-reach, 1 - len(other))
    latest = min(reach, len(one) - 1)
    scores = {}
    for shift in range(earliest, latest + 1):
        score = _score_shift(one, other, shift)
        if score is not None:
            scores[shift] = score
    return max(scores, key=scores.__getitem__, default=None)


def _score_shift(one: _Order, other: _Order, shift: int) -> tuple[int, int, float, int] | None:
    """How well `other` fits at a position of `one`: the larger, the better; None where it does not."""
    here, there = _overlap(one, other, shift)
    alike = int((one.kind[here] == other.kind[there]).sum())
    if alike < MIN_ALIKE * (here.stop - here.start):
        return None
    slot = one.slot[here]
    same_step = (slot == other.slot[there]) & (slot >= 0)
    apart_ns = 0.0
    if one.end_ns is not None and other.end_ns is not None:
        apart_ns = float(np.median(np.abs(one.end_ns[here] - other.end_ns[there])))
    return alike, int(same_step.sum()), -apart_ns, -abs(shift)


# --- are the ranks' clocks one? Ends of collectives coincide, so that they show by how much each clock is off

OFF_NS = 1_000_000  # a clock that is off by less is left as it is: collectives do not end closer than that everywhere
NOISE = 3.0  # times the spread of its ends that a correction must be


@dataclass(frozen=True)
class Clocks:
    """What to add to a rank's own time to have one clock."""

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
    bases = [base for base in base_ns if base is not None]
    named = len(bases) == len(base_ns)
    start = tuple(base - min(bases) for base in bases) if named else (0,) * len(base_ns)
    if len(ranks) < 2 or not any(len(group.call) for group in groups):
        return Clocks(start, None)
    if named and hosts[0] and len(set(hosts)) == 1:
        return Clocks(start, True)
    offsets, spreads = _measure_offsets(ranks, groups, start)
    if np.isnan(offsets).all():
        return Clocks(start, True if named else None)
    off_ns = np.nan_to_num(_share_offsets(offsets, hosts))
    note = "the traces name no common clock: they are aligned at the ends of collectives"
    wrong = np.ones(len(off_ns), bool)
    if named:
        beyond_noise = np.abs(off_ns) > NOISE * np.nan_to_num(spreads)
        wrong = beyond_noise & (np.abs(off_ns) > OFF_NS)
        note = _describe_corrections(off_ns, wrong, hosts)
    if not wrong.any():
        if np.abs(off_ns).max() <= OFF_NS:
            return Clocks(start, True)
        doubt = "the ranks' collectives do not end together, so their clocks may differ: waits are uncertain"
        return Clocks(start, False, (doubt,))
    corrected = []
    for start_ns, by_ns, is_wrong in zip(start, off_ns, wrong):
        corrected.append(int(start_ns - by_ns) if is_wrong else start_ns)
    return Clocks(tuple(corrected), True, (note,))


def _share_offsets(offsets: Numbers, hosts: Sequence[str]) -> Numbers:
    """float64 [R ranks]: the offsets, of ranks of one host their median, since they share a clock."""
    shared = offsets.copy()
    # a rank whose host is unknown stands for itself
    for host in set(hosts) - {""}:
        here = np.array([name == host for name in hosts])
        if not np.isnan(offsets[here]).all():
            shared[here] = np.nanmedian(offsets[here])
    return shared


def _describe_corrections(
    off_ns: Numbers,  # [R ranks], by how much each clock is off
    wrong: Flags,  # [R], which of them are corrected
    hosts: Sequence[str],  # by which they are named; "" where unknown
) -> str:
    """Write by how much clocks are corrected."""
    by_name = {hosts[at] or f"rank {at}": off_ns[at] for at in np.flatnonzero(wrong).tolist()}
    named = list(by_name.items())[:MAX_NAMED]
    corrections = ", ".join(f"{name} by {significant(off / 1e6, signed=True)} ms" for name, off in named)
    if len(by_name) > MAX_NAMED:
        corrections += f" and {len(by_name) - MAX_NAMED} more"
    return f"clocks differ, and were aligned at the ends of collectives: {corrections}"


def _measure_offsets(
    ranks: Sequence[Calls],
    groups: list[Group],
    start: Sequence[int],  # what to add to each rank's own time, ns
) -> tuple[Numbers, Numbers]:
    """Measure by how much each rank's collectives end later than the median rank's.

    Returns:
        [R ranks] each, ns: the median of that difference, and how far it scatters around it; NaN where none was seen.
    """
    seen: list[list[Numbers]] = [[] for _ in ranks]
    for group in groups:
        members = group.members.tolist()
        reference = ranks[members[0]]
        kinds = [reference.whats[row].kind for row in group.call[:, 0].tolist()]
        together = np.isin(kinds, END_TOGETHER)
        columns = [ranks[at].end_ns[calls] + start[at] for at, calls in zip(members, group.call.T)]
        ends = np.stack(columns, axis=1)[together]
        if len(ends):
            apart = ends - np.median(ends, axis=1, keepdims=True)
            for at, of_rank in zip(members, apart.T):
                seen[at].append(of_rank)
    offsets = []
    spreads = []
    for parts in seen:
        values = np.concatenate(parts) if parts else np.array([np.nan])
        middle = np.median(values)
        offsets.append(middle)
        spreads.append(np.median(np.abs(values - middle)))
    return np.array(offsets), np.array(spreads)
