"""Results of the time analysis of one rank. Milliseconds are means per steady step unless a name says otherwise."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Cover, Flags, Integers, Nesting, difference, union


@dataclass(frozen=True)
class Step:
    """A step of the window: [start, end) on the device's clock where there is a GPU, else on the host's.

    On the device from the end of the step before it to its own end (step_windows.py says why): tiles without holes.
    """

    name: str  # "ProfilerStep#12" or the name of the range that marks steps
    number: int | None
    start_ns: int
    end_ns: int
    host_start_ns: int
    host_end_ns: int
    steady: bool  # counts; the first step of a window, cut ones and those that export or save do not
    why_not: str = ""  # why it does not count

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


NO_PHASE = "outside of all phases"
NEVER_NS = np.iinfo(np.int64).max  # later than any event
MIN_STRETCH_MS = 1.0  # without an operator: calling one takes a twentieth of that, with a profiler and stacks too

# Where a step goes, in the order of a report. Rows sum to the step exactly.
ROW_TITLES = {
    "compute": "compute",
    "exposed_communication": "communication not overlapped with compute",
    "exposed_copy": "copies not overlapped with compute",
    "data_wait": "waiting for the data loader",
    "process_wait": "host waiting for other processes",
    "sync": "after a synchronization by the host",
    "host": "host too slow to launch (Python, dispatch)",
    "allocator": "cudaMalloc, cudaFree and pinning",
    "garbage_collector": "Python's garbage collector",
    "cpu_optimizer": "optimizer computing on the CPU",
    "clip_grad": "clipping gradients on the host",
    "log": "logging and metrics on the host",
    "compile": "compiling and autotuning",
    "startup": "starting up CUDA and libraries",
    "graph_capture": "capturing graphs",
    "profiler": "the profiler's own work",
    "launch": "launch latency (gaps under 10 us)",
    "dependency": "waiting for another stream",
    "save": "saving and evaluating",
    "unexplained": "unexplained",
}


@dataclass(frozen=True)
class PhaseTime:
    """A phase of the step: the trainer's (phases.py) or, in foreign traces, any annotation under the step."""

    name: str
    host_ms: float  # duration of the range on the host: what a naive reading shows
    device_sum_ms: float  # of kernels launched within it (by correlation, across threads), added up
    device_ms: float  # union of their intervals: the real device time; on CPU-only traces the host's
    device_span_ms: float  # from the first one's start to the last one's end
    lag_ms: float  # its first kernel starts so long after the host entered it: depth of the queue
    compute_ms: float
    communication_ms: float
    copy_ms: float
    kernels: float  # per step, copies left out; on CPU-only traces operators


@dataclass(frozen=True)
class SyncSite:
    """A place where the host waits for the device."""

    call: str  # cudaStreamSynchronize, cudaMemcpyAsync (pageable), ...
    operator: str  # aten::item ..., "" if none
    frame: str  # innermost Python frame outside torch, "file.py(12): function"; "" without stacks
    phase: str
    per_step: float  # calls
    host_ms: float  # that the host stood there
    idle_ms: float  # device idle that followed because of it
    cause: str = ""  # "clip_grad" or "log", where names tell
    # of idle_ms, in which the host worked for MIN_STRETCH_MS or longer without a call to the device: it goes if the
    # wait goes, or the work
    work_ms: float = 0.0


@dataclass(frozen=True)
class HostSite:
    """Work of the host while the device waited for it, by top operator or frame.

    Without a GPU it is what the host did between operators.
    """

    what: str
    phase: str
    idle_ms: float


@dataclass(frozen=True)
class NamedWork:
    """Work of the host that its name tells, on the threads that drive the device,
    whether or not the device was idle meanwhile."""

    cause: str  # a key of ROW_TITLES
    what: str  # "PyTorch's DataLoader", "loading of CUDA modules", ...
    calls: int  # in the whole trace
    trace_ms: float  # of the whole trace
    step_ms: float  # in the mean steady step
    once: bool  # it comes in few steps, or stops early: no cost of each step
    step: str  # that has most of it; "" if none
    in_steps: int  # how many steps of the trace have any of it


@dataclass(frozen=True)
class ShortGaps:
    """Idle time of the device in gaps below MIN_STRETCH_MS, where no row but these explains it; without a GPU time
    without an operator, in pieces of 0.1 ms and more. Per step."""

    number: float
    host_ms: float  # the host was late
    launch_ms: float  # launch latency, outside of graphs
    graph_ms: float  # between the work of a graph that was launched long before
    queued_ms: float  # launched long before, outside of graphs; the cause is unexplained

    @property
    def ms(self) -> float:
        return self.host_ms + self.launch_ms + self.graph_ms + self.queued_ms


@dataclass(frozen=True)
class Stretch:
    """Python at work in a phase for MIN_STRETCH_MS or longer without an operator, where there is no GPU."""

    phase: str
    ms: float  # in the median step: what only one step has is a busy machine's
    line: str  # of the program, that held most of it; "" without stacks
    after: str  # the operator that ended before the longest; "" if none


@dataclass(frozen=True)
class Span:
    """An interval for pictures and evidence."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class RankTime:
    """Where the steps of one rank go."""

    rank: int | None
    device: str | None  # name of the GPU whose work is counted; None for a trace without such work
    on_gpu: bool  # it holds work of a GPU
    steps: tuple[Step, ...]
    step_ms: float = 0.0  # mean of the steady steps: the rows sum to it
    rows: dict[str, float] = field(default_factory=dict)  # keys of ROW_TITLES -> ms per step; absent keys are 0
    busy_ms: float = 0.0  # device working at all
    communication_ms: float = 0.0  # union of communication, hidden or not
    copy_ms: float = 0.0  # union of copies and memsets
    overlap: float | None = None  # share of communication overlapped with compute; None without communication
    phases: tuple[PhaseTime, ...] = ()
    syncs: tuple[SyncSite, ...] = ()  # most idle first
    hosts: tuple[HostSite, ...] = ()  # most idle first
    behind_waits: tuple[HostSite, ...] = ()  # the same of SyncSite.work_ms
    loader_host_ms: float = 0.0  # host time in the loader, hidden or not
    launches: float = 0.0  # kernels per step
    median_kernel_us: float = 0.0
    median_launch_interval_us: float = 0.0  # between launches of the launching threads
    median_queue_us: float = 0.0  # kernel start - end of its launch call
    launch_bound: bool = False
    spilled_ms: float = 0.0  # device work whose launch lies outside of the trace; of the whole trace, not per step
    # a typical step on the device: compute by phase, "communication", "copies", and waits for the loader or processes
    timeline: tuple[Span, ...] = ()
    timeline_step: int | None = None  # its index in steps
    idle_beside_ms: float = 0.0  # of the idle time what other GPUs of the process compute meanwhile
    notes: tuple[str, ...] = ()  # named gaps
    named: tuple[NamedWork, ...] = ()  # longest first
    # Of what was recorded of the host, the share that delays the device: all of it where a device works beside the
    # host; without one, recording an operator inside of another makes that one longer, and only the rest lies between
    # operators.
    recorded_between: float = 1.0
    short_gaps: ShortGaps | None = None  # None without steady steps
    stretches: tuple[Stretch, ...] = ()  # longest first; () with a GPU

    @property
    def steady_steps(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.steady)

    @property
    def idle_ms(self) -> float:
        return max(0.0, self.step_ms - self.busy_ms)


def _no_integers() -> Integers:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class PhaseRanges:
    """Stretches of time in which a thread is in a phase, k by start; some lie inside others.

    They are ranges of the trace, and the passes that an optimizer's step runs in a closure.
    """

    start_ns: Integers = field(default_factory=_no_integers)  # [k]
    end_ns: Integers = field(default_factory=_no_integers)  # [k]
    thread: Integers = field(default_factory=_no_integers)  # [k], index into Trace.threads
    phase: Integers = field(default_factory=_no_integers)  # [k], index into Placing.phases
    step: Integers = field(default_factory=_no_integers)  # [k], index into Placing.steps; -1: outside all

    def __len__(self) -> int:
        return len(self.start_ns)

    def join(self, other: "PhaseRanges", phase: int) -> "PhaseRanges":
        """Join these and the other ranges, which are of that phase; by start."""
        start = np.concatenate((self.start_ns, other.start_ns))
        order = np.argsort(start, kind="stable")
        return PhaseRanges(
            start[order],
            np.concatenate((self.end_ns, other.end_ns))[order],
            np.concatenate((self.thread, other.thread))[order],
            np.concatenate((self.phase, np.full(len(other), phase)))[order],
        )

    def nest(self, chosen: Flags | None = None) -> Nesting:
        """The ranges (all, or those `chosen`) as stacks, one per thread; its rows are their numbers."""
        rows = np.arange(len(self)) if chosen is None else np.flatnonzero(chosen)
        return Nesting(rows, self.start_ns[rows], self.end_ns[rows], self.thread[rows])

    def cover(self, chosen: Flags | Integers) -> Cover:
        """When any of the chosen ranges lasts."""
        return union(self.start_ns[chosen], self.end_ns[chosen])

    def cover_own(self, chosen: Integers) -> Cover:
        """When the chosen ranges last, without the ranges of other phases inside of them."""
        nest = self.nest()
        parent = nest.row_of(nest.parent)
        is_chosen = np.zeros(len(self) + 1, bool)
        is_chosen[chosen] = True
        inner = nest.rows[is_chosen[parent] & (self.phase[nest.rows] != self.phase[parent])]
        return difference(self.cover(chosen), self.cover(inner))


@dataclass(frozen=True)
class Placing:
    """Places of a trace's n events: the step, phase and operator that each belongs to."""

    steps: tuple[Step, ...]
    step: NDArray[np.int32]  # [n], index into steps; -1: outside all
    phases: tuple[str, ...]
    phase: Integers  # int16 [n], index into phases; -1: none
    operator: NDArray[np.int64]  # [n], row of the innermost OP around the event (or around its launch); -1: none;
    # an OP's own is its parent
    main_thread: int = -1  # index into Trace.threads of the one that drives the steps; -1: no host event at all
    notes: tuple[str, ...] = ()  # named gaps: how steps were found if not by the profiler's marks
    device: int = -1  # the GPU whose steps these are; -1: none
    on_other_device: Flags | None = None  # bool [n]: work of another GPU of the process; None: there is none
    # of the phases that ranges tell; operators tell the others
    ranges: PhaseRanges = field(default_factory=PhaseRanges)

    @cached_property
    def steady(self) -> Flags:
        """Tell for each step whether it counts: bool [steps + 1].

        The last entry, which index -1 finds, is False.
        """
        return np.array([step.steady for step in self.steps] + [False], bool)

    @cached_property
    def counts(self) -> Flags:
        """Tell for each event (bool [n]) whether it belongs to a steady step, and to the GPU whose steps these are."""
        in_steady: Flags = self.steady[self.step]
        return in_steady if self.on_other_device is None else in_steady & ~self.on_other_device
