"""All ranks of one run, beside each other."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from megatron_lite.analysis.intervals import Cover, Flags, Integers, Numbers, difference, intersection, joined, union
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.calls import Calls, bus_bytes, collect_calls
from megatron_lite.analysis.ranks.imbalance import find_imbalance, measure_compute
from megatron_lite.analysis.ranks.matching import Clocks, Group, align_clocks, match
from megatron_lite.analysis.ranks.order import find_disorder
from megatron_lite.analysis.ranks.process_groups import label_group
from megatron_lite.analysis.ranks.rank_results import (
    CollectiveRow,
    GroupRow,
    Imbalance,
    RankComparison,
    RankRow,
    Straggler,
)
from megatron_lite.analysis.time.time_results import Placing, RankTime
from megatron_lite.analysis.trace.columns import ProcessGroup
from megatron_lite.phases import Phase
from megatron_lite.units import counted


def compare_ranks(seen: Sequence[RankFacts], only: str = "") -> RankComparison | None:
    """Compare the traces of one run's ranks with each other.

    Args:
        seen: what is known of each trace.
        only: the dimension of the ranks' layout, if it has one only.

    Returns:
        What the traces say of each other; None without a trace.
    """
    if not seen:
        return None
    one_each, notes = _choose_traces(seen)
    placings = [one.placing for one in one_each]
    base_ns = [one.trace.base_ns for one in one_each]
    hosts = [str(one.trace.facts.get("host_name") or "") for one in one_each]
    world_size = max((one.trace.world_size or 0 for one in one_each), default=0) or None
    calls = [collect_calls(one.trace, one.placing, world_size) for one in one_each]
    labels = _label_groups(calls, world_size, only)
    slots_of_steps, steps = find_shared_steps(placings)
    # the last entry is for calls outside of all steps
    slots = [np.append(slot, -1)[of_rank.step] for slot, of_rank in zip(slots_of_steps, calls)]
    groups, unmatched = match(calls, slots, base_ns)
    clocks = align_clocks(calls, groups, base_ns, hosts)
    waits = compute_waits(calls, groups, clocks, slots, steps)
    rows = _build_rank_rows(one_each, hosts, waits, clocks)
    disorder = find_disorder(
        calls, slots, _name_shared_steps(placings[0], slots_of_steps[0], steps), labels, world_size
    )
    lateness_ms = measure_lateness(waits, groups)
    straggler: Straggler | None = None
    imbalance: Imbalance | None = None
    # where ranks call them in another order, the starts of one collective are those of two
    if disorder is None:
        straggler = find_straggler(rows, [one.time for one in one_each], lateness_ms)
        if clocks.aligned and _know_waits(rows):
            compute_ms = measure_compute(calls, placings, slots_of_steps, steps)
            imbalance = _find_imbalance(one_each, rows, waits, lateness_ms, compute_ms, straggler)
    present = tuple(row.rank for row in rows)
    group_size = world_size if _is_whole_world(one_each, groups, world_size) else None
    return RankComparison(
        world_size=world_size,
        present=present,
        missing=_find_missing(present, world_size),
        rows=tuple(rows),
        groups=build_group_rows(one_each, calls, slots, steps, labels),
        collectives=build_collective_rows(list(zip(calls, slots, waits.transfer_ns)), steps, labels, group_size),
        straggler=straggler,
        imbalance=imbalance,
        disorder=disorder,
        clocks_aligned=clocks.aligned,
        critical_rank=_find_critical_rank(rows),
        notes=(*notes, *unmatched, *clocks.notes),
    )


def _label_groups(calls: Sequence[Calls], world_size: int | None, only: str) -> dict[ProcessGroup, str]:
    """Name the dimension of the layout to which each process group belongs, in the order of their first use.

    Args:
        calls: the collectives of each rank.
        world_size: the number of all ranks; None if unknown.
        only: the dimension of the ranks' layout, if it has one only.
    """
    used = dict.fromkeys(what.group for of_rank in calls for what in of_rank.whats)
    return {group: label_group(group, world_size, only) for group in used}


def _find_missing(present: Sequence[int], world_size: int | None) -> tuple[int, ...]:
    """List the ranks without a trace; () where no trace names its rank, so that any may be missing."""
    if not present:
        return ()
    return tuple(sorted(set(range(world_size or 0)) - set(present)))


def _know_waits(rows: Sequence[RankRow]) -> bool:
    """Tell whether it is known of every rank how long it waits."""
    return all(row.wait_ms is not None for row in rows)


def _find_critical_rank(rows: Sequence[RankRow]) -> int | None:
    """The rank that waits least: its own work is what the run takes.

    Where waiting is not known, the rank of the longest step.
    """
    if not rows:
        return None
    if _know_waits(rows):
        return min(rows, key=lambda row: row.wait_ms or 0.0).rank
    return min(rows, key=lambda row: -row.step_ms).rank


def _is_whole_world(seen: Sequence[RankFacts], groups: Sequence[Group], world_size: int | None) -> bool:
    """Whether the traces are of all ranks, which have one group besides pairs, to which all of them belong."""
    shared = [group for group in groups if not group.is_pair]
    return len(seen) == world_size and len(shared) == 1 and len(shared[0].members) == world_size


def _choose_traces(seen: Sequence[RankFacts]) -> tuple[Sequence[RankFacts], list[str]]:
    """By rank, of several windows of a rank the last; without a rank only if there is nothing else."""
    known, notes = [one for one in seen if one.time.rank is not None], []
    unknown = len(seen) - len(known)
    if not known and unknown > 1:
        only = f"only {seen[0].trace.source} is read"
        notes.append(f"{unknown} traces do not name their rank: {only}")
    if not known:
        return seen[:1], notes
    if unknown:
        notes.append(f"left out, since no rank is written in it: {counted(unknown, 'trace')}")
    latest = {one.time.rank: one for one in sorted(known, key=lambda one: one.trace.base_ns or 0)}
    if len(latest) < len(known):
        notes.append("a rank has several traces: its last one is compared with the others")
    return sorted(latest.values(), key=lambda one: one.time.rank or 0), notes


def _name_shared_steps(placing: Placing, slots: Integers, steps: int) -> list[str]:
    """The shared steps' names in one rank's trace."""
    names = [""] * steps
    for step, slot in zip(placing.steps, slots.tolist()):
        if slot >= 0:
            names[slot] = step.name
    return names


def _measure_median_step(seen: Sequence[RankFacts]) -> float:
    """ms of the median steady step of all ranks: a few long ones do not move it."""
    lengths = [step.ms for one in seen for step in one.time.steady_steps]
    return median(lengths) if lengths else 0.0


def find_shared_steps(placings: Sequence[Placing]) -> tuple[list[Integers], int]:
    """(by rank: int [steps of its window], which of the S shared steps it is, -1: none; S, at least 1).

    Windows may begin and end apart, and ranks must be compared over the same steady steps: by the steps' numbers where
    all ranks have some in common, else the k-th steady one is the same everywhere.
    """
    numbers = [{step.number for step in placing.steps if step.steady} for placing in placings]
    common = sorted(number for number in set.intersection(*numbers) if number is not None)
    fewest = min(int(placing.steady.sum()) for placing in placings)
    slot_of_number: dict[int | None, int] = {number: at for at, number in enumerate(common)}
    slots = []
    for placing in placings:
        steady = np.array([step.steady for step in placing.steps], bool)
        if common:
            slot = np.array([slot_of_number.get(step.number, -1) for step in placing.steps], np.int64)
        else:
            slot = np.cumsum(steady) - 1
            slot[slot >= fewest] = -1
        slots.append(np.where(steady, slot, -1))
    return slots, max(1, len(common) or fewest)


# --- who waits for whom inside collectives: of each, when every rank came and what the transfer itself takes


@dataclass(frozen=True)
class Waits:
    """[R ranks, S shared steps], over the collectives that were matched; ms and counts."""

    wait_ms: Numbers  # inside collectives for a rank that came later
    exposed_wait_ms: Numbers  # of it, what no compute hides
    # its start - the median start of the others, where it came last by its own work; what one rank waits at most
    caused_ms: Numbers
    last: Numbers  # how often it came last
    matched: Numbers  # collectives that it took part in
    transfer_ns: tuple[Integers, ...]  # by rank: int64 [c] of all its calls, what no rank waits for; -1: not matched


def compute_waits(
    ranks: Sequence[Calls], groups: list[Group], clocks: Clocks, slots: Sequence[Integers], steps: int
) -> Waits:
    """Compute how long ranks wait inside collectives for ranks that come later.

    Args:
        ranks: the collectives of each rank.
        groups: which of them belong together.
        clocks: how the ranks' clocks compare.
        slots: by rank, int [c], the shared step of each call; -1 for what does not count.
        steps: how many shared steps there are.
    """
    shape = (len(ranks), steps)
    found = Waits(
        wait_ms=np.zeros(shape),
        exposed_wait_ms=np.zeros(shape),
        caused_ms=np.zeros(shape),
        last=np.zeros(shape),
        matched=np.zeros(shape),
        transfer_ns=tuple(np.full(len(calls), -1, np.int64) for calls in ranks),
    )
    # by group of which all members' clocks compare: since when each one waits, and for whom
    measured: list[tuple[Group, _GroupWaits]] = []
    for group in groups:
        times = _compute_arrivals(ranks, group, clocks)
        transfer_ns = _measure_transfer(group, times, clocks)
        for at, calls in zip(group.members.tolist(), group.call.T):
            found.transfer_ns[at][calls] = np.maximum(found.transfer_ns[at][calls], transfer_ns)
        # a stage waits for another one's work by the schedule, late or not
        if clocks.aligned is not None and not group.is_pair:
            measured.append((group, _measure_waits(group, times, slots)))
    exposed = _find_exposed_waits(ranks, measured, clocks)
    waits_for_ms = np.zeros((len(ranks), *shape))
    for group, waits in measured:
        _add_waits(found, ranks, group, clocks, waits)
        _add_caused(found, waits_for_ms, group, waits, exposed)
    # one lateness that passes through several groups delays every rank once
    np.minimum(found.caused_ms, waits_for_ms.max(axis=1), out=found.caused_ms)
    return found


@dataclass(frozen=True)
class _Arrivals:
    """int64 [k collectives of one group, its members], ns."""

    start: Integers  # on the shared clock
    length: Integers


def _compute_arrivals(ranks: Sequence[Calls], group: Group, clocks: Clocks) -> _Arrivals:
    """When each member came to each collective of the group, and how long it was in it."""
    columns = list(zip(group.members.tolist(), group.call.T))
    return _Arrivals(
        start=np.stack([ranks[at].start_ns[calls] + clocks.start_ns[at] for at, calls in columns], axis=1),
        length=np.stack([ranks[at].end_ns[calls] - ranks[at].start_ns[calls] for at, calls in columns], axis=1),
    )


def _measure_transfer(group: Group, times: _Arrivals, clocks: Clocks) -> Integers:
    """int64 [k], ns of each collective of the group that no rank waits for."""
    transfer_ns: Integers = times.length.min(axis=1)
    if group.is_pair and clocks.aligned:
        both_there = (times.start + times.length).min(axis=1) - times.start.max(axis=1)
        transfer_ns = np.clip(both_there, 0, transfer_ns)
    return transfer_ns


@dataclass(frozen=True)
class _GroupWaits:
    """The c collectives of one group that are in a shared step on all of its members."""

    slot: Integers  # [c, members], the shared step on each of them
    since: Integers  # [c, members], since when each one waits, ns on the shared clock
    wait: Integers  # [c, members], ns
    before: Integers  # [c], when the group's collective before it had all ranks, ns on the shared clock
    last: Integers  # [c], column of the last one
    lag: Numbers  # [c], how much later than the others it came, ns


def _measure_waits(group: Group, times: _Arrivals, slots: Sequence[Integers]) -> _GroupWaits:
    """Measure how long each member of a group waits in each collective for the last one.

    Args:
        group: the k collectives.
        times: when each member came to each of them.
        slots: by rank, int [c], the shared step of each call; -1 for what does not count.
    """
    columns = zip(group.members.tolist(), group.call.T)
    slot = np.stack([slots[at][calls] for at, calls in columns], axis=1)
    counts: Flags = np.logical_and.reduce(slot >= 0, axis=1)
    latest = times.start.max(axis=1)
    # of several under way at once, as on gloo, each counts from where the one before it has all ranks
    before = np.maximum.accumulate(np.concatenate([times.start[:1].min(axis=1), latest[:-1]]))
    since = np.maximum(times.start, before[:, None])[counts]
    wait = np.clip(latest[counts][:, None] - since, 0, times.length[counts])
    median_of_others = np.median(np.sort(times.start[counts], axis=1)[:, :-1], axis=1)
    lag = np.maximum(latest[counts] - np.maximum(median_of_others, before[counts]), 0)
    return _GroupWaits(
        slot=slot[counts],
        since=since,
        wait=wait,
        before=before[counts],
        last=times.start[counts].argmax(axis=1),
        # nobody waits longer in a call than the call takes
        lag=np.minimum(lag, wait.max(axis=1)),
    )


def _find_exposed_waits(
    ranks: Sequence[Calls], measured: Sequence[tuple[Group, _GroupWaits]], clocks: Clocks
) -> list[Cover]:
    """By rank, when it waits in a collective of any group and computes nothing beside; on the shared clock."""
    found = []
    for at, calls in enumerate(ranks):
        own = [(waits, column) for group, waits in measured for column in np.flatnonzero(group.members == at).tolist()]
        since = np.concatenate([np.empty(0, np.int64), *(waits.since[:, column] for waits, column in own)])
        length = np.concatenate([np.empty(0, np.int64), *(waits.wait[:, column] for waits, column in own)])
        clock_ns = clocks.start_ns[at]
        computing = union(calls.compute.start + clock_ns, calls.compute.end + clock_ns)
        found.append(difference(union(since, since + length), computing))
    return found


def _add_waits(found: Waits, ranks: Sequence[Calls], group: Group, clocks: Clocks, waits: _GroupWaits) -> None:
    """Add what each member of one group waits to `found`. The other arguments: see compute_waits."""
    for column, at in enumerate(group.members.tolist()):
        slot = waits.slot[:, column]
        own_since = waits.since[:, column] - clocks.start_ns[at]
        own_wait = waits.wait[:, column]
        hidden = ranks[at].compute.within(own_since, own_since + own_wait)
        np.add.at(found.wait_ms[at], slot, own_wait / 1e6)
        np.add.at(found.exposed_wait_ms[at], slot, (own_wait - hidden) / 1e6)
        np.add.at(found.last[at], slot, waits.last == column)
        np.add.at(found.matched[at], slot, 1.0)


def _add_caused(
    found: Waits, waits_for_ms: Numbers, group: Group, waits: _GroupWaits, exposed: Sequence[Cover]
) -> None:
    """Add what the last member of each collective makes the others wait by its own work.

    It is not the rank's own lateness that it waited itself, since its group's last collective, for a rank of another
    group, longer than the other members did: that is charged there to the rank that was late first.

    Args:
        found: whose caused_ms grows.
        waits_for_ms: [R awaited, R waiting, S], grows by what each member waits for the last one.
        group: the collectives' ranks.
        waits: when they came.
        exposed: by rank, when it waits and computes nothing beside, on the shared clock.
    """
    # [c, members]: what each one waited between this collective and the group's last one
    columns = enumerate(group.members.tolist())
    waited = np.stack([exposed[at].within(waits.before, waits.since[:, column]) for column, at in columns], axis=1)
    for column, at in enumerate(group.members.tolist()):
        is_last = waits.last == column
        others = np.delete(waited[is_last], column, axis=1)
        inherited = np.maximum(waited[is_last, column] - np.median(others, axis=1), 0)
        own_lag = np.maximum(waits.lag[is_last] - inherited, 0)
        np.add.at(found.caused_ms[at], waits.slot[is_last, column], own_lag / 1e6)
        slot = waits.slot[is_last, column]
        np.add.at(waits_for_ms[at], (group.members[None, :], slot[:, None]), waits.wait[is_last] / 1e6)


def _build_rank_rows(seen: Sequence[RankFacts], hosts: Sequence[str], waits: Waits, clocks: Clocks) -> list[RankRow]:
    """Of the ranks that are known; waiting is left out where no clock is shared."""
    rows: list[RankRow] = []
    for at, one in enumerate(seen):
        if one.time.rank is None:
            continue
        exposed_ms, number = one.time.rows.get("exposed_communication", 0.0), waits.matched[at].sum()
        row = RankRow(
            rank=one.time.rank,
            host=hosts[at],
            step_ms=one.time.step_ms,
            compute_ms=one.time.rows.get("compute", 0.0),
            communication_ms=one.time.communication_ms,
            exposed_communication_ms=exposed_ms,
            data_wait_ms=one.time.rows.get("data_wait", 0.0),
            host_idle_ms=one.time.rows.get("host", 0.0) + one.time.rows.get("sync", 0.0),
        )
        if number and clocks.aligned is not None:
            row = replace(
                row,
                wait_ms=float(waits.wait_ms[at].mean()),
                last_in=float(waits.last[at].sum() / number),
                caused_wait_ms=float(waits.caused_ms[at].mean()),
                exposed_wait_ms=min(float(waits.exposed_wait_ms[at].mean()), exposed_ms),
            )
        rows.append(row)
    return rows


# --- collectives by kind, size and phase: waiting apart from transfer, what is not hidden, and the bandwidth

MAX_SIZES = 32  # of one kind in one phase; more (an all-to-all of experts, say) are one row of their mean size
MANY = -1


def _count_last(group: str) -> tuple[bool, bool, str]:
    """Order in which groups are charged with what several have under way:
    what layers wait for before what runs beside them."""
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
    groups = []
    for label, of_ranks in sums_of_label.items():
        num_bytes = float(np.mean([sums.num_bytes for sums in of_ranks])) / steps
        most = max(of_ranks, key=lambda sums: sums.exposed_ms)
        groups.append(
            GroupRow(
                label,
                float(np.mean([sums.number for sums in of_ranks])) / steps,
                None if math.isnan(num_bytes) else num_bytes,
                float(np.mean([sums.busy_ms for sums in of_ranks])) / steps,
                float(np.mean([sums.exposed_ms for sums in of_ranks])) / steps,
                most.rank,
                most.exposed_ms / steps,
            )
        )
    return tuple(sorted(groups, key=lambda row: (-row.exposed_ms, -row.busy_ms)))


@dataclass(frozen=True)
class _GroupSums:
    """One rank's communication of one dimension in all shared steps."""

    rank: int | None
    number: int  # of calls
    num_bytes: float  # NaN if it is unknown of any call
    busy_ms: float  # in which any call is under way
    exposed_ms: float  # of it, what neither computing nor a dimension charged before hides


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
        rows_of_label[labels[calls.whats[row].group]].append(row)
    steady = [step for step in one.placing.steps if step.steady]
    within = union([step.start_ns for step in steady], [step.end_ns for step in steady])
    taken = calls.compute
    found = {}
    for label in sorted(rows_of_label, key=_count_last):
        rows = rows_of_label[label]
        sizes = [calls.whats[row].num_bytes for row in rows]
        busy = intersection(within, union(calls.start_ns[rows], calls.end_ns[rows]))
        found[label] = _GroupSums(
            rank=one.time.rank,
            number=len(rows),
            num_bytes=sum(math.nan if size is None else size for size in sizes),
            busy_ms=busy.length / 1e6,
            exposed_ms=difference(busy, taken).length / 1e6,
        )
        taken = joined(taken, busy)
    return found


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
    parts = defaultdict(list)
    for calls, slot, transfer in ranks:
        for key, sums in _sum_by_kind(calls, slot >= 0, transfer, labels, group_size).items():
            parts[key].append(sums / steps)
    rows = []
    for (kind, group, algorithm, phase, size, num_bytes, dtype), of_ranks in parts.items():
        number, ns, exposed, transfer, unmatched, bus, all_bytes = np.mean(of_ranks, axis=0).tolist()
        known = not unmatched
        rows.append(
            CollectiveRow(
                name=kind,
                group=group,
                algorithm=algorithm,
                phase=phase,
                group_size=size,
                per_step=number,
                num_bytes=round(all_bytes / number) if num_bytes == MANY else num_bytes,
                dtype=dtype,
                kernel_ms=ns / 1e6,
                transfer_ms=transfer / 1e6 if known else None,
                wait_ms=(ns - transfer) / 1e6 if known else None,
                exposed_ms=exposed / 1e6,
                bus_gb_s=bus / transfer if known and bus and transfer else None,  # bytes per ns = GB/s
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.exposed_ms, -row.kernel_ms)))


def _sum_by_kind(
    calls: Calls, keep: Flags, transfer: Integers, labels: Mapping[ProcessGroup, str], group_size: int | None
) -> dict[Any, Numbers]:
    """Add up one rank's calls by what rows tell apart.

    Args:
        calls: the rank's collectives.
        keep: bool [c], the calls that count.
        transfer: int64 [c], ns of each call that no rank waits for; -1: not matched.
        labels: the dimension of each process group.
        group_size: of collectives whose trace does not say; None if nothing shows it.

    Returns:
        float64 [7] by kind, dimension, algorithm, phase, ranks, bytes and type: the number of calls, ns, exposed ns,
        transfer ns, how many were not matched, bytes on the bus, bytes.
    """
    kept = np.flatnonzero(keep)
    kinds: dict[Any, int] = {}
    kind = np.array([kinds.setdefault((calls.whats[i], calls.phase[i]), len(kinds)) for i in kept.tolist()], np.int64)
    columns = [
        np.ones(len(kept)),
        (calls.end_ns - calls.start_ns)[kept],
        calls.exposed_ns[kept],
        np.maximum(transfer[kept], 0),
        transfer[kept] < 0,
    ]
    table = np.stack([np.bincount(kind, column, len(kinds)) for column in columns], axis=1)
    sizes = Counter((what.kind, phase) for what, phase in kinds)
    sums: dict[Any, Numbers] = {}
    for (what, phase), values in zip(kinds, table):
        ranks = what.group_size or group_size
        num_bytes = what.num_bytes
        bus = bus_bytes(what.kind, num_bytes, ranks) if num_bytes and ranks else 0.0
        number = values[0]
        row = np.array([*values, number * bus, number * (num_bytes or 0)])
        has_many_sizes = num_bytes is not None and sizes[what.kind, phase] > MAX_SIZES
        told_bytes = MANY if has_many_sizes else num_bytes
        key = (what.kind, labels[what.group], what.algorithm, phase, ranks, told_bytes, what.dtype)
        sums[key] = sums[key] + row if key in sums else row
    return sums


# --- the rank that others wait for, and the one quantity that explains it, if one does

SHARE_OF_STEP = 0.02  # that others must wait for one rank, or it does not matter; as in the trainer's own line
EXPLAINED = 0.8  # of the lag that a cause must be
NEARLY = 0.2  # of the lag, that a rank which comes nearly as late waits at most
BEYOND_CHANCE = 4 / 3  # times the share of all waiting that a rank would cause if all were alike
STANDARD_ERRORS = 2.0  # that the mean over steps must be above nothing

CAUSES = {  # rows of a step
    "data_wait": ("data_wait",),
    "compute": ("compute",),
    "copy": ("exposed_copy",),
    "host": (
        "host",
        "sync",
        "garbage_collector",
        "allocator",
        "launch",
        "cpu_optimizer",
        "clip_grad",
        "log",
        "compile",
        "startup",
        "graph_capture",
    ),
}
# no rank waits for another in these, so that their time is the rank's own
INDEPENDENT = tuple(map(str, (Phase.DATA, Phase.DATA_TO_DEVICE, Phase.FORWARD, Phase.OPTIMIZER_STEP)))


def find_straggler(rows: Sequence[RankRow], times: Sequence[RankTime], lateness_ms: Numbers) -> Straggler | None:
    """Find the rank for which the others wait.

    Args:
        rows: all ranks with their waits.
        times: the same ranks' times.
        lateness_ms: [R ranks, S shared steps], how much later than the others each rank comes.

    Returns:
        The rank; None where none stands out, where it does by one odd step only, or where waits are not known.
    """
    caused_ms = [row.caused_wait_ms for row in rows if row.caused_wait_ms is not None]
    if len(rows) < 2 or len(caused_ms) < len(rows):
        return None
    lag_ms = max(caused_ms)
    late = caused_ms.index(lag_ms)
    least_ms = SHARE_OF_STEP * median(row.step_ms for row in rows)
    share = min(max(0.5, BEYOND_CHANCE / len(rows)), 0.9)
    if lag_ms < least_ms or lag_ms < share * sum(caused_ms):
        return None
    if not _is_usually_above(lateness_ms[late], least_ms):
        return None
    cause, by_ms = _find_excess([_sum_causes(time) for time in times], late, lag_ms)
    where, _ = _find_excess([_measure_own_phases(time) for time in times], late, lag_ms)
    row = rows[late]
    return Straggler(row.rank, lag_ms, row.last_in, cause, by_ms, where, _find_alike(rows, row.rank, lag_ms))


def _is_usually_above(lateness_ms: Numbers, least_ms: float) -> bool:
    """Tell whether a rank is late in the usual step, and by more than steps differ among each other.

    Args:
        lateness_ms: [S], how much later than the others it comes in each step.
        least_ms: the lag that matters, ms.
    """
    error_ms = lateness_ms.std(ddof=1) / np.sqrt(len(lateness_ms)) if len(lateness_ms) > 1 else 0.0
    # one of two ranks that take turns is late in more than half of an odd number of steps
    is_mostly_late = np.quantile(lateness_ms, 0.25) > least_ms / 2
    is_late = np.median(lateness_ms) > least_ms and is_mostly_late
    return bool(is_late and lateness_ms.mean() > STANDARD_ERRORS * error_ms)


def _sum_causes(time: RankTime) -> dict[str, float]:
    """Add up a step's rows by the cause that each belongs to, ms per step."""
    return {cause: sum(time.rows.get(row, 0.0) for row in rows) for cause, rows in CAUSES.items()}


def _measure_own_phases(time: RankTime) -> dict[str, float]:
    """Measure each phase's own time: compute, and where no rank waits for another the host's if that is longer; ms."""
    own_ms: dict[str, float] = {}
    for phase in time.phases:
        phase_ms = phase.compute_ms
        if phase.name in INDEPENDENT and not time.on_gpu:
            phase_ms = max(phase_ms, phase.host_ms)
        own_ms.setdefault(phase.name, phase_ms)
    return own_ms


def _find_alike(rows: Sequence[RankRow], late_rank: int, lag_ms: float) -> tuple[int, ...]:
    """Find the ranks that come nearly as late as the late one.

    Args:
        rows: all ranks with their waits.
        late_rank: the rank for which the others wait.
        lag_ms: how long they wait for it, ms per step.

    Returns:
        The ranks; () where most ranks hardly wait, as then nobody is late beside the late one.
    """
    waits_ms = [(row.rank, row.wait_ms or 0.0) for row in rows if row.rank != late_rank]
    alike = tuple(rank for rank, wait_ms in waits_ms if wait_ms <= NEARLY * lag_ms)
    return alike if 2 * (len(alike) + 1) <= len(rows) else ()


def _find_excess(quantities: list[dict[str, float]], late: int, lag: float) -> tuple[str, float]:
    """(name, ms): what the late rank has most more of than the median of the others; ("",
    0) if it is no explanation."""
    found = {}
    for name in dict.fromkeys(name for of_rank in quantities for name in of_rank):
        others = [of_rank.get(name, 0.0) for at, of_rank in enumerate(quantities) if at != late]
        found[name] = quantities[late].get(name, 0.0) - median(others)
    name = max(found, key=lambda name: found[name], default="")
    return (name, found[name]) if name and found[name] >= EXPLAINED * lag else ("", 0.0)


def _find_imbalance(
    seen: Sequence[RankFacts],
    rows: Sequence[RankRow],
    waits: Waits,
    lateness_ms: Numbers,
    compute_ms: Numbers,
    straggler: Straggler | None,
) -> Imbalance | None:
    """Find imbalance that moves, beside a straggler among the other ranks.

    Args:
        seen: what is known of each trace.
        rows: the same ranks with their waits.
        waits: who waits for whom.
        lateness_ms: [R ranks, S shared steps], how much later than the others each rank comes.
        compute_ms: [R, S], what each rank computes.
        straggler: the rank that is late in the usual step, if one is.
    """
    on_gpu = all(one.time.on_gpu for one in seen)
    ranks = [row.rank for row in rows]
    caused_ms = waits.caused_ms
    step_ms = _measure_median_step(seen)
    usual_ms = {rank: float(np.median(late_ms)) for rank, late_ms in zip(ranks, lateness_ms)}
    usual = [rank for rank, late_ms in zip(ranks, lateness_ms) if _is_usually_above(late_ms, SHARE_OF_STEP * step_ms)]
    latest = straggler.rank if straggler else max(usual, key=lambda rank: usual_ms[rank], default=None)
    if straggler is not None:
        # another rank costs by what it comes later than the straggler, which is what the straggler waits for it
        caused_ms = np.minimum(caused_ms, waits.wait_ms[ranks.index(straggler.rank)])
    found = find_imbalance(ranks, caused_ms - waits.wait_ms, compute_ms, step_ms, on_gpu)
    return replace(found, usual=(latest, usual_ms[latest])) if found and latest is not None else found


def measure_lateness(waits: Waits, groups: Sequence[Group]) -> Numbers:
    """Measure how much later than the others each rank comes in each step, whether it is the last one or not.

    Ranks that all meet in one group spend the same time until it ends. What one waits less than the median of the
    others, its own work takes longer. A rank that is always a little late is seen so in steps, too, in which another
    one is later.

    Args:
        waits: who waits for whom.
        groups: which collectives belong together.

    Returns:
        [R ranks, S shared steps], ms, negative for a rank that comes earlier. Where ranks do not all meet in one
        group: what others wait for the rank beyond its own waits.
    """
    number = len(waits.wait_ms)
    meets = any(len(group.members) == number and not group.is_pair for group in groups)
    if not meets or number < 2:
        return waits.caused_ms - waits.wait_ms
    of_others = [np.median(np.delete(waits.wait_ms, rank, axis=0), axis=0) for rank in range(number)]
    return np.stack(of_others) - waits.wait_ms
