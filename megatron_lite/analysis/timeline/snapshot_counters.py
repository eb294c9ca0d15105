"""Counters of memory by a rank's snapshot, where its trace has no memory events."""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_lite.analysis.memory.memory_results import Snapshot
from megatron_lite.analysis.timeline.rank_tracks import Order, RankTracks
from megatron_lite.analysis.timeline.timeline_results import CounterUnit, Counts

NUMBER_AT_END = re.compile(r"\d+$")


def count_snapshots(snapshots: Sequence[Snapshot], ranks: Sequence[RankTracks]) -> Iterator[Counts]:
    """Make counters of allocated and reserved memory of ranks whose snapshot shares a step with their trace."""
    for rank in ranks:
        if len(rank.one.trace.memory):
            continue
        for snapshot in snapshots:
            if snapshot.rank == rank.one.time.rank and snapshot.curve:
                yield from _count_snapshot(snapshot, rank)


def _count_snapshot(snapshot: Snapshot, rank: RankTracks) -> Iterator[Counts]:
    """Make the counters of one snapshot within its rank's recorded steps."""
    shared = _find_shared_step(snapshot, rank)
    if shared is None:
        return
    name, clock_ns = shared
    steps = rank.one.placing.steps
    first_ns = min(step.host_start_ns for step in steps) + rank.clock_ns
    last_ns = max(step.host_end_ns for step in steps) + rank.clock_ns
    time_ns = np.array([point.time_us for point in snapshot.curve], np.int64) * 1000 + clock_ns
    is_inside = (time_ns >= first_ns) & (time_ns <= last_ns)
    curves = {
        "allocated": [point.allocated for point in snapshot.curve],
        "reserved": [point.reserved for point in snapshot.curve],
    }
    for word, values in curves.items():
        track = rank.maker.make_track(
            rank.process,
            f"memory {word} on GPU {snapshot.device}, by the snapshot",
            Order.COUNTERS,
            counter=CounterUnit.BYTES,
            description=f"thinned to a picture's points; the first allocation of {name} stands where that step begins",
        )
        chosen = np.array(values, np.int64)[is_inside]
        if len(chosen):
            yield Counts(track, time_ns[is_inside], chosen)


def _find_shared_step(snapshot: Snapshot, rank: RankTracks) -> tuple[str, int] | None:
    """Find a step that both have: its name, and what to add to the snapshot's times, ns; None where there is none."""
    began_us = {}
    for step in snapshot.steps:
        found = NUMBER_AT_END.search(step.name)
        if found:
            began_us[int(found[0])] = step.start_us
    for recorded in rank.one.placing.steps:
        if recorded.number in began_us:
            own_ns = recorded.host_start_ns + rank.clock_ns
            return recorded.name, own_ns - began_us[recorded.number] * 1000
    return None
