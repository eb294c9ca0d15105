"""Graphs of made traces, and what they share in tests."""

from pathlib import Path

import numpy as np

from megatron_lite.analysis.graph.build import build_graph
from megatron_lite.analysis.graph.graph import ActivityKind, Graph
from megatron_lite.analysis.graph.replay import Replay, check_replay, replay
from support.trace_maker import MadeTrace, place


def make_graph(folder: Path, *ranks: MadeTrace) -> Graph:
    """The graph of made traces; holds what is true of every graph."""
    graph = build_graph([place(made, folder / str(at)) for at, made in enumerate(ranks)])
    activities = graph.activities
    assert (activities.work_ns >= 0).all()
    assert (activities.delay_ns >= 0).all()
    assert (graph.edges.lag_ns >= 0).all()
    assert (graph.edges.source < graph.edges.target).all()
    check_first_pass(graph)
    return graph


def check_first_pass(graph: Graph) -> None:
    """With measured values and measured beginnings every activity begins and ends when it did."""
    ready = np.full(len(graph.activities), -1)
    np.maximum.at(ready, graph.edges.target, graph.activities.end_ns[graph.edges.source] + graph.edges.lag_ns)
    waits = ready >= 0
    starts = (ready + graph.activities.delay_ns)[waits]
    assert (starts == graph.activities.start_ns[waits]).all()


def step_us(graph: Graph) -> float:
    """The step of a replay, us."""
    return run(graph).step_ns / 1e3


def run(graph: Graph) -> Replay:
    """A replay, which there is."""
    found = replay(graph)
    assert found is not None
    return found


def measured_us(graph: Graph) -> float:
    return check_replay(graph).measured_ms * 1e3


def lengths_us(graph: Graph, kind: ActivityKind) -> list[float]:
    """Work of the activities of a kind, us."""
    return (graph.activities.work_ns[graph.find_kind(kind)] / 1e3).tolist()
