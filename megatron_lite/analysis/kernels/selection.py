"""The events of a trace that count for its kernel figures."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.intervals import Integers, Numbers
from megatron_lite.analysis.kernels.kernel_words import is_communication
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Kind, Trace

DENSE = 4_000_000  # pairs of group and label that are counted in one table; more are sorted


@dataclass(frozen=True)
class Selection:
    """Device work and operators of the steady steps."""

    trace: Trace
    placing: Placing

    @cached_property
    def steps(self) -> int:
        """How many steps are steady: sums are divided by it."""
        return int(self.placing.steady.sum())

    @cached_property
    def device(self) -> Integers:
        """Rows of device work."""
        rows = self.trace.device_rows
        return rows[self.placing.counts[rows]]

    @cached_property
    def operators(self) -> Integers:
        """Rows of the selected operators."""
        rows = self.trace.rows[Kind.OP]
        return rows[self.placing.counts[rows]]

    @cached_property
    def spans(self) -> Integers:
        """Rows of a backend's spans for collectives (gloo:all_reduce): without a GPU they are the communication."""
        rows = self.trace.find_named(is_communication, Kind.ANNOTATION)
        return rows[self.placing.counts[rows]]

    @cached_property
    def ms(self) -> Numbers:
        """Duration of each event, divided by the number of steady steps; float [n]."""
        lengths_ns = self.trace.events.end_ns - self.trace.events.start_ns
        return lengths_ns / (1e6 * max(1, self.steps))


def heaviest(
    groups: Integers,
    labels: Integers,
    weights: Numbers,
    size: int,
) -> Integers:
    """Find for each group the label with the most weight.

    Args:
        groups: [k], of some events.
        labels: [k]; may be -1.
        weights: [k].
        size: how many groups there are.

    Returns:
        int64 [size]; -1 for a group without any event.
    """
    best = np.full(size, -1, np.int64)
    if not len(groups):
        return best
    # group and label, -1 or more, as one number
    wide = int(labels.max(initial=0)) + 2
    keys = groups.astype(np.int64) * wide + labels + 1
    if size * wide <= DENSE:
        counts = np.bincount(keys, minlength=size * wide)
        pairs = np.flatnonzero(counts)
        sums = np.bincount(keys, weights, size * wide)[pairs]
    else:
        pairs, pair_of_key = np.unique(keys, return_inverse=True)
        sums = np.bincount(pair_of_key, weights, len(pairs))
    # the heaviest is written last, and stays
    pairs = pairs[np.argsort(sums, kind="stable")]
    best[pairs // wide] = pairs % wide - 1
    return best


def by_weight(
    weights: Numbers | Integers,
    calls: Integers,
    second: Numbers | Integers | None = None,
) -> Integers:
    """Order groups by weight.

    Args:
        weights: [g].
        calls: [g], how many each group has.
        second: [g], decides between equal ones.

    Returns:
        Groups that have calls, the heaviest first.
    """
    if second is None:
        order = np.argsort(-weights, kind="stable")
    else:
        order = np.lexsort((-second, -weights))
    return order[calls[order] > 0]
