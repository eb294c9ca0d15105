"""Kernels that take no longer than the hardware needs."""

import numpy as np

from megatron_lite.analysis.graph.edits.change import set_work
from megatron_lite.analysis.graph.graph import ActivityKind, Graph
from megatron_lite.analysis.intervals import Integers


def limit_kernels(
    graph: Graph,
    rank: int,
    rows: Integers,
    bound_ns: Integers,
) -> Graph:
    """Let kernels take their least time.

    Args:
        graph: the graph.
        rank: the place of the rank that runs them.
        rows: [k], rows of its trace.
        bound_ns: [k], the least time of each; a kernel that is faster stays as it is.
    """
    kernels = graph.find_kind(ActivityKind.KERNEL) & (graph.rank == rank)
    is_meant = np.isin(graph.activities.row, rows)
    numbers = np.flatnonzero(kernels & is_meant)
    order = np.argsort(rows, kind="stable")
    at = np.searchsorted(rows[order], graph.activities.row[numbers])
    least_ns = bound_ns[order][at]
    own_ns = graph.activities.work_ns[numbers]
    return set_work(graph, numbers, np.minimum(own_ns, least_ns))
