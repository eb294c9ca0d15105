"""Cores that a backend's threads take from the main thread, on a machine without a device."""

import numpy as np

from megatron_lite.analysis.graph.edits.change import set_work
from megatron_lite.analysis.graph.graph import ActivityKind, Graph
from megatron_lite.analysis.graph.replay import find_window
from megatron_lite.analysis.intervals import Cover, Flags, Integers, difference, union


def give_back_cores(graph: Graph, left_out: Integers) -> Graph:
    """Let main threads have the cores that transfers took which are left out.

    For how long a main thread was ready and had no core the trace's header says. Of that, what operators and Python
    lose beside transfers is in proportion to the time that they have transfers beside them, and at most that time. That
    other programs took the cores is not in the graph.

    Args:
        graph: the graph, before the transfers are left out.
        left_out: numbers of transfers.
    """
    window = find_window(graph)
    if window is None or graph.on_device:
        return graph
    inside = window.find_inside(graph)
    transfers = inside & graph.find_kind(ActivityKind.TRANSFER)
    is_left = transfers.copy()
    is_left[left_out] = False
    computes = graph.find_kind(ActivityKind.OPERATOR, ActivityKind.PYTHON)
    for rank, wait_ns in enumerate(graph.core_wait_ns):
        is_mine = graph.rank == rank
        hosts = np.flatnonzero(computes & inside & is_mine)
        every = _cover(graph, transfers & is_mine)
        left = _cover(graph, is_left & is_mine)
        beside_ns = _measure_beside(graph, hosts, every)
        freed_ns = _measure_beside(graph, hosts, difference(every, left))
        lost = wait_ns * window.steps / max(beside_ns.sum(), 1)
        given_ns = freed_ns * min(lost, 1.0)
        works_ns = graph.activities.work_ns[hosts] - given_ns
        graph = set_work(graph, hosts, np.rint(works_ns))
    return graph


def _cover(graph: Graph, chosen: Flags) -> Cover:
    """When any of the chosen activities was under way, measured."""
    start_ns = graph.activities.start_ns[chosen]
    end_ns = graph.activities.end_ns[chosen]
    return union(start_ns, end_ns)


def _measure_beside(
    graph: Graph,
    hosts: Integers,
    cover: Cover,
) -> Integers:
    """Measure for how many ns of each activity a cover lasts.

    Args:
        graph: the graph.
        hosts: [k], activities.
        cover: on the clock of all ranks.
    """
    start_ns = graph.activities.start_ns[hosts]
    end_ns = graph.activities.end_ns[hosts]
    return cover.within(start_ns, end_ns)
