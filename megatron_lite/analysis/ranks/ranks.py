"""Comparison of all ranks of one run by their traces."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_lite.analysis.intervals import Integers, Numbers
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.calls import Calls, collect_calls
from megatron_lite.analysis.ranks.collective_rows import build_collective_rows, build_group_rows
from megatron_lite.analysis.ranks.imbalance import measure_compute
from megatron_lite.analysis.ranks.matching import Clocks, Group, align_clocks, match
from megatron_lite.analysis.ranks.order import find_disorder
from megatron_lite.analysis.ranks.process_groups import label_group
from megatron_lite.analysis.ranks.rank_results import RankComparison, RankRow
from megatron_lite.analysis.ranks.straggler import find_moving_imbalance, find_straggler
from megatron_lite.analysis.ranks.waits import Waits, compute_waits, measure_lateness
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import ProcessGroup
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
    ranks = align_ranks(seen)
    window = ranks.window
    groups = ranks.groups
    clocks = ranks.clocks
    waits = compute_waits(window.calls, groups, clocks, window.slots, window.steps)
    rows = _build_rank_rows(window.seen, ranks.hosts, waits, clocks)
    found = _describe_ranks(rows, window.world_size, clocks, [*ranks.notes, *clocks.notes])
    found = _add_communication(found, window, groups, waits, only)
    # where ranks call them in another order, the starts of one collective are those of two
    if found.disorder is not None:
        return found
    return _add_late_ranks(found, window, waits, measure_lateness(waits, groups))


@dataclass(frozen=True)
class RanksWindow:
    """The ranks' traces over the S steady steps that all of them have."""

    seen: Sequence[RankFacts]
    world_size: int | None
    calls: list[Calls]  # by rank
    slots_of_steps: list[Integers]  # by rank: int [steps of its trace], which of the S steps it is; -1: none
    slots: list[Integers]  # by rank: int [c], the same of each call
    steps: int  # S


@dataclass(frozen=True)
class AlignedRanks:
    """Traces of a run's ranks, one of each, with their collectives matched and their clocks brought to one."""

    window: RanksWindow
    groups: list[Group]  # members are places in window.seen
    clocks: Clocks
    hosts: list[str]  # by rank; "" where unknown
    notes: list[str]  # on traces that are left out, and collectives that are not matched


def align_ranks(seen: Sequence[RankFacts]) -> AlignedRanks:
    """Match the collectives of a run's ranks, and bring their clocks to one.

    Args:
        seen: what is known of each trace; at least one.
    """
    one_each, notes = _choose_traces(seen)
    window = _choose_window(one_each)
    base_ns = [one.trace.base_ns for one in one_each]
    hosts = [str(one.trace.facts.get("host_name") or "") for one in one_each]
    groups, unmatched = match(window.calls, window.slots, base_ns)
    return AlignedRanks(
        window=window,
        groups=groups,
        clocks=align_clocks(window.calls, groups, base_ns, hosts),
        hosts=hosts,
        notes=[*notes, *unmatched],
    )


def _choose_window(seen: Sequence[RankFacts]) -> RanksWindow:
    """Choose the steps over which traces are compared, and collect the ranks' collectives."""
    world_size = _find_world_size(seen)
    calls = [collect_calls(one.trace, one.placing, world_size) for one in seen]
    slots_of_steps, steps = find_shared_steps([one.placing for one in seen])
    slots = []
    for slot, of_rank in zip(slots_of_steps, calls):
        # the last entry is for calls outside of all steps
        slots.append(np.append(slot, -1)[of_rank.step])
    return RanksWindow(
        seen=seen,
        world_size=world_size,
        calls=calls,
        slots_of_steps=slots_of_steps,
        slots=slots,
        steps=steps,
    )


def _describe_ranks(
    rows: Sequence[RankRow],
    world_size: int | None,
    clocks: Clocks,
    notes: Sequence[str],
) -> RankComparison:
    """Describe the ranks by their own figures, without what they exchange.

    Args:
        rows: of the ranks.
        world_size: the number of all ranks; None if unknown.
        clocks: how the ranks' clocks compare.
        notes: sentences on what was not compared.
    """
    present = tuple(row.rank for row in rows)
    return RankComparison(
        world_size=world_size,
        present=present,
        missing=_find_missing(present, world_size),
        rows=tuple(rows),
        groups=(),
        collectives=(),
        straggler=None,
        clocks_aligned=clocks.aligned,
        critical_rank=_find_critical_rank(rows),
        notes=tuple(notes),
    )


def _add_communication(
    found: RankComparison,
    window: RanksWindow,
    groups: Sequence[Group],
    waits: Waits,
    only: str,
) -> RankComparison:
    """Add what ranks exchange, and whether they do so in the same order.

    Args:
        found: the comparison without it.
        window: the traces.
        groups: which collectives belong together.
        waits: who waits for whom.
        only: the dimension of the ranks' layout, if it has one only.
    """
    calls = window.calls
    slots = window.slots
    labels = _label_groups(calls, window.world_size, only)
    group_size = window.world_size if _is_whole_world(window, groups) else None
    transfers = list(zip(calls, slots, waits.transfer_ns))
    step_names = _name_shared_steps(window)
    return replace(
        found,
        groups=build_group_rows(window.seen, calls, slots, window.steps, labels),
        collectives=build_collective_rows(transfers, window.steps, labels, group_size),
        disorder=find_disorder(calls, slots, step_names, labels, window.world_size),
    )


def _add_late_ranks(found: RankComparison, window: RanksWindow, waits: Waits, lateness_ms: Numbers) -> RankComparison:
    """Add the rank for which the others wait in the usual step, and imbalance that moves.

    Args:
        found: the comparison without them.
        window: the traces.
        waits: who waits for whom.
        lateness_ms: [R ranks, S steps], how much later than the others each rank comes.
    """
    seen = window.seen
    straggler = find_straggler(found.rows, [one.time for one in seen], lateness_ms)
    imbalance = None
    if found.clocks_aligned and _know_waits(found.rows):
        placings = [one.placing for one in seen]
        compute_ms = measure_compute(window.calls, placings, window.slots_of_steps, window.steps)
        imbalance = find_moving_imbalance(seen, found.rows, waits, lateness_ms, compute_ms, straggler)
    return replace(found, straggler=straggler, imbalance=imbalance)


def _find_world_size(seen: Sequence[RankFacts]) -> int | None:
    """The number of all ranks by what the traces say, the largest of several; None where none says it.

    Where they only name groups of ranks, it is at least theirs.
    """
    sizes = [one.trace.least_world_size or 0 for one in seen]
    return max(sizes, default=0) or None


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
    known = set(present)
    return tuple(rank for rank in range(world_size or 0) if rank not in known)


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


def _is_whole_world(window: RanksWindow, groups: Sequence[Group]) -> bool:
    """Whether the traces are of all ranks, which have one group besides pairs, to which all of them belong."""
    shared = [group for group in groups if not group.is_pair]
    if len(window.seen) != window.world_size or len(shared) != 1:
        return False
    return len(shared[0].members) == window.world_size


def _choose_traces(seen: Sequence[RankFacts]) -> tuple[Sequence[RankFacts], list[str]]:
    """Choose one trace of each rank: the last of several windows.

    Returns:
        The traces by rank, one without a rank only if there is nothing else; and notes on those that are left out.
    """
    notes = []
    known = [one for one in seen if one.time.rank is not None]
    unknown = len(seen) - len(known)
    if not known and unknown > 1:
        notes.append(f"{unknown} traces do not name their rank: only {seen[0].trace.source} is read")
    if not known:
        return seen[:1], notes
    if unknown:
        notes.append(f"left out, since no rank is written in it: {counted(unknown, 'trace')}")
    by_time = sorted(known, key=lambda one: one.trace.base_ns or 0)
    latest = {one.time.rank: one for one in by_time}
    if len(latest) < len(known):
        notes.append("a rank has several traces: its last one is compared with the others")
    by_rank = sorted(latest.values(), key=lambda one: one.time.rank or 0)
    return by_rank, notes


def _name_shared_steps(window: RanksWindow) -> list[str]:
    """Name the shared steps as the first rank's trace does."""
    placing = window.seen[0].placing
    names = [""] * window.steps
    for step, slot in zip(placing.steps, window.slots_of_steps[0].tolist()):
        if slot >= 0:
            names[slot] = step.name
    return names


def find_shared_steps(placings: Sequence[Placing]) -> tuple[list[Integers], int]:
    """Find the steady steps over which ranks are compared: windows may begin and end apart.

    They are the same by the steps' numbers where all ranks have some in common; else the k-th steady one is the same
    everywhere.

    Returns:
        By rank: int [steps of its window], which of the S shared steps it is, -1: none. And S, at least 1.
    """
    common = _list_common_numbers(placings)
    slot_of_number: dict[int | None, int] = {number: slot for slot, number in enumerate(common)}
    fewest = min(int(placing.steady.sum()) for placing in placings)
    slots = []
    for placing in placings:
        steady = np.array([step.steady for step in placing.steps], bool)
        if common:
            numbers = [step.number for step in placing.steps]
            slot = np.array([slot_of_number.get(number, -1) for number in numbers], np.int64)
        else:
            slot = np.cumsum(steady) - 1
            slot[slot >= fewest] = -1
        slots.append(np.where(steady, slot, -1))
    shared = len(common) or fewest
    return slots, max(1, shared)


def _list_common_numbers(placings: Sequence[Placing]) -> list[int]:
    """List the numbers of the steady steps that all ranks have, in order; steps without a number are left out."""
    numbers = []
    for placing in placings:
        numbers.append({step.number for step in placing.steps if step.steady})
    common = set.intersection(*numbers)
    return sorted(number for number in common if number is not None)


def _build_rank_rows(seen: Sequence[RankFacts], hosts: Sequence[str], waits: Waits, clocks: Clocks) -> list[RankRow]:
    """Build a row of each rank that is known.

    Args:
        seen: what is known of each trace.
        hosts: on which they were written; "" where unknown.
        waits: who waits for whom.
        clocks: how the ranks' clocks compare; waiting is left out where none is shared.
    """
    rows: list[RankRow] = []
    for at, one in enumerate(seen):
        time = one.time
        if time.rank is None:
            continue
        exposed_ms = time.rows.get("exposed_communication", 0.0)
        row = RankRow(
            rank=time.rank,
            host=hosts[at],
            step_ms=time.step_ms,
            compute_ms=time.rows.get("compute", 0.0),
            communication_ms=time.communication_ms,
            exposed_communication_ms=exposed_ms,
            data_wait_ms=time.rows.get("data_wait", 0.0),
            host_idle_ms=time.rows.get("host", 0.0) + time.rows.get("sync", 0.0),
        )
        number = waits.matched[at].sum()
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
