"""Lays all ranks of a report on one timeline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.ranks.calls import END_TOGETHER
from megatron_lite.analysis.ranks.matching import measure_offsets
from megatron_lite.analysis.ranks.process_groups import label_group
from megatron_lite.analysis.ranks.ranks import AlignedRanks, align_ranks
from megatron_lite.analysis.report import Report
from megatron_lite.analysis.timeline.finding_marks import FindingMarks
from megatron_lite.analysis.timeline.rank_tracks import RankTracks, choose_numbers
from megatron_lite.analysis.timeline.run_tracks import StepCounters, lay_graph
from megatron_lite.analysis.timeline.snapshot_counters import count_snapshots
from megatron_lite.analysis.timeline.timeline_results import (
    AlignedClock,
    ClockSource,
    Counts,
    MergedTimeline,
    Slices,
    TimelineProcess,
)
from megatron_lite.analysis.timeline.tracks import TrackMaker

MIN_UNIX_NS = 10**18  # of a clock that counts since 1970, as files of 2001 and later have it


@dataclass(frozen=True)
class _Collectives:
    """Numbers of what ranks do together."""

    ids: Sequence[Integers]  # by rank: [c], from 1 on; 0: not matched
    texts: list[str]  # by number - 1: "data, group 0, number 12"
    late_ns: Sequence[Integers]  # by rank: [c], how much later than the first rank each began; -1: not matched


def build_timeline(report: Report) -> MergedTimeline | None:
    """Lay the ranks of a report on one timeline, of which nothing is made before it is asked for.

    Args:
        report: with its traces.

    Returns:
        The timeline; None for a report without a trace.
    """
    seen = report.facts.ranks_seen
    if not seen:
        return None
    aligned = align_ranks(seen)
    zero_ns = min(aligned.clocks.start_ns)
    maker = TrackMaker()
    run, *processes = _make_processes(aligned, maker)
    collectives = _number_collectives(aligned)
    ranks = []
    for at, (one, process) in enumerate(zip(aligned.window.seen, processes)):
        tracks = RankTracks(
            at=at,
            one=one,
            calls=aligned.window.calls[at],
            clock_ns=aligned.clocks.start_ns[at] - zero_ns,
            process=process,
            maker=maker,
            gpu_clock_mhz=report.facts.ranks_hardware.get_one("sm_clock_mhz", one.time.rank or 0),
            collective_ids=collectives.ids[at],
            collective_texts=collectives.texts,
            late_ns=collectives.late_ns[at],
        )
        ranks.append(tracks)
    notes = _describe(report, aligned)
    graph = lay_graph(ranks, run, maker, zero_ns)
    notes["critical path"] = graph.note
    marks = FindingMarks(report, ranks, run, maker)
    contents: list[Iterator[Slices | Counts]] = [
        iter(graph.slices),
        _count_steps(report, ranks, run, maker),
        *(rank.list_contents() for rank in ranks),
        count_snapshots(report.facts.snapshots, ranks),
        marks.list_contents(),
    ]
    return MergedTimeline(
        processes=(run, *processes),
        contents=chain.from_iterable(contents),
        clocks=tuple(_describe_clocks(aligned, processes, zero_ns)),
        unix_ns=_find_unix_zero(aligned, zero_ns),
        notes=notes,
    )


def _make_processes(aligned: AlignedRanks, maker: TrackMaker) -> list[TimelineProcess]:
    """Make a process of the run as a whole, and one of each rank."""
    written = []
    for one in aligned.window.seen:
        main = one.placing.main_thread
        written.append(str(one.trace.threads[main][0]) if main >= 0 else "")
    pids = choose_numbers(written)
    free = next(pid for pid in count(1) if pid not in pids)
    processes = [maker.make_process(free, "run", 0)]
    for at, pid in enumerate(pids):
        one = aligned.window.seen[at]
        rank = one.time.rank
        name = one.trace.source if rank is None else f"rank {rank}"
        if aligned.hosts[at]:
            name += f" on {aligned.hosts[at]}"
        processes.append(maker.make_process(pid, name, at + 1))
    return processes


def _number_collectives(aligned: AlignedRanks) -> _Collectives:
    """Number the matched collectives of all ranks."""
    window = aligned.window
    ids = [np.zeros(len(calls), np.int64) for calls in window.calls]
    late_ns = [np.full(len(calls), -1, np.int64) for calls in window.calls]
    texts: list[str] = []
    for group_number, group in enumerate(aligned.groups):
        members = group.list_members()
        first, rows = members[0]
        what = window.calls[first].whats[int(rows[0])]
        label = label_group(what.group, window.world_size)
        prefix = f"{label}, group {group_number}" if label else f"group {group_number}"
        numbers = np.arange(len(group.call)) + len(texts) + 1
        starts = []
        for at, calls in members:
            starts.append(window.calls[at].start_ns[calls] + aligned.clocks.start_ns[at])
        first_ns = np.min(starts, axis=0)
        for (at, calls), start_ns in zip(members, starts):
            ids[at][calls] = numbers
            late_ns[at][calls] = start_ns - first_ns
        texts += [f"{prefix}, number {place}" for place in range(len(group.call))]
    return _Collectives(ids, texts, late_ns)


def _describe(report: Report, aligned: AlignedRanks) -> dict[str, str]:
    """Write what the file says of itself."""
    notes = {
        "title": report.title,
        "verdict": report.verdict.headline,
        "confidence": f"{report.verdict.confidence}: {report.verdict.why}",
    }
    for one in aligned.window.seen:
        name = one.trace.source if one.time.rank is None else f"rank {one.time.rank}"
        notes[f"events of {name}"] = str(len(one.trace.events))
    for number, text in enumerate((*aligned.notes, *aligned.clocks.notes, *report.facts.gaps), 1):
        notes[f"note {number}"] = text
    return notes


def _describe_clocks(
    aligned: AlignedRanks,
    processes: Sequence[TimelineProcess],
    zero_ns: int,
) -> Iterator[AlignedClock]:
    """Describe how each rank's clock was aligned, and how well.

    Args:
        aligned: the ranks.
        processes: of the ranks, whose names they have.
        zero_ns: the moment 0 of the timeline, on the clock of all ranks.
    """
    window = aligned.window
    clocks = aligned.clocks
    offsets, spreads = measure_offsets(window.calls, aligned.groups, clocks.start_ns)
    bases = [one.trace.base_ns for one in window.seen]
    known = [base for base in bases if base is not None]
    for at, process in enumerate(processes):
        moved_ns = 0
        source = ClockSource.OWN
        base = bases[at]
        if len(known) < len(bases) or base is None:
            source = ClockSource.COLLECTIVES if clocks.aligned and len(bases) > 1 else ClockSource.UNKNOWN
        else:
            moved_ns = clocks.start_ns[at] - (base - min(known))
            source = ClockSource.CORRECTED if moved_ns else ClockSource.OWN
        if len(bases) == 1:
            source = ClockSource.ALONE
        yield AlignedClock(
            name=process.name,
            source=source,
            start_ns=clocks.start_ns[at] - zero_ns,
            moved_ns=moved_ns,
            collectives=_count_ending_together(aligned, at),
            off_ns=float(offsets[at]),
            spread_ns=float(spreads[at]),
        )


def _count_ending_together(aligned: AlignedRanks, at: int) -> int:
    """Count the matched collectives of a rank that all members leave at the same moment."""
    number = 0
    for group in aligned.groups:
        members = group.list_members()
        first, calls = members[0]
        if at not in group.members:
            continue
        kinds = [aligned.window.calls[first].whats[row].kind for row in calls.tolist()]
        number += int(np.isin(kinds, END_TOGETHER).sum())
    return number


def _find_unix_zero(aligned: AlignedRanks, zero_ns: int) -> int | None:
    """Find the moment 0 of the timeline since 1970, ns, by the first rank whose clock was not moved; None: unknown."""
    seen = aligned.window.seen
    known = [one.trace.base_ns for one in seen if one.trace.base_ns is not None]
    if len(known) < len(seen) or min(known) < MIN_UNIX_NS:
        return None
    for base_ns, start_ns in zip(known, aligned.clocks.start_ns):
        if base_ns - min(known) == start_ns:
            return min(known) + zero_ns
    return known[0] - aligned.clocks.start_ns[0] + zero_ns


def _count_steps(
    report: Report,
    ranks: Sequence[RankTracks],
    run: TimelineProcess,
    maker: TrackMaker,
) -> Iterator[Counts]:
    """Count losses and tokens of the steps that a trace holds, by the rank that wrote the record where it has one.

    Args:
        report: with the run's record, where there is one.
        ranks: with the traces.
        run: the process of the counters.
        maker: makes their tracks.
    """
    recorded = report.facts.run
    if recorded is None:
        return
    writer = [rank for rank in ranks if rank.one.time.rank == recorded.writing_rank]
    yield from StepCounters(recorded, (writer or list(ranks))[0], run, maker).list_contents()
