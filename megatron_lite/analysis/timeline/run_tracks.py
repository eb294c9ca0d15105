"""Tracks of the run as a whole: losses and tokens of its steps, and the critical path of its dependency graph."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_lite.analysis.graph.build import build_graph, explain_size
from megatron_lite.analysis.graph.graph import ActivityKind, Graph
from megatron_lite.analysis.graph.replay import CriticalPath, check_replay, describe_kind, find_critical_path, replay
from megatron_lite.analysis.intervals import Numbers, union
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.analysis.time.time_results import NO_PHASE
from megatron_lite.analysis.timeline.rank_tracks import Order, RankTracks, cut_at
from megatron_lite.analysis.timeline.timeline_results import CounterUnit, Counts, Slices, TimelineProcess
from megatron_lite.analysis.timeline.tracks import SingleSlice, TrackMaker, lay_covers, lay_stretches


class GraphTracks(NamedTuple):
    """Tracks that a dependency graph gives, and a sentence on how far it is trusted."""

    note: str
    slices: tuple[Slices, ...]  # (): the graph claims nothing


def lay_graph(
    ranks: Sequence[RankTracks],
    run: TimelineProcess,
    maker: TrackMaker,
    zero_ns: int,
) -> GraphTracks:
    """Lay the critical path of the steady steps and the loader's workers, where the dependency graph trusts itself.

    Args:
        ranks: all of the graph.
        run: the process of the track.
        maker: makes the track.
        zero_ns: the moment 0 of the timeline, on the clock of the graph.
    """
    too_large = explain_size([rank.one.trace for rank in ranks])
    if too_large:
        return GraphTracks(f"left out: {too_large}", ())
    graph = build_graph([(rank.one.trace, rank.one.placing) for rank in ranks])
    trust = check_replay(graph)
    if trust.why_not:
        return GraphTracks(f"left out: {trust.why_not}", ())
    found = replay(graph)
    if found is None:
        return GraphTracks("left out: no steady step", ())
    path = find_critical_path(found)
    track = maker.make_track(
        run,
        "critical path",
        Order.ROWS,
        description="laid back from the end of the last step, one activity after the other",
    )
    note = (
        f"{path.steps} steps of {trust.measured_ms:,.3f} ms, replayed unchanged {trust.replayed_ms:,.3f} ms "
        f"({trust.off:+.2%}); known of the path: {path.own_ns.sum() / 1e6:,.3f} ms"
    )
    stretches = _list_path(path, [rank.process.name for rank in ranks], zero_ns)
    slices = lay_stretches(track, stretches, "critical path")
    return GraphTracks(note, (slices, *_lay_workers(graph, ranks, maker, zero_ns)))


def _lay_workers(
    graph: Graph,
    ranks: Sequence[RankTracks],
    maker: TrackMaker,
    zero_ns: int,
) -> Iterator[Slices]:
    """Lay when the loader's workers make batches: each at most since the host took the one before.

    Args:
        graph: the measured steps.
        ranks: all of the graph.
        maker: makes the tracks.
        zero_ns: the moment 0 of the timeline, on the clock of the graph.
    """
    activities = graph.activities
    is_batch = graph.find_kind(ActivityKind.WORKER)
    for at, rank in enumerate(ranks):
        rows = np.flatnonzero(is_batch & (graph.rank == at))
        if not len(rows):
            continue
        batches = union(activities.start_ns[rows] - zero_ns, activities.end_ns[rows] - zero_ns)
        track = maker.make_track(
            rank.process,
            "data loader's workers",
            Order.LOADER,
            description="a batch takes at most from when the host took the one before until it takes this one",
        )
        cut = cut_at(batches, (activities.start_ns[rows] - zero_ns).tolist())
        yield lay_covers(track, {"a batch": cut}, "loader worker", 0)


def _list_path(path: CriticalPath, names_of_ranks: Sequence[str], zero_ns: int) -> list[SingleSlice]:
    """List the activities of a critical path as they follow each other, until the measured end of the last.

    Args:
        path: the path.
        names_of_ranks: by place in the graph.
        zero_ns: the moment 0 of the timeline, on the clock of the graph.
    """
    graph = path.graph
    activities = graph.activities
    names = (*graph.names, "")
    phases = (*graph.phases, "")
    # an index of -1, of what all ranks share, finds the last name
    rank_names = (*names_of_ranks, "all ranks")
    end_ns = int(activities.end_ns[path.places[0]]) - zero_ns
    stretches = []
    for place, own_ns in zip(path.places.tolist(), path.own_ns.tolist()):
        kind = describe_kind(int(activities.kind[place]))
        arguments: dict[str, str | int] = {
            "rank": rank_names[int(graph.rank[place])],
            "lane": graph.lanes[int(activities.lane[place])].name,
            "kind": kind,
            "phase": phases[int(activities.phase[place])] or NO_PHASE,
        }
        start_ns = end_ns - own_ns
        name = names[int(activities.name[place])] or kind
        if own_ns:
            stretches.append(SingleSlice(start_ns, end_ns, name, arguments))
        end_ns = start_ns
    return stretches


@dataclass(frozen=True)
class StepCounters:
    """Makes counters of the steps that both the run's record and a trace hold."""

    recorded: Run
    rank: RankTracks  # whose steps place them in time
    run: TimelineProcess
    maker: TrackMaker

    def list_contents(self) -> Iterator[Counts]:
        """Make a counter of losses, and one of tokens per second."""
        yield from self._count("loss", CounterUnit.NATS, self.recorded.losses)
        length = self._find_sequence_length()
        if length:
            tokens = self.recorded.batch_sizes * length
            seconds = self.recorded.step_ms / 1e3
            yield from self._count("tokens per second", CounterUnit.TOKENS_PER_SECOND, tokens / seconds)

    def _find_sequence_length(self) -> int | None:
        """Tokens of a sample; None where the run does not say."""
        shape = self.recorded.plan.shape
        return shape.seq_length if shape else None

    def _count(self, name: str, unit: CounterUnit, values: Numbers) -> Iterator[Counts]:
        """Make a counter that takes the value of a step where the step begins.

        Args:
            name: of its track.
            unit: of its values.
            values: of each step of the record; NaN for unknown.
        """
        place_of_step = {number: place for place, number in enumerate(self.recorded.iterations.tolist())}
        times_ns = []
        found = []
        for step in self.rank.one.placing.steps:
            place = place_of_step.get(step.number) if step.number is not None else None
            if place is None or np.isnan(values[place]):
                continue
            times_ns.append(step.start_ns + self.rank.clock_ns)
            found.append(float(values[place]))
        if found:
            track = self.maker.make_track(self.run, name, Order.COUNTERS, counter=unit)
            yield Counts(track, np.array(times_ns, np.int64), np.array(found))
