"""The events of a trace that count for its kernel figures."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

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
    def device(self) -> np.ndarray:
        """Rows of device work."""
        rows = self.trace.device_rows
        return rows[self.placing.counts[rows]]

    @cached_property
    def operators(self) -> np.ndarray:
        """Rows of operators."""
        rows = self.trace.rows[Kind.OP]
        return rows[self.placing.counts[rows]]

    @cached_property
    def spans(self) -> np.ndarray:
        """Rows of a backend's spans for collectives (gloo:all_reduce): without a GPU they are the communication."""
        rows = self.trace.rows[Kind.ANNOTATION]
        names = self.trace.events.name[rows]
        talks = {name: is_communication(self.trace.names[name]) for name in np.unique(names).tolist()}
        chosen = np.array([talks[name] for name in names.tolist()], bool)
        return rows[chosen & self.placing.counts[rows]] if len(rows) else rows

    @cached_property
    def ms(self) -> np.ndarray:
        """float [n]: each event's duration, divided by the number of steady steps."""
        return (self.trace.events.end_ns - self.trace.events.start_ns) / (1e6 * max(1, self.steps))


def heaviest(groups: np.ndarray, labels: np.ndarray, weights: np.ndarray, size: int) -> np.ndarray:
    """int64 [size]: for each group the label with the most weight; -1 for a group without any. Labels may be -1."""
    best = np.full(size, -1, np.int64)
    if not len(groups):
        return best
    wide = int(labels.max(initial=0)) + 2
    keys = groups.astype(np.int64) * wide + labels + 1
    if size * wide <= DENSE:
        sums = np.bincount(keys, weights, size * wide)
        pairs = np.flatnonzero(np.bincount(keys, minlength=size * wide))
        sums = sums[pairs]
    else:
        pairs, where = np.unique(keys, return_inverse=True)
        sums = np.bincount(where, weights, len(pairs))
    order = np.argsort(sums, kind="stable")  # the heaviest is written last
    best[pairs[order] // wide] = pairs[order] % wide - 1
    return best


def by_weight(weights: np.ndarray, calls: np.ndarray, second: np.ndarray | None = None) -> np.ndarray:
    """Groups that have calls, the heaviest first; `second` decides between equal ones."""
    order = np.lexsort((-(weights if second is None else second), -weights))
    return order[calls[order] > 0]
