"""What nothing hides: device time of some events while no kernel computes."""

import re

import numpy as np

from megatron_lite.analysis.findings.seen.steady import rows_named, steady_steps
from megatron_lite.analysis.intervals import Cover, difference, union
from megatron_lite.analysis.kernels.roles import is_communication
from megatron_lite.analysis.run_facts import RankFacts
from megatron_lite.analysis.trace.columns import Kind

# operators in which a host without a GPU may wait for communication; what computes inside them are operators, too
WRAPPERS = re.compile(r"autograd::engine::evaluate_function|record_param_comms|c10d::|torch[.:]+distributed")


def covered(one: RankFacts, rows: np.ndarray) -> Cover:
    """The union of the events' intervals."""
    return union(one.trace.events.start_ns[rows], one.trace.events.end_ns[rows])


def communication_rows(one: RankFacts) -> np.ndarray:
    """Collectives of the steady steps: kernels, or without a GPU the spans of gloo and kin."""
    return rows_named(one, is_communication, Kind.KERNEL if one.time.on_gpu else Kind.ANNOTATION)


def compute_rows(one: RankFacts) -> np.ndarray:
    """Kernels (without a GPU: operators) of the steady steps that are no communication."""
    kind = Kind.KERNEL if one.time.on_gpu else Kind.OP
    return rows_named(one, lambda name: not (WRAPPERS.match(name) or is_communication(name)), kind)


def exposed(one: RankFacts, rows: np.ndarray) -> Cover:
    """When the events run and nothing computes."""
    return difference(covered(one, rows), covered(one, compute_rows(one)))


def exposed_ms(one: RankFacts, rows: np.ndarray) -> float:
    """The same, per steady step."""
    return exposed(one, rows).length / 1e6 / steady_steps(one)
