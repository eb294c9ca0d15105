"""Which collective of one rank is which of another: the k-th of a process group is the same on all its members."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from megatron_lite.analysis.ranks.calls import END_TOGETHER, POINT_TO_POINT, Calls

FARTHEST = 64  # collectives by which traces of two ranks may begin apart, beyond what they differ in number
MIN_ALIKE = 0.9  # share of pairs of the same kind and size; below it the order is no guide


@dataclass(frozen=True)
class Group:
    """One process group's collectives: K of them on G ranks."""

    name: str
    members: np.ndarray  # int64 [G], index of the rank in the given order
    call: np.ndarray  # int64 [K, G], index into that rank's calls; every one is there


def match(
    ranks: Sequence[Calls], slots: Sequence[np.ndarray], clock_ns: Sequence[int | None]
) -> tuple[list[Group], list[str]]:
    """(groups of two ranks or more, sentences on what could not be matched).

    slots: by rank, int [c], the step of each call among those that all ranks have; -1: none. clock_ns: when each rank's
    clock begins, None if unknown.
    """
    groups, notes = [], []
    for name in dict.fromkeys(what.group for calls in ranks for what in calls.whats):
        members = {}
        for at, calls in enumerate(ranks):
            rows = [i for i, what in enumerate(calls.whats) if what.group == name and what.kind not in POINT_TO_POINT]
            if rows:
                members[at] = np.array(rows, np.int64)
        sizes = {ranks[at].whats[rows[0]].group_size for at, rows in members.items()}
        if len(members) < 2:
            continue
        label = f"process group {name!r}" if name else "collectives"
        if any(size is not None and size < len(members) for size in sizes):
            notes.append(
                f"{label}: more ranks use the name than the group has members, so that starts are not compared"
            )
            continue
        group = _match(name, members, ranks, slots, clock_ns)
        if group is None:
            notes.append(f"{label}: the ranks' traces hold different collectives, so that starts are not compared")
        else:
            groups.append(group)
    return groups, notes


def _match(name: str, members: dict[int, np.ndarray], ranks: Sequence[Calls], slots, clock_ns) -> Group | None:
    by_sequence = _by_sequence(members, ranks)
    if by_sequence is not None:
        return Group(name, np.array(list(members)), by_sequence)
    longest = max(members, key=lambda at: len(members[at]))
    columns = []
    for at, rows in members.items():
        shift = _shift(*(_Order.of(ranks[one], members[one], slots[one], clock_ns[one]) for one in (longest, at)))
        if shift is None:
            return None
        column = np.full(len(members[longest]), -1, np.int64)
        first, last = max(shift, 0), min(shift + len(rows), len(column))
        column[first:last] = rows[first - shift : last - shift]
        columns.append(column)
    call = np.stack(columns, axis=1)
    call = call[(call >= 0).all(axis=1)]
    return Group(name, np.array(list(members)), call) if len(call) else None


def _by_sequence(members: dict[int, np.ndarray], ranks: Sequence[Calls]) -> np.ndarray | None:
    """[K, G] by the sequence numbers that the file gives; None if any is missing."""
    numbers = {at: ranks[at].sequence[rows] for at, rows in members.items()}
    if any(of_rank.min() < 0 for of_rank in numbers.values()):
        return None
    # coalesced ones share a number, in the same order everywhere
    keys = {at: of_rank * 2**20 + _ordinal(of_rank) for at, of_rank in numbers.items()}
    shared = reduce(np.intersect1d, keys.values())
    if not len(shared):
        return None
    columns = []
    for at, rows in members.items():
        order = np.argsort(keys[at], kind="stable")
        columns.append(rows[order[np.searchsorted(keys[at][order], shared)]])
    call = np.stack(columns, axis=1)
    return call if _are_alike(call, [ranks[at] for at in members]) else None


def _ordinal(numbers: np.ndarray) -> np.ndarray:
    """How many equal ones stand before each: 7, 7, 8 -> 0, 1, 0."""
    order = np.argsort(numbers, kind="stable")
    first = np.searchsorted(numbers[order], numbers[order], side="left")
    ordinal = np.empty(len(numbers), np.int64)
    ordinal[order] = np.arange(len(numbers)) - first
    return ordinal


def _are_alike(call: np.ndarray, ranks: list[Calls]) -> bool:
    kinds = [[calls.whats[i].kind for i in column] for column, calls in zip(call.T.tolist(), ranks)]
    alike = sum(len(set(of_all)) == 1 for of_all in zip(*kinds))
    return alike >= MIN_ALIKE * len(call)


@dataclass(frozen=True)
class _Order:
    """One rank's collectives of a group, in order."""

    what: list[tuple[str, int | None]]  # kind and size
    slot: np.ndarray
    end_ns: np.ndarray | None  # on the common clock, if there is one

    @classmethod
    def of(cls, calls: Calls, rows: np.ndarray, slots: np.ndarray, clock_ns: int | None) -> "_Order":
        what = [(calls.whats[i].kind, calls.whats[i].num_bytes) for i in rows]
        return cls(what, slots[rows], None if clock_ns is None else calls.end_ns[rows] + clock_ns)


def _shift(one: _Order, other: _Order) -> int | None:
    """Position in `one` at which `other` begins, so that kinds and sizes agree; of equally good ones that where the
    steps agree best, then that where ends lie closest. None if no position fits."""
    codes: dict = {}
    mine, theirs = (np.array([codes.setdefault(what, len(codes)) for what in order.what]) for order in (one, other))
    reach = FARTHEST + abs(len(mine) - len(theirs))
    best, best_shift = None, None
    for shift in range(max(-reach, 1 - len(theirs)), min(reach, len(mine) - 1) + 1):
        a = slice(max(shift, 0), min(shift + len(theirs), len(mine)))
        b = slice(a.start - shift, a.stop - shift)
        alike = int((mine[a] == theirs[b]).sum())
        if alike < MIN_ALIKE * (a.stop - a.start):
            continue
        same_step = int(((one.slot[a] == other.slot[b]) & (one.slot[a] >= 0)).sum())
        clocks = one.end_ns is not None and other.end_ns is not None
        apart = float(np.median(np.abs(one.end_ns[a] - other.end_ns[b]))) if clocks else 0.0
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
    notes: tuple[str, ...]


def align_clocks(
    ranks: Sequence[Calls], groups: list[Group], base_ns: Sequence[int | None], hosts: Sequence[str]
) -> Clocks:
    """`base_ns`: each trace's own first moment on the clock that its file names; `hosts`: "" where unknown."""
    named = all(base is not None for base in base_ns)
    start = [base - min(base_ns) if named else 0 for base in base_ns]
    if len(ranks) < 2 or not any(len(group.call) for group in groups):
        return Clocks(tuple(start), None, ())
    if named and hosts[0] and len(set(hosts)) == 1:
        return Clocks(tuple(start), True, ())
    offsets, spreads = _offsets(ranks, groups, start)
    if np.isnan(offsets).all():
        return Clocks(tuple(start), None if not named else True, ())
    off = np.nan_to_num(_by_host(offsets, hosts))
    wrong = (
        (np.abs(off) > OFF_NS) & (np.abs(off) > NOISE * np.nan_to_num(spreads)) if named else np.ones(len(off), bool)
    )
    if not wrong.any():
        aligned = bool(np.abs(off).max() <= OFF_NS)
        return Clocks(
            tuple(start),
            aligned,
            ()
            if aligned
            else ("the ranks' collectives do not end together, so that their clocks may differ: waits are uncertain",),
        )
    corrected = tuple(int(at - by) if bad else at for at, by, bad in zip(start, off, wrong))
    return Clocks(
        corrected,
        True,
        (
            _said(off, wrong, hosts)
            if named
            else "the traces name no common clock: they are laid over each other by the ends of collectives",
        ),
    )


def _offsets(ranks: Sequence[Calls], groups: list[Group], start: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """[R] each: median of a rank's ends against the median rank's, and how far they scatter around it; NaN: none seen."""
    seen: list[list[np.ndarray]] = [[] for _ in ranks]
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


def _by_host(offsets: np.ndarray, hosts: Sequence[str]) -> np.ndarray:
    """Ranks of one host share a clock; a rank whose host is unknown stands for itself."""
    shared = offsets.copy()
    for host in set(hosts) - {""}:
        here = np.array([name == host for name in hosts])
        if not np.isnan(offsets[here]).all():
            shared[here] = np.nanmedian(offsets[here])
    return shared


def _said(off: np.ndarray, wrong: np.ndarray, hosts: Sequence[str]) -> str:
    names = {hosts[at] or f"rank {at}": off[at] for at in np.flatnonzero(wrong)}
    told = ", ".join(f"{name} by {by / 1e6:+.3g} ms" for name, by in list(names.items())[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"clocks differ, and were set right by the ends of collectives: {told}{more}"
