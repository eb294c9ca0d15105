"""Saving within steps: copies that it launches, and what follows the reading of a whole model's state."""

import re
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_lite.analysis.intervals import Cover, Flags, Integers, difference, union
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.time.host_causes import SEEN_AS
from megatron_lite.analysis.time.host_names import name_cause
from megatron_lite.analysis.time.time_results import NEVER_NS
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import NOT_TRAINING

SAVING = "save"  # the cause in host_causes.tsv; evaluating has it, too
DETACH = "aten::detach"
MIN_STATE_TENSORS = 4  # of a model
# what copies tensors that are written, and moves none of their values
COPYING = re.compile(
    r"aten::(detach|copy_|to|_to_copy|clone|contiguous|cpu|empty\w*|set_|view|as_strided|resize_|lift_fresh|alias|slice"
    r"|resolve_(conj|neg))$"
)


def find_saving_copies(one: RankFacts) -> Integers:
    """Find copies and memsets of steady steps that were launched while the host saved or evaluated, by names."""
    kinds = (Kind.PYTHON, Kind.ANNOTATION, Kind.OP)
    ranges = [one.rows_named(partial(_is_saving, seen_as=SEEN_AS[kind]), kind) for kind in kinds]
    copies = one.rows_named(lambda name: True, Kind.MEMCPY, Kind.MEMSET)
    by_names = one.launched_within(copies, np.sort(np.concatenate(ranges)))
    return np.union1d(by_names, one.in_phases(copies, *NOT_TRAINING))


def _is_saving(name: str, seen_as: str) -> bool:
    """Tell whether a name is of what saves or evaluates."""
    cause = name_cause(name, seen_as)
    return cause is not None and cause[0] == SAVING


@dataclass(frozen=True)
class ReadStates:
    """States of the whole model that are read in steady steps, as Module.state_dict() does, and what follows."""

    row: int  # of the first tensor that is read
    tensors: int  # of one state
    per_step: float  # states
    ms: float  # ms per step behind them without an operator that computes; with a GPU, while nothing computes there
    idle_ms: float  # of it, in which a GPU copies nothing either


def find_read_states(one: RankFacts) -> ReadStates | None:
    """Find states that are read in steady steps; None where there are none.

    Module.state_dict() detaches all parameters one after the other, with no operator between. What uses the values at
    once (an average of weights, a copy) computes behind it; what writes or sends them does not.
    """
    trace = one.trace
    parameters = _count_parameters(one)
    if not parameters:
        # a few results that are detached look like the state of a small model
        return None
    operators = trace.on_thread(trace.rows[Kind.OP], one.placing.main_thread)
    operators = operators[one.placing.operator[operators] < 0]
    first, last = _find_runs(trace.matching(DETACH.__eq__)[operators])
    is_state = last - first + 1 >= max(MIN_STATE_TENSORS, parameters)
    is_state &= one.placing.counts[operators[first]]
    first = first[is_state]
    last = last[is_state]
    if not len(first):
        return None
    behind = _find_time_behind(one, operators, operators[last])
    idle = behind
    if one.time.on_gpu:
        behind = difference(behind, trace.cover(one.compute_rows()))
        idle = difference(behind, trace.cover(one.work_rows()))
    return ReadStates(
        row=int(operators[first[0]]),
        tensors=int((last - first + 1).max()),
        per_step=one.per_step(first),
        ms=behind.length / 1e6 / one.steady_steps,
        idle_ms=idle.length / 1e6 / one.steady_steps,
    )


def _find_runs(flags: Flags) -> tuple[Integers, Integers]:
    """Find the first and the last place of each run of true ones: int64 [runs] each."""
    padded = np.concatenate(([False], flags, [False])).astype(np.int8)
    changes = np.flatnonzero(np.diff(padded))
    return changes[::2], changes[1::2] - 1


def _find_time_behind(one: RankFacts, operators: Integers, rows: Integers) -> Cover:
    """Find the time from the end of each of `rows` to the next operator that computes, or to the end of its step.

    Args:
        one: the rank.
        operators: of the main thread, those that stand in no other one, in order.
        rows: some of them, in steps.
    """
    events = one.trace.events
    computes = operators[~one.trace.matching(COPYING.match)[operators]]
    starts_ns = np.append(events.start_ns[computes], NEVER_NS)
    begin = events.end_ns[rows]
    following = starts_ns[np.searchsorted(starts_ns, begin)]
    step_ends = np.array([step.host_end_ns for step in one.time.steps])
    return union(begin, np.minimum(following, step_ends[one.placing.step[rows]]))


def _count_parameters(one: RankFacts) -> int:
    """Count the parameters that get a gradient, by the nodes that add them in a backward pass."""
    nodes = one.rows_named(lambda name: name.endswith("AccumulateGrad") and "evaluate" not in name, Kind.OP)
    passes = max(1.0, one.per_step(one.backward_ranges()))
    return int(one.per_step(nodes) / passes)
