"""How gradients are reduced beside backward: what the rules about it share."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.findings.seen.hidden import communication_rows, compute_rows, exposed
from megatron_lite.analysis.findings.seen.steady import in_phases, rows_named, steady_steps
from megatron_lite.analysis.run_facts import RankFacts
from megatron_lite.analysis.time.phase_names import known_phase
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase

BACKWARD, GRAD_SYNC = Phase.BACKWARD.value, Phase.GRAD_SYNC.value


@dataclass(frozen=True)
class Reduction:
    """Means per steady step."""

    collectives: float
    communication_ms: float  # durations added up
    tail_ms: float  # exposed after backward's last computation
    early_share: float  # of the communication: begun before that


def reduction_of(one: RankFacts) -> Reduction | None:
    """None without collectives of gradients, or where the trace does not say what backward is."""
    rows, steps = reduction_rows(one), one.placing.step
    backward = in_phases(one, compute_rows(one), BACKWARD)
    if not len(rows) or not len(backward):
        return None
    events = one.trace.events
    last = np.full(len(one.time.steps), -1, np.int64)  # per step, when backward's last computation ends
    np.maximum.at(last, steps[backward], events.end_ns[backward])
    rows = rows[last[steps[rows]] >= 0]
    limit, length = last[steps[rows]], events.end_ns[rows] - events.start_ns[rows]
    early = events.start_ns[rows] < limit
    alone = exposed(one, rows)
    ends = np.zeros(len(one.time.steps), np.int64)
    np.maximum.at(ends, steps[rows], events.end_ns[rows])
    seen = np.unique(steps[rows])
    tail = alone.within(last[seen], ends[seen]).sum()
    number = steady_steps(one)
    total = float(length.sum())
    return Reduction(
        len(rows) / number,
        total / 1e6 / number,
        float(tail) / 1e6 / number,
        float(length[early].sum()) / total if total else 0.0,
    )


def reduction_rows(one: RankFacts) -> np.ndarray:
    """Collectives of backward and of what is left of it after: those of logging and evaluating are no gradients."""
    return in_phases(one, communication_rows(one), BACKWARD, GRAD_SYNC)


def backward_ranges(one: RankFacts) -> np.ndarray:
    """Rows of backward's ranges on the host, one per micro-batch."""
    return rows_named(one, lambda name: known_phase(name) is Phase.BACKWARD, Kind.ANNOTATION)
