"""Collectives in which ranks meet: each begins when the last rank has come."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.graph.graph import ActivityKind, EdgeKind
from megatron_lite.analysis.graph.parts import Parts
from megatron_lite.analysis.graph.work_lanes import WorkActivities
from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.ranks.calls import END_TOGETHER, Calls
from megatron_lite.analysis.ranks.matching import Group


@dataclass(frozen=True)
class Meetings:
    """Collectives of one group of ranks, K of them; receiving is such a one of two ranks."""

    members: tuple[int, ...]  # [G], places of the ranks
    call: Integers  # [K, G], index into the rank's calls
    start_ns: Integers  # [K, G], when each one came, on the clock of all ranks
    waits: Flags  # [K, G], the member cannot go on before all have come; a sender can

    @property
    def at_ns(self) -> Integers:
        """When the last one came: int64 [K]."""
        last: Integers = self.start_ns.max(axis=1)
        return last


def find_meetings(
    calls: Sequence[Calls],
    groups: Sequence[Group],
    clocks_ns: Sequence[int],
) -> list[Meetings]:
    """Find where ranks wait for each other.

    Args:
        calls: the collectives of each rank.
        groups: which of them belong together.
        clocks_ns: what to add to each rank's times.
    """
    found = []
    for group in groups:
        starts = []
        waits = []
        for at, rows in group.list_members():
            of_rank = calls[at]
            kinds = [of_rank.whats[row].kind for row in rows.tolist()]
            awaits = ("recv", "send_recv") if group.is_pair else END_TOGETHER
            start_ns = of_rank.start_ns[rows] + clocks_ns[at]
            is_held = np.isin(kinds, awaits)
            starts.append(start_ns)
            waits.append(is_held)
        meetings = Meetings(
            members=tuple(group.members.tolist()),
            call=group.call,
            start_ns=np.stack(starts, axis=1),
            waits=np.stack(waits, axis=1),
        )
        found.append(meetings)
    return found


def find_last_arrivals(
    meetings: Sequence[Meetings],
    ranks: int,
    calls: Sequence[Calls],
) -> list[Integers]:
    """Find when each collective of each rank can begin, on the clock of all: int64 [c]; -1: not known.

    It is when the last rank came, or the rank itself if it does not wait for others.

    Args:
        meetings: where ranks wait for each other.
        ranks: how many there are.
        calls: the collectives of each rank.
    """
    found: list[Integers] = []
    for at in range(ranks):
        unknown = np.full(len(calls[at]), -1, np.int64)
        found.append(unknown)
    for one in meetings:
        for column, at in enumerate(one.members):
            come_ns = one.start_ns[:, column]
            begins_ns = np.where(one.waits[:, column], one.at_ns, come_ns)
            np.maximum.at(found[at], one.call[:, column], begins_ns)
    return found


def connect_meetings(
    parts: Parts,
    meetings: Sequence[Meetings],
    works: Sequence[WorkActivities],
) -> None:
    """Let ranks wait for each other.

    Args:
        parts: all activities and edges; they grow.
        meetings: where they wait.
        works: by rank, the activities of its collectives.
    """
    for one in meetings:
        lane = parts.add_lane(-1, "meetings")
        step = _find_steps(parts, one, works)
        order = np.argsort(one.at_ns, kind="stable")
        numbers = np.empty(len(order), np.int64)
        at_ns = one.at_ns[order]
        added = parts.add(lane, at_ns, at_ns, ActivityKind.MEETING, step=step[order])
        numbers[order] = added
        for column, at in enumerate(one.members):
            calls = one.call[:, column]
            arrival = works[at].begin[calls]
            transfer = works[at].finish[calls]
            is_apart = arrival != transfer
            parts.connect(arrival[is_apart], numbers[is_apart], EdgeKind.MEETING)
            held = is_apart & one.waits[:, column]
            parts.connect(numbers[held], transfer[held], EdgeKind.MEETING)
            left_early = one.waits[:, column] & ~is_apart
            parts.missing[EdgeKind.MEETING] += int(left_early.sum())


def _find_steps(
    parts: Parts,
    one: Meetings,
    works: Sequence[WorkActivities],
) -> Integers:
    """The step of each meeting, by its first member."""
    first = one.members[0]
    steps = parts.read("step")
    begins = works[first].begin[one.call[:, 0]]
    found: Integers = steps[begins]
    return found
