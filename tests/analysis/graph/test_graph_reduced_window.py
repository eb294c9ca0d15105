"""A reduced window against a plain pass over all of its activities, on random graphs."""

from dataclasses import fields

import numpy as np
import pytest

from megatron_lite.analysis.graph.graph import Activities, EdgeKind, Edges, Graph, Lane
from megatron_lite.analysis.graph.reduced_window import NEVER, ReducedWindow

HOSTS, STREAMS = 2, 2
COUNT = 400


def make_random_graph(seed: int) -> Graph:
    """Threads that launch on streams, wait for them and for each other; every lane in order, and some gaps in it."""
    draw = np.random.default_rng(seed)
    lane = draw.integers(0, HOSTS + STREAMS, COUNT)
    edges: list[tuple[int, int, EdgeKind]] = []
    last = dict.fromkeys(range(HOSTS + STREAMS), -1)
    for number, mine in enumerate(lane.tolist()):
        if last[mine] >= 0 and draw.random() < 0.95:
            edges.append((last[mine], number, EdgeKind.THREAD if mine < HOSTS else EdgeKind.STREAM))
        host = last[int(draw.integers(0, HOSTS))]
        stream = last[HOSTS + int(draw.integers(0, STREAMS))]
        if mine >= HOSTS and host >= 0 and draw.random() < 0.9:
            edges.append((host, number, EdgeKind.LAUNCH))
        if stream >= 0 and draw.random() < 0.05:
            edges.append((stream, number, EdgeKind.SYNC if mine < HOSTS else EdgeKind.EVENT))
        if mine < HOSTS and host >= 0 and draw.random() < 0.05:
            edges.append((host, number, EdgeKind.HANDOVER))
        last[mine] = number
    source, target, kind = (np.array(column) for column in zip(*edges))
    columns = {field.name: np.zeros(COUNT, np.int64) for field in fields(Activities)}
    columns |= {"lane": lane, "start_ns": np.arange(COUNT) * 10, "end_ns": np.arange(COUNT) * 10 + 5}
    columns |= {"work_ns": draw.integers(0, 50, COUNT), "delay_ns": draw.integers(0, 3, COUNT)}
    activities = Activities(**columns)
    made = Edges(
        source.astype(np.int32), target.astype(np.int32), kind.astype(np.uint8), draw.integers(0, 9, len(edges))
    )
    lanes = tuple(Lane(0, str(number)) for number in range(HOSTS + STREAMS))
    return Graph(lanes, (), (), activities, made, ())


def pass_plainly(graph: Graph, ends_ns: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ends, the edge that each activity waited for last), one activity after the other."""
    edges = graph.edges
    binding = np.full(len(graph.activities), -1)
    for number in places.tolist():
        ready = NEVER // 2
        for edge in np.flatnonzero(edges.target == number).tolist():
            moment = ends_ns[edges.source[edge]] + edges.lag_ns[edge]
            if moment > ready:
                ready = moment
                binding[number] = edge
        start = graph.activities.start_ns[number]
        if binding[number] >= 0:
            start = ready + graph.activities.delay_ns[number]
        ends_ns[number] = start + graph.activities.work_ns[number]
    return ends_ns[places], binding[places]


@pytest.mark.parametrize("seed", range(8))
def test_a_reduced_window_ends_as_all_of_its_activities_do(seed):
    graph = make_random_graph(seed)
    places = np.arange(60, COUNT)
    # half of what lies before the window is not known
    before_ns = np.where(np.arange(COUNT) % 2 == 0, graph.activities.end_ns, NEVER)
    expected_ns, binding = pass_plainly(graph, before_ns.copy(), places)
    reduced = ReducedWindow(graph, places)
    assert len(reduced.roots) < len(places) / 2
    roots = places[reduced.roots]
    fixed_ns = graph.activities.start_ns[roots] + graph.activities.work_ns[roots]
    root_ends_ns = reduced.compute(before_ns[reduced.outer], fixed_ns)
    ends_ns = reduced.find_ends(root_ends_ns, np.arange(len(places) + len(reduced.outer)))
    assert np.array_equal(ends_ns[: len(places)], expected_ns)
    assert np.array_equal(reduced.find_binding(ends_ns), binding)
