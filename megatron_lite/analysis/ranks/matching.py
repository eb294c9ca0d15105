"""Which collective of one rank is which of another: the k-th of a process group is the same on all its members."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from megatron_lite.analysis.intervals import Integers, Numbers
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
    """(groups of two ranks or more, sentences on what could not be matched).

    slots: by rank, int [c], the step of each call among those that all ranks have; -1: none. clock_ns: when each rank's
    clock begins, None if unknown.
    """
    groups, notes = [], []
    found: dict[ProcessGroup, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    pairs: dict[Any, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for at, calls in enumerate(ranks):
        for i, what in enumerate(calls.whats):
            # ranks number their groups differently: known members tell which is which
            group = replace(what.group, name="") if what.group.ranks else what.group
            if what.kind not in POINT_TO_POINT:
                found[group][at].append(i)
            for kind, peer in what.transfers:
                ends = (calls.rank, peer) if kind == "send" else (peer, calls.rank)
                pairs[ends, group][at].append(i)
    for rows_of in pairs.values():
        members = {at: np.array(rows, np.int64) for at, rows in rows_of.items()}
        call = _match_by_order(members, ranks, slots, clock_ns) if len(members) == 2 else None
        if call is not None and len(call):
            groups.append(Group(np.array(list(members)), call, is_pair=True))
    for group, rows_of in found.items():
        members = {at: np.array(rows, np.int64) for at, rows in rows_of.items()}
        if len(members) < 2:
            continue
        sizes = {ranks[at].whats[rows[0]].group_size for at, rows in members.items()}
        label = _describe(group)
        if any(size is not None and size < len(members) for size in sizes):
            why = "more ranks use the name than the group has members"
        else:
            call = _match_by_sequence(members, ranks)
            call = _match_by_order(members, ranks, slots, clock_ns) if call is None else call
            if call is not None and len(call):
                groups.append(Group(np.array(list(members)), call))
                continue
            why = "the ranks' traces hold different collectives"
        notes.append(f"{label}: {why}, so starts are not compared")
    return groups, notes


def _describe(group: ProcessGroup) -> str:
    if group.ranks:
        several = f" and {len(group.ranks) - MAX_NAMED} more" if len(group.ranks) > MAX_NAMED else ""
        return f"collectives of ranks {', '.join(map(str, group.ranks[:MAX_NAMED]))}{several}"
    if group.name:
        return f"process group {group.name!r}"
    return f"{group.description} parallel collectives" if group.description else "collectives"


def _match_by_sequence(members: Mapping[int, Integers], ranks: Sequence[Calls]) -> Integers | None:
    """[K, G] by the sequence numbers that the file gives; None if any is missing, or kinds do not agree."""
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
    """[K, G]: every rank's order laid over the longest one's; None if one does not fit anywhere."""
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
    """Position in `one` at which `other` begins, so that kinds and sizes agree; of equally good ones that where the
    steps agree best, then that where ends lie closest. None if no position fits.

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
    """`base_ns`: each trace's own first moment on the clock that its file names; `hosts`: "" where unknown."""
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
    wrong = np.ones(len(off), bool)
    if named:
        wrong = (np.abs(off) > OFF_NS) & (np.abs(off) > NOISE * np.nan_to_num(spreads))
    if not wrong.any():
        aligned = bool(np.abs(off).max() <= OFF_NS)
        doubt = "the ranks' collectives do not end together, so their clocks may differ: waits are uncertain"
        return Clocks(start, aligned, () if aligned else (doubt,))
    note = "the traces name no common clock: they are aligned at the ends of collectives"
    if named:
        corrected = {hosts[at] or f"rank {at}": off[at] for at in np.flatnonzero(wrong).tolist()}
        told = ", ".join(
            f"{name} by {significant(by / 1e6, signed=True)} ms" for name, by in list(corrected.items())[:MAX_NAMED]
        )
        more = f" and {len(corrected) - MAX_NAMED} more" if len(corrected) > MAX_NAMED else ""
        note = f"clocks differ, and were aligned at the ends of collectives: {told}{more}"
    return Clocks(tuple(int(at - by) if bad else at for at, by, bad in zip(start, off, wrong)), True, (note,))


def _measure_offsets(ranks: Sequence[Calls], groups: list[Group], start: Sequence[int]) -> tuple[Numbers, Numbers]:
    """[R] each: median of a rank's ends against the median rank's, and how far they scatter around it; NaN: none seen."""
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
