"""One rank's trace, what was made of it, and the measurements of its steady steps that rules and audit ask for."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.intervals import Cover, Integers, difference
from megatron_lite.analysis.kernels.kernel_results import RankKernels
from megatron_lite.analysis.kernels.kernel_words import is_communication
from megatron_lite.analysis.time.range_names import is_backward, known_phase
from megatron_lite.analysis.time.time_results import Placing, RankTime
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.phases import Phase
from megatron_lite.units import significant

LAYER_HOOKS = re.compile(r"FSDP::|FullyShardedDataParallel\._")  # come once per layer
MATTERS = 0.05  # of a step: less is hard to tell from the noise between steps, and not where to begin
MIN_SHARE_SHOWN = 0.01  # of a step, for causes that are cheap to remove
# Operators in which a host without a GPU may wait for communication; what computes inside them are operators, too.
WRAPPERS = re.compile(r"autograd::engine::evaluate_function|record_param_comms|c10d::|torch[.:]+distributed")


def _is_backward_pass(name: str) -> bool:
    """Is it a range around a whole backward pass, no hook of a layer's?"""
    return known_phase(name) is Phase.BACKWARD and not LAYER_HOOKS.match(name)


def in_ms(ms: float) -> str:
    """12.345 -> '12.3 ms', 0.0123 -> '0.012 ms'."""
    return f"{ms:,.1f} ms" if abs(ms) >= 1 else f"{significant(ms, 2)} ms"


@dataclass(frozen=True)
class RankFacts:
    """One rank's trace and what was made of it. Rows are numbers of events; figures are means per steady step."""

    trace: Trace
    time: RankTime
    kernels: RankKernels
    placing: Placing  # step, phase and operator of each event

    @cached_property
    def steady_steps(self) -> int:
        """How many steps the figures are means of; at least 1."""
        return max(1, len(self.time.steady_steps))

    def share(self, ms: float) -> float:
        """Of the mean steady step."""
        return ms / self.time.step_ms if self.time.step_ms > 0 else 0.0

    def of_step(self, ms: float) -> str:
        """'12.3 ms of each step of 100.0 ms (12%)'."""
        return f"{in_ms(ms)} of each step of {in_ms(self.time.step_ms)} ({self.share(ms):.1%})"

    def where(self, row: int | None = None) -> str:
        """ "rank 0, ProfilerStep#12 at 1,204.3 ms"."""
        words = [f"rank {self.time.rank}" if self.time.rank is not None else self.trace.source]
        if row is not None:
            index = int(self.placing.step[row])
            words += [self.time.steps[index].name] if 0 <= index < len(self.time.steps) else []
            words[-1] += f" at {self.trace.events.start_ns[row] / 1e6:,.1f} ms"
        return ", ".join(words)

    # --- rows of the steady steps

    def rows_named(self, test: Callable[[str], object], *kinds: Kind) -> Integers:
        """Those of these kinds whose name passes `test`, in order; each distinct name is asked once."""
        trace = self.trace
        rows = np.concatenate([trace.rows[kind] for kind in kinds])
        rows = np.sort(rows) if len(kinds) > 1 else rows
        return self.in_steady_steps(rows[trace.passing(test, *kinds)[trace.events.name[rows]]])

    def work_rows(self) -> Integers:
        """Kernels, copies and memsets; without a GPU operators."""
        return self.in_steady_steps(self.trace.device_rows if self.time.on_gpu else self.trace.rows[Kind.OP])

    def in_steady_steps(self, rows: Integers) -> Integers:
        """Those of `rows` that belong to a steady step."""
        return rows[self.placing.counts[rows]]

    def work_under(self, rows: Integers) -> Integers:
        """Device work that was launched inside the operators `rows`; without a GPU these operators themselves."""
        if not self.time.on_gpu:
            return rows
        work = self.work_rows()
        launcher = self.placing.operator[work]
        work, launcher = work[launcher >= 0], launcher[launcher >= 0]
        events = self.trace.events
        inside = self.trace.nest(rows).position_at(events.start_ns[launcher], events.thread[launcher]) >= 0
        found: Integers = work[inside]
        return found

    def communication_rows(self) -> Integers:
        """Collectives: kernels, or without a GPU the spans of gloo and kin."""
        return self.rows_named(is_communication, Kind.KERNEL if self.time.on_gpu else Kind.ANNOTATION)

    def compute_rows(self) -> Integers:
        """Kernels (without a GPU: operators) that are no communication."""
        kind = Kind.KERNEL if self.time.on_gpu else Kind.OP
        return self.rows_named(lambda name: not (WRAPPERS.match(name) or is_communication(name)), kind)

    def backward_ranges(self) -> Integers:
        """Backward's ranges on the host, one per micro-batch: those of the loop, without what they hold."""
        events = self.trace.events
        rows = self.rows_named(_is_backward_pass, Kind.ANNOTATION)
        rows = rows[events.thread[rows] == self.placing.main_thread]
        engine = self.trace.nest(np.flatnonzero(is_backward(self.trace)))
        rows = rows[engine.position_at(events.start_ns[rows], events.thread[rows]) < 0]
        nest = self.trace.nest(rows)
        return np.sort(nest.rows[nest.depth == 0])

    def in_phases(self, rows: Integers, *phases: str) -> Integers:
        """Those of `rows` that belong to one of the phases."""
        wanted = np.array([name in phases for name in self.placing.phases] + [False])
        found: Integers = rows[wanted[self.placing.phase[rows]]]
        return found

    # --- what rows amount to

    def per_step(self, rows: Integers) -> float:
        """How many there are in a step."""
        return len(rows) / self.steady_steps

    def per_step_ms(self, rows: Integers) -> float:
        """Durations added up."""
        events = self.trace.events
        return float((events.end_ns[rows] - events.start_ns[rows]).sum()) / 1e6 / self.steady_steps

    def covered_ms(self, rows: Integers) -> float:
        """Time in which any of the events runs."""
        return self.trace.cover(rows).length / 1e6 / self.steady_steps

    def find_exposed(self, rows: Integers) -> Cover:
        """When the events run and nothing computes."""
        return difference(self.trace.cover(rows), self.trace.cover(self.compute_rows()))

    def exposed_ms(self, rows: Integers) -> float:
        """Time in which the events run and nothing computes."""
        return self.find_exposed(rows).length / 1e6 / self.steady_steps

    def accumulation_ms(self) -> float:
        """Device work (without a GPU: host time) under AccumulateGrad nodes that add to a gradient.

        A single, larger micro-batch does not have it.
        """
        events = self.trace.events
        nodes = self.rows_named(lambda name: "AccumulateGrad" in name, Kind.OP)
        adding = self.rows_named(lambda name: name in ("aten::add_", "aten::add"), Kind.OP)
        inside = np.zeros(len(adding), bool)
        for thread in np.unique(events.thread[nodes]):  # nodes of one thread follow each other
            here = np.flatnonzero(events.thread[adding] == thread)
            cover = self.trace.cover(nodes[events.thread[nodes] == thread])
            inside[here] = cover.holds(events.start_ns[adding[here]])
        if not self.time.on_gpu:
            return self.covered_ms(adding[inside])
        rows = self.work_rows()
        return self.covered_ms(rows[np.isin(self.placing.operator[rows], adding[inside])])
