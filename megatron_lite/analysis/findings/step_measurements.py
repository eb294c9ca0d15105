"""Measurements of a trace's steady steps that several rules share, and how numbers are written."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Cover, difference, union
from megatron_lite.analysis.kernels.roles import is_communication
from megatron_lite.analysis.run_facts import RankFacts
from megatron_lite.analysis.time.find_phases import known_phase
from megatron_lite.analysis.trace.columns import Kind
from megatron_lite.phases import Phase

# --- what rules share: events of the steady steps, milliseconds per step, and how they are written


MATTERS = 0.05  # of a step: less is hard to tell from the noise between steps, and not where to begin
MIN_SHARE_SHOWN = 0.01  # of a step, for causes that are cheap to remove


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


def per_step_ms(one: RankFacts, rows: np.ndarray) -> float:
    """Durations added up, per steady step."""
    events = one.trace.events
    return float((events.end_ns[rows] - events.start_ns[rows]).sum()) / 1e6 / steady_steps(one)


def in_phases(one: RankFacts, rows: np.ndarray, *phases: str) -> np.ndarray:
    """Those of `rows` that belong to one of the phases."""
    wanted = np.array([name in phases for name in one.placing.phases] + [False])
    return rows[wanted[one.placing.phase[rows]]]


def share(ms: float, one: RankFacts) -> float:
    """Of the mean steady step."""
    return ms / one.time.step_ms if one.time.step_ms > 0 else 0.0


def where(one: RankFacts, row: int | None = None) -> str:
    """ "rank 0, ProfilerStep#12 at 1,204.3 ms"."""
    words = [f"rank {one.time.rank}" if one.time.rank is not None else one.trace.source]
    if row is not None:
        index = int(one.placing.step[row])
        words += [one.time.steps[index].name] if 0 <= index < len(one.time.steps) else []
        words[-1] += f" at {one.trace.events.start_ns[row] / 1e6:,.1f} ms"
    return ", ".join(words)


def counted(number: float, what: str) -> str:
    """'1 wait', '12 waits', '0.5 waits'."""
    return f"{number:,.3g} {what}" + ("" if number == 1 else "s")


def in_ms(ms: float) -> str:
    """12.345 -> '12.3 ms', 0.0123 -> '0.012 ms'."""
    return f"{ms:,.1f} ms" if abs(ms) >= 1 else f"{ms:.2g} ms"


def of_step(ms: float, one: RankFacts) -> str:
    """'12.3 ms of each step of 100.0 ms (12%)'."""
    return f"{in_ms(ms)} of each step of {in_ms(one.time.step_ms)} ({share(ms, one):.1%})"


# --- what nothing hides: device time of some events while no kernel computes


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


# --- how gradients are reduced beside backward: what the rules about it share


BACKWARD, GRAD_SYNC = Phase.BACKWARD.value, Phase.GRAD_SYNC.value


@dataclass(frozen=True)
class Reduction:
    """Means per steady step."""

    collectives: float
    communication_ms: float  # durations added up
    tail_ms: float  # exposed after backward's last computation
    early_share: float  # of the communication: begun before that


def measure_reduction(one: RankFacts) -> Reduction | None:
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


# --- time of adding gradients up over micro-batches: work that a single, larger micro-batch does not have


NODE = "AccumulateGrad"


def micro_batches_seen(one: RankFacts) -> float:
    """Backward ranges per steady step; 0 where the trace has none."""
    return len(backward_ranges(one)) / steady_steps(one)


def accumulation_ms(one: RankFacts) -> float:
    """Per step: device work (without a GPU: host time) under AccumulateGrad nodes that add to a gradient."""
    nodes = rows_named(one, lambda name: NODE in name, Kind.OP)
    adding = rows_named(one, lambda name: name in ("aten::add_", "aten::add"), Kind.OP)
    inside = adding[_within(one, adding, nodes)]
    if not one.time.on_gpu:
        return covered(one, inside).length / 1e6 / steady_steps(one)
    rows = work_rows(one)
    return covered(one, rows[np.isin(one.placing.operator[rows], inside)]).length / 1e6 / steady_steps(one)


def _within(one: RankFacts, rows: np.ndarray, outer: np.ndarray) -> np.ndarray:
    """bool [k]: does one of `outer`, which follow each other on a thread, hold the row?"""
    events = one.trace.events
    held = np.zeros(len(rows), bool)
    for thread in np.unique(events.thread[outer]):
        mine = outer[events.thread[outer] == thread]
        here = np.flatnonzero(events.thread[rows] == thread)
        held[here] = covered(one, mine).holds(events.start_ns[rows[here]])
    return held
