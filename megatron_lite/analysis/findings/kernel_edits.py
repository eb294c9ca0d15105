"""Edits of kernels that take a part of their time, on all ranks: they run the same program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_lite.analysis.findings.base import Edit
from megatron_lite.analysis.graph.edits.kernels import limit_kernels
from megatron_lite.analysis.graph.graph import Graph
from megatron_lite.analysis.intervals import Integers, Numbers
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.run_facts import Facts


@dataclass(frozen=True)
class ShortenedKernels:
    """Kernels of a rank that take a part of their time."""

    rows: Integers  # [k], of the rank's trace
    kept: Numbers  # [k], the share of each one's time that is left


def shorten_kernels(
    facts: Facts,
    change: str,
    choose: Callable[[RankFacts], ShortenedKernels],
) -> Edit:
    """Build the edit of kernels that take a part of their time.

    Args:
        facts: the run.
        change: what is done to the program.
        choose: finds the kernels of a rank.
    """
    limits = []
    for place, rank in enumerate(facts.graph_ranks):
        chosen = choose(rank)
        least_ns = np.rint(rank.trace.lengths_ns(chosen.rows) * chosen.kept)
        limits.append(_Limits(place, chosen.rows, least_ns.astype(np.int64)))
    return Edit(change, partial(_limit_ranks, limits=limits))


@dataclass(frozen=True)
class _Limits:
    """Least times of a rank's kernels."""

    rank: int  # place of the rank in the graph
    rows: Integers  # [k]
    least_ns: Integers  # [k]


def _limit_ranks(graph: Graph, limits: Sequence[_Limits]) -> Graph:
    """Let the kernels of each rank take their least times."""
    for one in limits:
        graph = limit_kernels(graph, one.rank, one.rows, one.least_ns)
    return graph
