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
        call = _match_by_order(members, ranks, slots, clock_ns) if len(members) == 2 else None
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
        several = f" and {len(group.ranks) - MAX_NAMED} more" if len(group.ranks) > MAX_NAMED else ""
        return f"collectives of ranks {', '.join(map(str, group.ranks[:MAX_NAMED]))}{several}"
    if group.name:
        return f"process group {group.name!r}"
    return f"{group.description} parallel collectives" if group.description else "collectives"


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
        # coalesced ones share a number, in the same order everywhere: 7, 7, 8 are told apart by 0, 1, 0
        order = np.argsort(numbers, kind="stable")
        ordinal = np.empty(len(numbers), np.int64)
        ordinal[order] = np.arange(len(numbers)) - np.searchsorted(numbers[order], numbers[order], side="left")
        keys[at] = numbers * 2**20 + ordinal
    shared = reduce(np.intersect1d, keys.values())
    if not len(shared):
        return None
    columns = []
    for at, rows in members.items():
        order = np.argsort(keys[at], kind="stable")
        columns.append(rows[order[np.searchsorted(keys[at][order], shared)]])
    kinds = [[ranks[at].whats[i].kind for i in column.tolist()] for at, column in zip(members, columns)]
    alike = sum(len(set(of_all)) == 1 for of_all in zip(*kinds))
    return np.stack(columns, axis=1) if alike >= MIN_ALIKE * len(shared) else None


def _match_by_order(
    members: Mapping[int, Integers], ranks: Sequence[Calls], slots: Sequence[Integers], clock_ns: Sequence[int | None]
) -> Integers | None:
    """Match calls by their order, each rank's laid over the longest one.

    Args:
        members: by index of the rank, rows of that rank's calls.
        ranks, slots, clock_ns: see match.

    Returns:
        int64 [K, G], rows of each rank's calls; None if an order does not fit anywhere.
    """
    longest = max(members, key=lambda at: len(members[at]))
    codes: dict[Any, int] = {}
    orders = {}
    for at, rows in members.items():
        whats = [ranks[at].whats[i] for i in rows]
        # what is sent and what is received are one, and may be part of a larger exchange
        kinds = [None if one.kind in POINT_TO_POINT else (one.kind, one.num_bytes) for one in whats]
        what = np.array([codes.setdefault(kind, len(codes)) for kind in kinds])
        clock = clock_ns[at]
        orders[at] = (what, slots[at][rows], None if clock is None else ranks[at].end_ns[rows] + clock)
    columns = []
    for at, rows in members.items():
        shift = _find_shift(orders[longest], orders[at])
        if shift is None:
            return None
        column = np.full(len(members[longest]), -1, np.int64)
        first, last = max(shift, 0), min(shift + len(rows), len(column))
        column[first:last] = rows[first - shift : last - shift]
        columns.append(column)
    call = np.stack(columns, axis=1)
    return call[(call >= 0).all(axis=1)]


def _find_shift(one: tuple[Any, ...], other: tuple[Any, ...]) -> int | None:
    """Find the position in `one` at which `other` begins, so that kinds and sizes agree; of equally good ones that
    where the steps agree best, then that where ends lie closest. None if no position fits.

    one, other: by collective a code of kind and size, the step, the end on the common clock (None without one).
    """
    (mine, my_slot, my_end), (theirs, their_slot, their_end) = one, other
    reach = MAX_APART + abs(len(mine) - len(theirs))
    best, best_shift = None, None
    for shift in range(max(-reach, 1 - len(theirs)), min(reach, len(mine) - 1) + 1):
        a = slice(max(shift, 0), min(shift + len(theirs), len(mine)))
        b = slice(a.start - shift, a.stop - shift)
        alike = int((mine[a] == theirs[b]).sum())
        if alike < MIN_ALIKE * (a.stop - a.start):
            continue
        same_step = int(((my_slot[a] == their_slot[b]) & (my_slot[a] >= 0)).sum())
        clocks = my_end is not None and their_end is not None
        apart = float(np.median(np.abs(my_end[a] - their_end[b]))) if clocks else 0.0
        score = (alike, same_step, -apart, -abs(shift))
        if best is None or score > best:
            best, best_shift = score, shift
    return best_shift


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
    ranks: Sequence[Calls], groups: list[Group], base_ns: Sequence[int | None], hosts: Sequence[str]
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
    # ranks of one host share a clock; a rank whose host is unknown stands for itself
    for host in set(hosts) - {""}:
        here = np.array([name == host for name in hosts])
        if not np.isnan(offsets[here]).all():
            offsets[here] = np.nanmedian(offsets[here])
    off = np.nan_to_num(offsets)
    note = "the traces name no common clock: they are aligned at the ends of collectives"
    wrong = np.ones(len(off), bool)
    if named:
        wrong = (np.abs(off) > OFF_NS) & (np.abs(off) > NOISE * np.nan_to_num(spreads))
        note = _describe_corrections(off, wrong, hosts)
    if not wrong.any():
        aligned = bool(np.abs(off).max() <= OFF_NS)
        doubt = "the ranks' collectives do not end together, so their clocks may differ: waits are uncertain"
        return Clocks(start, aligned, () if aligned else (doubt,))
    corrected = tuple(int(at - by) if bad else at for at, by, bad in zip(start, off, wrong))
    return Clocks(corrected, True, (note,))


def _describe_corrections(off_ns: Numbers, wrong: Flags, hosts: Sequence[str]) -> str:
    """Write by how much clocks are corrected.

    Args:
        off_ns: [R ranks], by how much each clock is off.
        wrong: bool [R], which of them are corrected.
        hosts: each rank's host, by which it is named; "" where unknown.
    """
    by_name = {hosts[at] or f"rank {at}": off_ns[at] for at in np.flatnonzero(wrong).tolist()}
    named = list(by_name.items())[:MAX_NAMED]
    corrections = ", ".join(f"{name} by {significant(off / 1e6, signed=True)} ms" for name, off in named)
    if len(by_name) > MAX_NAMED:
        corrections += f" and {len(by_name) - MAX_NAMED} more"
    return f"clocks differ, and were aligned at the ends of collectives: {corrections}"


def _measure_offsets(ranks: Sequence[Calls], groups: list[Group], start: Sequence[int]) -> tuple[Numbers, Numbers]:
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
        columns = list(zip(group.members.tolist(), group.call.T))
        reference = ranks[columns[0][0]]
        together = np.array([reference.whats[i].kind in END_TOGETHER for i in columns[0][1]], bool)
        ends = np.stack([ranks[at].end_ns[calls] + start[at] for at, calls in columns], axis=1)[together]
        if len(ends):
            apart = ends - np.median(ends, axis=1, keepdims=True)
            for column, (at, _) in enumerate(columns):
                seen[at].append(apart[:, column])
    joined = [np.concatenate(parts) if parts else np.array([np.nan]) for parts in seen]
    offsets = np.array([np.median(values) for values in joined])
    return offsets, np.array([np.median(np.abs(values - middle)) for values, middle in zip(joined, offsets)])
