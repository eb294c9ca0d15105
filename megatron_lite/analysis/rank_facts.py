"""Facts of one rank: its trace, what was made of it, and measurements of its steady steps that rules ask for."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.intervals import Cover, Flags, Integers, difference
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
    """Tell whether a name is of a range around a whole backward pass, and of no hook of a layer."""
    return known_phase(name) is Phase.BACKWARD and not LAYER_HOOKS.match(name)


def _is_compute(name: str) -> bool:
    """Tell whether a name is of an event that computes, and neither communicates nor waits for what does."""
    return not (WRAPPERS.match(name) or is_communication(name))


def in_ms(ms: float) -> str:
    """Write a time: "12.3 ms" of 12.345, "0.012 ms" of 0.0123."""
    return f"{ms:,.1f} ms" if abs(ms) >= 1 else f"{significant(ms, 2)} ms"


@dataclass(frozen=True)
class EventPlace:
    """Where an event is: words for people, and the event itself for programs."""

    words: str  # "rank 0, ProfilerStep#12 at 1,204.3 ms"
    source: str  # the trace, by its name
    row: int | None = None  # of the trace's events; None: the words name the rank only

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class RankFacts:
    """A rank's trace and what was made of it. Rows are numbers of events; figures are means per steady step."""

    trace: Trace
    time: RankTime
    kernels: RankKernels
    placing: Placing  # step, phase and operator of each event

    @cached_property
    def steady_steps(self) -> int:
        """How many steps the figures are means of; at least 1."""
        return max(1, len(self.time.steady_steps))

    def share(self, ms: float) -> float:
        """Compute a time's share of the mean steady step."""
        return ms / self.time.step_ms if self.time.step_ms > 0 else 0.0

    def of_step(self, ms: float) -> str:
        """Write a time and its share: "12.3 ms of each step of 100.0 ms (12.3%)"."""
        return f"{in_ms(ms)} of each step of {in_ms(self.time.step_ms)} ({self.share(ms):.1%})"

    def where(self, row: int | None = None) -> EventPlace:
        """Write where an event is: "rank 0, ProfilerStep#12 at 1,204.3 ms"; without a row the rank only."""
        rank = self.time.rank
        words = self.trace.source if rank is None else f"rank {rank}"
        if row is None:
            return EventPlace(words, self.trace.source, None)
        index = int(self.placing.step[row])
        if 0 <= index < len(self.time.steps):
            words += f", {self.time.steps[index].name}"
        start_ms = self.trace.events.start_ns[row] / 1e6
        return EventPlace(f"{words} at {start_ms:,.1f} ms", self.trace.source, int(row))

    # --- rows of the steady steps

    def rows_named(self, test: Callable[[str], object], *kinds: Kind) -> Integers:
        """Find events of these kinds whose name passes `test`, in order; each distinct name is asked once."""
        trace = self.trace
        rows = np.concatenate([trace.rows[kind] for kind in kinds])
        if len(kinds) > 1:
            rows = np.sort(rows)
        passes = trace.passing(test, *kinds)
        is_named = passes[trace.events.name[rows]]
        return self.in_steady_steps(rows[is_named])

    def work_rows(self) -> Integers:
        """Kernels, copies and memsets; without a GPU operators."""
        rows = self.trace.device_rows if self.time.on_gpu else self.trace.rows[Kind.OP]
        return self.in_steady_steps(rows)

    def in_steady_steps(self, rows: Integers) -> Integers:
        """Keep those of `rows` that belong to a steady step."""
        counts = self.placing.counts[rows]
        return rows[counts]

    def work_under(self, rows: Integers) -> Integers:
        """Device work that was launched inside the operators `rows`; without a GPU these operators themselves."""
        if not self.time.on_gpu:
            return rows
        work = self.work_rows()
        launched = work[self.placing.operator[work] >= 0]
        launcher = self.placing.operator[launched]
        is_under = self._lies_in(launcher, rows)
        found: Integers = launched[is_under]
        return found

    def launched_within(self, work: Integers, ranges: Integers) -> Integers:
        """Keep what of the device work `work` was launched inside of one of `ranges`, on its thread."""
        launch = self.trace.launch_of[work]
        launched = work[launch >= 0]
        is_within = self._lies_in(launch[launch >= 0], ranges)
        found: Integers = launched[is_within]
        return found

    def _lies_in(self, rows: Integers, ranges: Integers) -> Flags:
        """Tell of each event whether it begins inside one of `ranges` on its thread."""
        events = self.trace.events
        position = self.trace.nest(ranges).position_at(events.start_ns[rows], events.thread[rows])
        inside: Flags = position >= 0
        return inside

    def communication_rows(self) -> Integers:
        """Collectives: kernels, or without a GPU the spans of gloo and kin."""
        kind = Kind.KERNEL if self.time.on_gpu else Kind.ANNOTATION
        return self.rows_named(is_communication, kind)

    def compute_rows(self) -> Integers:
        """Kernels (without a GPU: operators) that are no communication."""
        kind = Kind.KERNEL if self.time.on_gpu else Kind.OP
        return self.rows_named(_is_compute, kind)

    def backward_ranges(self) -> Integers:
        """Backward's ranges on the host, one per micro-batch: those of the loop, without what they hold."""
        threads = self.trace.events.thread
        rows = self.rows_named(_is_backward_pass, Kind.ANNOTATION)
        is_main = threads[rows] == self.placing.main_thread
        rows = rows[is_main]
        engine = np.flatnonzero(is_backward(self.trace))
        rows = rows[~self._lies_in(rows, engine)]
        nest = self.trace.nest(rows)
        outermost = nest.rows[nest.depth == 0]
        return np.sort(outermost)

    def in_phases(self, rows: Integers, *phases: str) -> Integers:
        """Keep those of `rows` that belong to one of the phases."""
        is_wanted = [name in phases for name in self.placing.phases]
        # the last entry is for -1, what is in no phase
        wanted = np.array([*is_wanted, False])
        found: Integers = rows[wanted[self.placing.phase[rows]]]
        return found

    # --- what rows amount to

    def per_step(self, rows: Integers) -> float:
        """Count the events of a step."""
        return len(rows) / self.steady_steps

    def per_step_ms(self, rows: Integers) -> float:
        """Add up durations, ms of a step."""
        events = self.trace.events
        lengths_ns = events.end_ns[rows] - events.start_ns[rows]
        return float(lengths_ns.sum()) / 1e6 / self.steady_steps

    def covered_ms(self, rows: Integers) -> float:
        """Measure the time in which any of the events runs, ms of a step."""
        return self.trace.cover(rows).length / 1e6 / self.steady_steps

    def find_exposed(self, rows: Integers) -> Cover:
        """Find when the events run and nothing computes."""
        computing = self.trace.cover(self.compute_rows())
        return difference(self.trace.cover(rows), computing)

    def exposed_ms(self, rows: Integers) -> float:
        """Measure the time in which the events run and nothing computes, ms of a step."""
        return self.find_exposed(rows).length / 1e6 / self.steady_steps

    def accumulation_ms(self) -> float:
        """Measure device work (without a GPU: host time) under AccumulateGrad nodes that add to a gradient.

        Milliseconds of a step. A single, larger micro-batch does not have it.
        """
        events = self.trace.events
        nodes = self.rows_named(lambda name: "AccumulateGrad" in name, Kind.OP)
        adding = self.rows_named(lambda name: name in ("aten::add_", "aten::add"), Kind.OP)
        inside = np.zeros(len(adding), bool)
        # nodes of one thread follow each other
        node_threads = events.thread[nodes]
        for thread in np.unique(node_threads):
            cover = self.trace.cover(nodes[node_threads == thread])
            here = np.flatnonzero(events.thread[adding] == thread)
            start_ns = events.start_ns[adding[here]]
            inside[here] = cover.holds(start_ns)
        operators = adding[inside]
        if not self.time.on_gpu:
            return self.covered_ms(operators)
        rows = self.work_rows()
        launcher = self.placing.operator[rows]
        is_launched = np.isin(launcher, operators)
        return self.covered_ms(rows[is_launched])
