"""A faster loader: batches in less time, or made by workers beside the steps."""

from megatron_lite.analysis.graph.edits.change import measure_most_per_step, raise_floor, scale_work, set_work
from megatron_lite.analysis.graph.graph import ActivityKind, Graph


def speed_up_loader(graph: Graph, factor: float) -> Graph:
    """Let the loader, or its workers, make batches so many times as fast.

    Args:
        graph: the graph.
        factor: 2 for half of the time; twice as many workers are twice as fast where each has a core.
    """
    loads = graph.find_kind(ActivityKind.LOADER, ActivityKind.WORKER)
    return scale_work(graph, loads, 1 / factor)


def use_workers(graph: Graph, workers: int) -> Graph:
    """Let workers make the batches that the main thread makes.

    The main thread then takes no time for them, and a step takes at least what a batch takes, divided by the workers.
    That each of them has a core of its own, and what the main thread takes to get a finished batch, the graph does not
    know.

    Args:
        graph: a graph whose main thread is in the loader.
        workers: how many there are, at least 1.
    """
    loads = graph.find_kind(ActivityKind.LOADER)
    batch_ns = measure_most_per_step(graph, loads)
    return raise_floor(set_work(graph, loads, 0), batch_ns / workers)
