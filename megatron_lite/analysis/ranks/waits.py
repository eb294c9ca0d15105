"""Waiting of ranks for each other inside collectives: of each, when every rank came and what the transfer takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Cover, Flags, Integers, Numbers, difference, union
from megatron_lite.analysis.ranks.calls import Calls
from megatron_lite.analysis.ranks.matching import Clocks, Group


@dataclass(frozen=True)
class Waits:
    """Waiting of R ranks in S shared steps, over the collectives that were matched; [R, S], ms and counts."""

    wait_ms: Numbers  # inside collectives for a rank that came later
    exposed_wait_ms: Numbers  # of it, what no compute hides
    # its start - the median start of the others, where it came last by its own work, as far as they had nothing to
    # compute beside; what one rank waits at most
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
        for at, calls in group.list_members():
            known_ns = found.transfer_ns[at]
            known_ns[calls] = np.maximum(known_ns[calls], transfer_ns)
        # a stage waits for another one's work by the schedule, late or not
        if clocks.aligned is not None and not group.is_pair:
            measured.append((group, _measure_waits(group, times, slots)))
    exposed = _find_exposed_waits(ranks, measured, clocks)
    # [R awaited, R waiting, S]
    waits_for_ms = np.zeros((len(ranks), *shape))
    for group, waits in measured:
        _add_waits(found, ranks, group, clocks, waits)
        _add_caused(found, waits_for_ms, ranks, group, clocks, waits, exposed)
    # one lateness that passes through several groups delays every rank once
    longest_ms = waits_for_ms.max(axis=1)
    np.minimum(found.caused_ms, longest_ms, out=found.caused_ms)
    return found


@dataclass(frozen=True)
class _Arrivals:
    """Starts and lengths of the k collectives of one group on its members; int64 [k, members], ns."""

    start: Integers  # on the shared clock
    length: Integers

    @property
    def end(self) -> Integers:
        """Ends on the shared clock."""
        return self.start + self.length


def _compute_arrivals(ranks: Sequence[Calls], group: Group, clocks: Clocks) -> _Arrivals:
    """Compute when each member came to each collective of the group, and how long it was in it."""
    starts = []
    lengths = []
    for at, calls in group.list_members():
        start_ns = ranks[at].start_ns[calls]
        end_ns = ranks[at].end_ns[calls]
        starts.append(start_ns + clocks.start_ns[at])
        lengths.append(end_ns - start_ns)
    return _Arrivals(
        start=np.stack(starts, axis=1),
        length=np.stack(lengths, axis=1),
    )


def _measure_transfer(group: Group, times: _Arrivals, clocks: Clocks) -> Integers:
    """Measure the part of each collective of the group in which no rank waits; int64 [k], ns."""
    shortest_ns: Integers = times.length.min(axis=1)
    if not (group.is_pair and clocks.aligned):
        return shortest_ns
    # the sender may have gone before the receiver comes
    both_came = times.start.max(axis=1)
    first_left = times.end.min(axis=1)
    transfer_ns: Integers = np.clip(first_left - both_came, 0, shortest_ns)
    return transfer_ns


@dataclass(frozen=True)
class _GroupWaits:
    """Waits in the c collectives of one group that are in a shared step on all of its members."""

    slot: Integers  # [c, members], the shared step on each of them
    since: Integers  # [c, members], since when each one waits, ns on the shared clock
    wait: Integers  # [c, members], ns
    end: Integers  # [c, members], of the collective on each of them, ns on the shared clock
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
    columns = [slots[at][calls] for at, calls in group.list_members()]
    slot = np.stack(columns, axis=1)
    latest = times.start.max(axis=1)
    # of several under way at once, as on gloo, each counts from where the one before it has all ranks
    earliest = times.start[:1].min(axis=1)
    had_all = np.concatenate([earliest, latest[:-1]])
    before = np.maximum.accumulate(had_all)
    counts: Flags = np.logical_and.reduce(slot >= 0, axis=1)
    start = times.start[counts]
    length = times.length[counts]
    latest = latest[counts]
    before = before[counts]
    since = np.maximum(start, before[:, None])
    wait = np.clip(latest[:, None] - since, 0, length)
    starts_of_others = np.sort(start, axis=1)[:, :-1]
    usual = np.maximum(np.median(starts_of_others, axis=1), before)
    lag = np.maximum(latest - usual, 0)
    return _GroupWaits(
        slot=slot[counts],
        since=since,
        wait=wait,
        end=start + length,
        before=before,
        last=start.argmax(axis=1),
        # nobody waits longer in a call than the call takes
        lag=np.minimum(lag, wait.max(axis=1)),
    )


def _find_exposed_waits(
    ranks: Sequence[Calls], measured: Sequence[tuple[Group, _GroupWaits]], clocks: Clocks
) -> list[Cover]:
    """Find when each rank waits in a collective of any group and computes nothing beside; on the shared clock."""
    nothing = np.empty(0, np.int64)
    starts = [[nothing] for _ in ranks]
    ends = [[nothing] for _ in ranks]
    for group, waits in measured:
        for column, at in enumerate(group.members.tolist()):
            since = waits.since[:, column]
            wait = waits.wait[:, column]
            starts[at].append(since)
            ends[at].append(since + wait)
    found = []
    for at, calls in enumerate(ranks):
        start = np.concatenate(starts[at])
        end = np.concatenate(ends[at])
        waiting = union(start, end)
        clock_ns = clocks.start_ns[at]
        own = calls.compute
        computing = union(own.start + clock_ns, own.end + clock_ns)
        found.append(difference(waiting, computing))
    return found


def _add_waits(found: Waits, ranks: Sequence[Calls], group: Group, clocks: Clocks, waits: _GroupWaits) -> None:
    """Add the waits of the members of one group.

    Args:
        found: whose wait_ms, exposed_wait_ms, last and matched grow.
        ranks: the collectives of each rank.
        group: the collectives' ranks.
        clocks: how the ranks' clocks compare.
        waits: when each member came, and how long it waited.
    """
    for column, at in enumerate(group.members.tolist()):
        slot = waits.slot[:, column]
        wait = waits.wait[:, column]
        # on the rank's own clock, as what it computes
        since = waits.since[:, column] - clocks.start_ns[at]
        hidden = ranks[at].compute.within(since, since + wait)
        exposed = wait - hidden
        is_last = waits.last == column
        np.add.at(found.wait_ms[at], slot, wait / 1e6)
        np.add.at(found.exposed_wait_ms[at], slot, exposed / 1e6)
        np.add.at(found.last[at], slot, is_last)
        np.add.at(found.matched[at], slot, 1.0)


def _add_caused(
    found: Waits,
    waits_for_ms: Numbers,
    ranks: Sequence[Calls],
    group: Group,
    clocks: Clocks,
    waits: _GroupWaits,
    exposed: Sequence[Cover],
) -> None:
    """Add the waits that the last member of each collective causes by its own work.

    It is not the rank's own lateness that it waited itself, since its group's last collective, for a rank of another
    group, longer than the other members did: that is charged there to the rank that was late first. It costs no more
    than the others lose by it: who computes on meanwhile is as far ahead still when the next collective comes.

    Args:
        found: whose caused_ms grows.
        waits_for_ms: [R awaited, R waiting, S], grows by what each member waits for the last one.
        ranks: the collectives of each rank.
        group: the collectives' ranks.
        clocks: how the ranks' clocks compare.
        waits: when they came.
        exposed: by rank, when it waits and computes nothing beside, on the shared clock.
    """
    members = group.members.tolist()
    columns = []
    for column, at in enumerate(members):
        came = waits.since[:, column]
        columns.append(exposed[at].within(waits.before, came))
    # [c, members]: what each one waited between this collective and the group's last one
    waited = np.stack(columns, axis=1)
    lost = _measure_lost_lead(ranks, group, clocks, waits)
    for column, at in enumerate(members):
        is_last = waits.last == column
        of_all = waited[is_last]
        of_others = np.delete(of_all, column, axis=1)
        usual = np.median(of_others, axis=1)
        inherited = np.maximum(of_all[:, column] - usual, 0)
        lag = waits.lag[is_last]
        own_lag = np.clip(lag - inherited, 0, lost[is_last])
        slot = waits.slot[is_last, column]
        np.add.at(found.caused_ms[at], slot, own_lag / 1e6)
        place = (group.members[None, :], slot[:, None])
        np.add.at(waits_for_ms[at], place, waits.wait[is_last] / 1e6)


def _measure_lost_lead(ranks: Sequence[Calls], group: Group, clocks: Clocks, waits: _GroupWaits) -> Numbers:
    """Measure how much of their lead the others lose in each collective: what they compute nothing beside it for longer
    than the last rank does.

    Who computes on beside it is as far ahead still when the next one comes.

    Args:
        ranks: the collectives of each rank.
        group: the collectives' ranks.
        clocks: how the ranks' clocks compare.
        waits: when they came.

    Returns:
        [c], ns, the median of the others.
    """
    columns = []
    for column, at in enumerate(group.members.tolist()):
        since = waits.since[:, column]
        duration = waits.end[:, column] - since
        # on the rank's own clock, as what it computes
        begun = since - clocks.start_ns[at]
        computed = ranks[at].compute.within(begun, begun + duration)
        columns.append(duration - computed)
    exposed = np.stack(columns, axis=1)
    exposed = exposed.astype(np.float64)
    collectives = np.arange(len(exposed))
    of_last = exposed[collectives, waits.last]
    exposed[collectives, waits.last] = np.nan
    of_others = np.nanmedian(exposed, axis=1)
    lost: Numbers = np.maximum(of_others - of_last, 0)
    return lost


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
    sizes = [len(group.members) for group in groups if not group.is_pair]
    if number not in sizes or number < 2:
        return waits.caused_ms - waits.wait_ms
    medians_ms = []
    for rank in range(number):
        of_others_ms = np.delete(waits.wait_ms, rank, axis=0)
        medians_ms.append(np.median(of_others_ms, axis=0))
    return np.stack(medians_ms) - waits.wait_ms
