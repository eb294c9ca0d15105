"""Measurements of a trace's steady steps that several rules share: events, milliseconds per step, what nothing hides."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.findings.run_settings import splits_model
from megatron_lite.analysis.intervals import Cover, difference, union
from megatron_lite.analysis.kernels.roles import is_communication
from megatron_lite.analysis.run_facts import Facts, RankFacts
from megatron_lite.analysis.time.find_phases import known_phase
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase

BACKWARD, GRAD_SYNC = Phase.BACKWARD.value, Phase.GRAD_SYNC.value
# Operators in which a host without a GPU may wait for communication; what computes inside them are operators, too.
WRAPPERS = re.compile(r"autograd::engine::evaluate_function|record_param_comms|c10d::|torch[.:]+distributed")


def steady_steps(one: RankFacts) -> int:
    """How many steps the figures are means of; at least 1."""
    return max(1, sum(step.steady for step in one.time.steps))


def rows_named(one: RankFacts, test: Callable[[str], object], *kinds: Kind) -> np.ndarray:
    """Rows of the steady steps of these kinds whose name passes `test`, in order; each distinct name is asked once."""
    trace = one.trace
    rows = trace.rows[kinds[0]] if len(kinds) == 1 else np.sort(np.concatenate([trace.rows[kind] for kind in kinds]))
    return _in_steady_steps(one, rows[trace.passing(test, *kinds)[trace.events.name[rows]]])


def work_rows(one: RankFacts) -> np.ndarray:
    """Kernels, copies and memsets of the steady steps; without a GPU their operators."""
    return _in_steady_steps(one, one.trace.device_rows if one.time.on_gpu else one.trace.rows[Kind.OP])


def _in_steady_steps(one: RankFacts, rows: np.ndarray) -> np.ndarray:
    flags = np.array([step.steady for step in one.time.steps] + [False])  # the last one is for -1: outside all steps
    return rows[flags[one.placing.step[rows]]]


def in_phases(one: RankFacts, rows: np.ndarray, *phases: str) -> np.ndarray:
    """Those of `rows` that belong to one of the phases."""
    wanted = np.array([name in phases for name in one.placing.phases] + [False])
    return rows[wanted[one.placing.phase[rows]]]


def per_step(one: RankFacts, rows: np.ndarray) -> float:
    """How many there are in a steady step."""
    return len(rows) / steady_steps(one)


def per_step_ms(one: RankFacts, rows: np.ndarray) -> float:
    """Durations added up, per steady step."""
    events = one.trace.events
    return float((events.end_ns[rows] - events.start_ns[rows]).sum()) / 1e6 / steady_steps(one)


def _cover(one: RankFacts, rows: np.ndarray) -> Cover:
    return union(one.trace.events.start_ns[rows], one.trace.events.end_ns[rows])


def covered_ms(one: RankFacts, rows: np.ndarray) -> float:
    """Time in which any of the events runs, per steady step."""
    return _cover(one, rows).length / 1e6 / steady_steps(one)


def _exposed(one: RankFacts, rows: np.ndarray) -> Cover:
    """When the events run and nothing computes."""
    return difference(_cover(one, rows), _cover(one, compute_rows(one)))


def exposed_ms(one: RankFacts, rows: np.ndarray) -> float:
    """Time in which the events run and nothing computes, per steady step."""
    return _exposed(one, rows).length / 1e6 / steady_steps(one)


def communication_rows(one: RankFacts) -> np.ndarray:
    """Collectives of the steady steps: kernels, or without a GPU the spans of gloo and kin."""
    return rows_named(one, is_communication, Kind.KERNEL if one.time.on_gpu else Kind.ANNOTATION)


def compute_rows(one: RankFacts) -> np.ndarray:
    """Kernels (without a GPU: operators) of the steady steps that are no communication."""
    kind = Kind.KERNEL if one.time.on_gpu else Kind.OP
    return rows_named(one, lambda name: not (WRAPPERS.match(name) or is_communication(name)), kind)


def reduction_rows(facts: Facts, one: RankFacts) -> np.ndarray:
    """Collectives of backward and of what is left of it after: those of logging and evaluating are no gradients.

    None where ranks split layers or have stages of a pipeline: what they exchange within those is not told from gradients.
    """
    if splits_model(facts):
        return np.empty(0, np.int64)
    return in_phases(one, communication_rows(one), BACKWARD, GRAD_SYNC)


@dataclass(frozen=True)
class Reduction:
    """How gradients are reduced beside backward; means per steady step."""

    collectives: float
    communication_ms: float  # durations added up
    tail_ms: float  # exposed after backward's last computation
    early_share: float  # of the communication: begun before that


def measure_reduction(facts: Facts, one: RankFacts) -> Reduction | None:
    """None without collectives of gradients, or where the trace does not say what backward is."""
    rows, steps = reduction_rows(facts, one), one.placing.step
    backward = in_phases(one, compute_rows(one), BACKWARD)
    if not len(rows) or not len(backward):
        return None
    events = one.trace.events
    computed, reduced = np.full(len(one.time.steps), -1, np.int64), np.zeros(len(one.time.steps), np.int64)
    np.maximum.at(computed, steps[backward], events.end_ns[backward])  # per step, the end of backward's computing
    rows = rows[computed[steps[rows]] >= 0]
    np.maximum.at(reduced, steps[rows], events.end_ns[rows])
    seen = np.unique(steps[rows])
    length, early = events.end_ns[rows] - events.start_ns[rows], events.start_ns[rows] < computed[steps[rows]]
    total, number = float(length.sum()), steady_steps(one)
    return Reduction(
        collectives=len(rows) / number,
        communication_ms=total / 1e6 / number,
        tail_ms=float(_exposed(one, rows).within(computed[seen], reduced[seen]).sum()) / 1e6 / number,
        early_share=float(length[early].sum()) / total if total else 0.0,
    )


def backward_ranges(one: RankFacts) -> np.ndarray:
    """Rows of backward's ranges on the host, one per micro-batch."""
    return rows_named(one, lambda name: known_phase(name) is Phase.BACKWARD, Kind.ANNOTATION)


def accumulation_ms(one: RankFacts) -> float:
    """Per step: device work (without a GPU: host time) under AccumulateGrad nodes that add to a gradient.

    A single, larger micro-batch does not have it.
    """
    events = one.trace.events
    nodes = rows_named(one, lambda name: "AccumulateGrad" in name, Kind.OP)
    adding = rows_named(one, lambda name: name in ("aten::add_", "aten::add"), Kind.OP)
    inside = np.zeros(len(adding), bool)
    for thread in np.unique(events.thread[nodes]):  # nodes of one thread follow each other
        here = np.flatnonzero(events.thread[adding] == thread)
        cover = _cover(one, nodes[events.thread[nodes] == thread])
        inside[here] = cover.holds(events.start_ns[adding[here]])
    if not one.time.on_gpu:
        return covered_ms(one, adding[inside])
    rows = work_rows(one)
    return covered_ms(one, rows[np.isin(one.placing.operator[rows], adding[inside])])
