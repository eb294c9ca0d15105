"""Describes the trace of a rank as the graph needs it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.graph.bucket_moves import find_bucket_moves
from megatron_lite.analysis.graph.recomputation import find_recomputation
from megatron_lite.analysis.intervals import NOTHING, Cover, Flags, Integers, Nesting, joined
from megatron_lite.analysis.kernels.kernel_names import short_name
from megatron_lite.analysis.ranks.calls import HANDED_OVER, Calls
from megatron_lite.analysis.time.host_names import CAUSES
from megatron_lite.analysis.time.idle_gaps import HostActivity, find_host_activity
from megatron_lite.analysis.time.time_results import Placing, Step
from megatron_lite.analysis.trace.columns import Kind, Numbered, Trace

# other causes are work of the phase that they are in; waiting for other processes is what edges tell
NAMED_WORK = tuple(cause for cause in CAUSES if cause not in ("data_wait", "process_wait", "cpu_optimizer"))


@dataclass(frozen=True)
class RankInput:
    """A rank whose trace becomes a part of the graph."""

    at: int  # place among the graph's ranks
    trace: Trace  # its device work by the host's clock
    placing: Placing
    device_lead_ns: int  # by which device work stood later in the file
    calls: Calls
    asked_ns: Integers  # [c], when the host asked for a send or receive that was through; -1: it waited for it
    clock_ns: int  # what to add to the trace's times for those of all ranks
    first_step: int  # number of the trace's first step, among the steps of all ranks
    phases: Numbered[str]  # of all ranks; grows
    names: Numbered[str]  # of all ranks; grows

    @property
    def on_gpu(self) -> bool:
        """Whether the trace holds work of a device."""
        return len(self.trace.device_rows) > 0

    @cached_property
    def activity(self) -> HostActivity:
        """Activity of the threads that drive the device."""
        return find_host_activity(self.trace, self.placing)

    @cached_property
    def loading(self) -> Cover:
        """When the host is in the loader."""
        return self.activity.covers["data_wait"]

    @cached_property
    def named(self) -> Cover:
        """When the host does something else that names tell."""
        covers = [self.activity.covers[cause] for cause in NAMED_WORK]
        return joined(NOTHING, *covers)

    def find_cause(self, moment: Integers) -> Integers:
        """Find what names tell of what the host does at each moment: int64 [k], index into CAUSES; -1: nothing."""
        found = np.full(len(moment), -1, np.int64)
        for cause in NAMED_WORK:
            is_cause = self.activity.covers[cause].holds(moment)
            found[is_cause] = CAUSES.index(cause)
        return found

    @cached_property
    def recomputing(self) -> dict[int, Cover]:
        """When each thread that does so computes forward once more, inside backward."""
        return find_recomputation(self.trace)

    @cached_property
    def filling_buckets(self) -> dict[int, Cover]:
        """When each thread that does so moves gradients into buckets or back."""
        return find_bucket_moves(self.trace)

    @cached_property
    def step_ns(self) -> float:
        """The mean steady step, ns."""
        if not self._steady_steps:
            return 0.0
        lengths = [step.end_ns - step.start_ns for step in self._steady_steps]
        return float(np.mean(lengths))

    @cached_property
    def first_steady_ns(self) -> int:
        """When the first steady step starts."""
        starts = [step.start_ns for step in self._steady_steps]
        return min(starts, default=0) - self.device_lead_ns

    @cached_property
    def _steady_steps(self) -> list[Step]:
        """The steps that count."""
        return [step for step in self.placing.steps if step.steady]

    @cached_property
    def launches(self) -> Integers:
        """Rows of the calls that launch device work of the trace, in order."""
        launches = self.trace.launch_of[self.trace.device_rows]
        return np.unique(launches[launches >= 0])

    @cached_property
    def operators(self) -> Nesting:
        """All operators as stacks, one per thread."""
        return self.trace.nest(self.trace.rows[Kind.OP])

    def find_outermost(self, thread: int) -> Integers:
        """Rows of a thread's operators that lie in no other, in order."""
        rows = self.operators.rows[self.operators.depth == 0]
        return np.sort(self.trace.on_thread(rows, thread))

    @cached_property
    def backend_threads(self) -> Integers:
        """Threads of a backend that communicates beside the program, as gloo's do."""
        if self.on_gpu:
            return np.empty(0, np.int64)
        events = self.trace.events
        callers = np.append(events.thread[self._handing_over], self.placing.main_thread)
        threads = events.thread[self.calls.rows]
        # sends and receives are recorded on the thread that calls them
        return np.setdiff1d(threads, callers).astype(np.int64)

    @cached_property
    def _handing_over(self) -> Integers:
        """Rows of the operators that hand collectives over."""
        return self.trace.find_named(HANDED_OVER.match, Kind.OP)

    @cached_property
    def called_ns(self) -> Integers:
        """When each collective was handed over to a backend's thread: int64 [c]."""
        return self.calls.called_ns

    @cached_property
    def called_on(self) -> Integers:
        """The thread that handed each collective over to a backend's thread: int64 [c]; -1: not known."""
        events = self.trace.events
        rows = self._handing_over
        found = np.full(len(self.calls), -1, np.int64)
        if self.on_gpu or not len(rows):
            return found
        at = np.searchsorted(events.start_ns[rows], self.called_ns)
        at = np.minimum(at, len(rows) - 1)
        is_found = events.start_ns[rows[at]] == self.called_ns
        found[is_found] = events.thread[rows[at[is_found]]]
        return found

    def find_step(self, moment: Integers) -> Integers:
        """Number the step in which the host is at each moment, as the steps of all ranks; int64 [k]; -1: none.

        With a device, what lies between two steps belongs to the later one; without one to the earlier.
        """
        steps = self.placing.steps
        if self.on_gpu:
            ends = np.array([step.host_end_ns for step in steps], np.int64)
            starts = np.array([step.host_start_ns for step in steps], np.int64)
        else:
            ends = np.array([step.end_ns for step in steps], np.int64)
            starts = np.array([step.start_ns for step in steps], np.int64)
        if not len(ends):
            return np.full(len(moment), -1, np.int64)
        at = np.searchsorted(ends, moment, side="right")
        is_inside = (at < len(ends)) & (moment >= starts[0])
        return np.where(is_inside, at + self.first_step, -1)

    def number_steps(self, step: Integers) -> Integers:
        """Number steps of the placing as the steps of all ranks; -1: none."""
        return np.where(step >= 0, step + self.first_step, -1)

    def number_phases(self, phase: Integers) -> Integers:
        """Number phases of the placing as those of all ranks; -1: none."""
        of_own = [self.phases[name] for name in self.placing.phases]
        return np.array([*of_own, -1], np.int64)[phase]

    def find_phase_of_range(self, moment: Integers) -> Integers:
        """Find the phase by the main thread's ranges at each moment; int64 [k]; -1: none."""
        ranges = self.placing.ranges
        nest = self._main_ranges
        main = np.full(len(moment), max(self.placing.main_thread, 0))
        found = nest.row_at(moment, main)
        return np.append(ranges.phase, -1)[found].astype(np.int64)

    @cached_property
    def _main_ranges(self) -> Nesting:
        """The main thread's ranges of phases."""
        ranges = self.placing.ranges
        is_main: Flags = ranges.thread == self.placing.main_thread
        return ranges.nest(is_main)

    def number_names(self, rows: Integers) -> Integers:
        """Number the names of events among those of all ranks; int64 [k]; -1 for a row of -1."""
        found = np.full(len(rows), -1, np.int64)
        is_there = rows >= 0
        names = self.trace.events.name[rows[is_there]]
        own, place = np.unique(names, return_inverse=True)
        numbers = []
        for name in own.tolist():
            text = short_name(self.trace.names[name])
            numbers.append(self.names[text])
        found[is_there] = np.array(numbers, np.int64)[place]
        return found
