"""Where the steps of one rank go."""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.intervals import Cover, difference, intersection, joined, union
from megatron_lite.analysis.time.find_phases import AUTOGRAD
from megatron_lite.analysis.time.host_activity import HostActivity, host_activity
from megatron_lite.analysis.time.idle_gaps import DeviceCovers, Gaps, communication_names, device_covers, find_idle_gaps
from megatron_lite.analysis.time.phase_table import device_phases, device_timeline, host_phases, host_timeline
from megatron_lite.analysis.time.sites import CallSites, host_sites, long_stretches, python_sites, sync_sites
from megatron_lite.analysis.time.step_windows import computing_stream
from megatron_lite.analysis.time.time_results import Placing, RankTime, Step
from megatron_lite.analysis.trace.columns import Kind, Trace

# --- the steps that count


FEWEST = 2


@dataclass(frozen=True)
class SteadySteps:
    """The steady ones among `steps`; at least one is."""

    steps: tuple[Step, ...]

    @cached_property
    def flags(self) -> np.ndarray:
        """bool [k + 1] per step; the last one, which index -1 (no step) finds, is False."""
        return np.array([step.steady for step in self.steps] + [False])

    @property
    def count(self) -> int:
        return int(self.flags.sum())

    @cached_property
    def cover(self) -> Cover:
        """Their windows, on the device's clock where there is one."""
        return union(
            [step.start_ns for step in self.steps if step.steady], [step.end_ns for step in self.steps if step.steady]
        )

    @cached_property
    def host_cover(self) -> Cover:
        return union(
            [step.host_start_ns for step in self.steps if step.steady],
            [step.host_end_ns for step in self.steps if step.steady],
        )

    @property
    def step_ms(self) -> float:
        return self.cover.length / 1e6 / self.count

    @property
    def typical(self) -> int:
        """Index of the step whose length is nearest to the median."""
        usual = np.median([step.ms for step in self.steps if step.steady])
        return min((k for k, step in enumerate(self.steps) if step.steady), key=lambda k: abs(self.steps[k].ms - usual))

    @property
    def notes(self) -> tuple[str, ...]:
        left_out = [f"{step.name} ({step.why_not})" for step in self.steps if not step.steady]
        few = self.count < FEWEST and len(self.steps) >= FEWEST
        return (f"only one step counts; left out: {', '.join(left_out)}",) if few else ()


# --- how fast the host launches, and whether that is what holds the GPU back

# Thresholds: an A100 under DDP with 76% idle time must be found, a CUDA graph with 64% (queued for 162 ms) must not
IDLE_SHARE, KERNEL_TO_INTERVAL, QUEUE_US = 0.15, 1.5, 50.0


@dataclass(frozen=True)
class Launches:
    """Medians in us over the steady steps; 0 where there is none."""

    per_step: float  # kernels
    kernel_us: float
    interval_us: float  # between launch calls of the same thread
    queue_us: (
        float  # from the end of a launch call to the kernel's start; below 0 where it starts before the call returns
    )

    def bound(self, host_share: float) -> bool:
        """Is the host too slow to launch? `host_share`: of the step, in which the GPU waited for the host itself."""
        return (
            host_share >= IDLE_SHARE
            and 0 < self.kernel_us < KERNEL_TO_INTERVAL * self.interval_us
            and self.queue_us < QUEUE_US
        )


def launches(trace: Trace, kernels: np.ndarray, steps: int) -> Launches:
    """Of the rows `kernels` (device work of the steady steps, other kinds are left out)."""
    events = trace.events
    kernels = kernels[events.kind[kernels] == Kind.KERNEL]
    if not len(kernels):
        return Launches(0.0, 0.0, 0.0, 0.0)
    launch = trace.launch_of[kernels]
    known, calls = launch >= 0, np.unique(launch[launch >= 0])
    calls = calls[np.lexsort((events.start_ns[calls], events.thread[calls]))]
    between = np.diff(events.start_ns[calls])[np.diff(events.thread[calls]) == 0]
    queue = events.start_ns[kernels[known]] - events.end_ns[launch[known]]
    return Launches(
        len(kernels) / steps,
        _median_us(events.end_ns[kernels] - events.start_ns[kernels]),
        _median_us(between),
        _median_us(queue),
    )


def _median_us(lengths: np.ndarray) -> float:
    return float(np.median(lengths)) / 1e3 if len(lengths) else 0.0


# --- where the steps of a rank with a GPU go


@dataclass(frozen=True)
class OnDevice:
    """One device's work, and the steps that count."""

    trace: Trace
    placing: Placing
    steady: SteadySteps
    device: int
    rows: np.ndarray  # work of this device, by start

    @cached_property
    def covers(self) -> DeviceCovers:
        return device_covers(self.trace, self.rows)

    @cached_property
    def activity(self) -> HostActivity:
        return host_activity(self.trace, self.placing)

    @cached_property
    def gaps(self) -> Gaps:
        return find_idle_gaps(self.trace, self.rows, self.covers.busy, self.steady.cover, self.activity)

    @cached_property
    def launches(self) -> Launches:
        return launches(self.trace, self.rows[self.steady.flags[self.placing.step[self.rows]]], self.steady.count)

    def ms(self, cover: Cover) -> float:
        """Of the cover inside the steady steps, per step."""
        return intersection(cover, self.steady.cover).length / 1e6 / self.steady.count

    def breakdown(self) -> dict[str, float]:
        """Rows that sum to the step, in ms."""
        covers = self.covers
        rows = {
            "compute": self.ms(covers.compute),
            "exposed_communication": self.ms(covers.exposed_communication),
            "exposed_copy": self.ms(covers.exposed_copy),
        }
        return rows | {row: self.gaps.total(row) / 1e6 / self.steady.count for row in self.gaps.amounts}


def on_device(trace: Trace, placing: Placing, steady: SteadySteps) -> RankTime:
    """The time of a rank whose trace has device work. `steady`: at least one step."""
    device, _ = computing_stream(trace)
    rows = trace.device_rows[trace.events.device[trace.device_rows] == device]
    one = OnDevice(trace, placing, steady, device, rows)
    breakdown, covers, activity, sites = one.breakdown(), one.covers, one.activity, CallSites(trace, placing)
    talking, pace = one.ms(covers.communication), one.launches
    return RankTime(
        rank=trace.rank,
        device=trace.devices[device] if 0 <= device < len(trace.devices) else None,
        on_gpu=True,
        steps=placing.steps,
        step_ms=steady.step_ms,
        rows=breakdown,
        busy_ms=one.ms(covers.busy),
        communication_ms=talking,
        copy_ms=one.ms(covers.copy),
        overlap=1 - breakdown["exposed_communication"] / talking if talking else None,
        phases=device_phases(trace, placing, rows, steady.flags),
        syncs=sync_sites(trace, placing, activity, one.gaps, sites, steady.flags),
        hosts=host_sites(trace, placing, one.gaps, sites, steady.count),
        loader_host_ms=intersection(activity.data, steady.host_cover).length / 1e6 / steady.count,
        launches=pace.per_step,
        median_kernel_us=pace.kernel_us,
        median_launch_interval_us=pace.interval_us,
        median_queue_us=pace.queue_us,
        launch_bound=pace.bound(breakdown["host"] / steady.step_ms),
        spilled_ms=_spilled_ms(one),
        timeline=device_timeline(trace, placing, rows, steady.typical),
        timeline_step=steady.typical,
        notes=(*placing.notes, *steady.notes, *_notes(one)),
    )


def _spilled_ms(one: OnDevice) -> float:
    """Work in the trace whose launch call lies outside of it; of the whole trace."""
    rows = one.rows[one.trace.launch_of[one.rows] < 0]
    return union(one.trace.events.start_ns[rows], one.trace.events.end_ns[rows]).length / 1e6


def _notes(one: OnDevice):
    events, trace = one.trace.events, one.trace
    lost = int((trace.launch_of[one.rows] < 0).sum())
    if lost == len(one.rows):
        yield "no device work can be joined with the call that launched it: its phase and why the GPU idled are unknown"
    elif lost:
        yield (
            f"{lost} of {len(one.rows)} kernels and copies were launched outside of the trace ({_spilled_ms(one):.1f} ms): "
            "they keep the device busy, but belong to no step or phase"
        )
    others = set(events.device[trace.device_rows].tolist()) - {one.device}
    if others:
        yield f"the process drives {len(others) + 1} GPUs; the figures are of GPU {one.device}, which computes most"


# --- where the steps of a rank without a GPU go: the main thread's time, since the host is the device
#
# Each moment of a step is, in this order: saving or evaluating; in the loader; an operator at work on the main thread or on
# autograd's; waiting for communication (a backend's span such as gloo:all_reduce runs on a thread of its own, and no operator
# does); the garbage collector; else Python between operators. autograd's wrappers count as operators only while nothing is
# communicated: DistributedDataParallel waits for gloo inside them.

COMPILED = re.compile(r"## Call CompiledFxGraph|Torch-Compiled Region|CompiledFunction")
MAY_WAIT = re.compile(
    r"c10d::|record_param_comms|gloo|torch[.:]+distributed|Torch-Compiled Region|_c10d_functional|c10d_functional"
)


def on_host(trace: Trace, placing: Placing, steady: SteadySteps) -> RankTime:
    """The time of a rank whose trace has no device work. `steady`: at least one step."""
    activity = host_activity(trace, placing)
    communication = intersection(_communication(trace), steady.cover)
    rows, compute = _breakdown(trace, steady, activity, communication)
    sites = CallSites(trace, placing)

    def ms(cover: Cover) -> float:
        return cover.length / 1e6 / steady.count

    talking = ms(communication)
    exposed = ms(rows["exposed_communication"])
    return RankTime(
        rank=trace.rank,
        device=None,
        on_gpu=False,
        steps=placing.steps,
        step_ms=steady.step_ms,
        rows={row: ms(cover) for row, cover in rows.items()},
        busy_ms=ms(joined(compute, communication)),
        communication_ms=talking,
        copy_ms=0.0,
        overlap=1 - exposed / talking if talking else None,
        phases=host_phases(trace, placing, compute, communication, steady.flags),
        syncs=(),
        hosts=python_sites(trace, placing, rows["host"], sites, steady.count),
        loader_host_ms=ms(intersection(activity.data, steady.cover)),
        launches=0.0,
        median_kernel_us=0.0,
        median_launch_interval_us=0.0,
        median_queue_us=0.0,
        launch_bound=False,
        spilled_ms=0.0,
        timeline=host_timeline(trace, placing, communication, steady.typical),
        timeline_step=steady.typical,
        notes=(*placing.notes, *steady.notes),
        stretches=long_stretches(trace, placing, rows["host"], sites, steady.flags),
    )


def _communication(trace: Trace) -> Cover:
    """Backends' spans (gloo:all_reduce), on whatever thread."""
    events = trace.events
    rows = np.flatnonzero(communication_names(trace)[events.name] & (events.kind == Kind.ANNOTATION))
    return union(events.start_ns[rows], events.end_ns[rows])


def _breakdown(
    trace: Trace, steady: SteadySteps, activity: HostActivity, communication: Cover
) -> tuple[dict[str, Cover], Cover]:
    """({row: when}, operators at work): rows are disjoint and cover the steady steps."""
    working = _operators_at_work(trace, activity, communication)
    order = {
        "save": activity.save,
        "data_wait": activity.data,
        "compute": working,
        "exposed_communication": communication,
        "garbage_collector": activity.garbage,
    }
    rows, left = {}, steady.cover
    for row, cover in order.items():
        rows[row] = intersection(left, cover)
        left = difference(left, cover)
    return rows | {"host": left}, intersection(working, steady.cover)


def _operators_at_work(trace: Trace, activity: HostActivity, communication: Cover) -> Cover:
    events = trace.events
    compiled = trace.matching(COMPILED.match) & (events.kind == Kind.ANNOTATION)
    mine = ((events.kind == Kind.OP) | compiled) & np.isin(events.thread, activity.threads)
    may_wait = trace.matching(lambda name: bool(AUTOGRAD.match(name) or MAY_WAIT.match(name)))
    sure, others = (union(events.start_ns[rows], events.end_ns[rows]) for rows in (mine & ~may_wait, mine & may_wait))
    return joined(sure, difference(others, communication))


# --- where the steps of one rank go


def rank_time(trace: Trace, placing: Placing) -> RankTime:
    """The figures of a trace whose events are placed; empty ones, with a note, where no step has any work."""
    if not any(step.steady for step in placing.steps):
        return _nothing(trace, placing)
    steady = SteadySteps(placing.steps)
    return on_device(trace, placing, steady) if len(trace.device_rows) else on_host(trace, placing, steady)


def _nothing(trace: Trace, placing: Placing) -> RankTime:
    return RankTime(
        rank=trace.rank,
        device=trace.devices[0] if trace.devices else None,
        on_gpu=len(trace.device_rows) > 0,
        steps=placing.steps,
        step_ms=0.0,
        rows={},
        busy_ms=0.0,
        communication_ms=0.0,
        copy_ms=0.0,
        overlap=None,
        phases=(),
        syncs=(),
        hosts=(),
        loader_host_ms=0.0,
        launches=0.0,
        median_kernel_us=0.0,
        median_launch_interval_us=0.0,
        median_queue_us=0.0,
        launch_bound=False,
        spilled_ms=0.0,
        timeline=(),
        timeline_step=None,
        notes=placing.notes,
    )
