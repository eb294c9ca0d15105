"""Where the steps of one rank go."""

import re
from dataclasses import dataclass, replace

import numpy as np

from megatron_lite.analysis.intervals import NOTHING, Cover, Flags, Integers, difference, intersection, joined, union
from megatron_lite.analysis.kernels.kernel_words import is_wait
from megatron_lite.analysis.time.host_causes import measure_host_work
from megatron_lite.analysis.time.host_names import AFTER_SYNCS, CAUSES
from megatron_lite.analysis.time.idle_gaps import (
    DeviceCovers,
    Gaps,
    HostActivity,
    device_covers,
    find_communication_names,
    find_host_activity,
    find_idle_gaps,
    measure_short_gaps,
)
from megatron_lite.analysis.time.range_names import AUTOGRAD
from megatron_lite.analysis.time.sites import CallSites
from megatron_lite.analysis.time.time_results import NO_PHASE, ROW_TITLES, PhaseTime, Placing, RankTime, Span, Step
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.analysis.trace.launches import MAX_EARLY, measure_early

MIN_TIMED_STEPS = 2
WAITS = ("data_wait", "process_wait")  # rows that the picture of a step shows beside its phases
QUEUED = ("launch", "dependency", "unexplained")  # rows of what was launched and has not begun
BRIDGED = 0.002  # of a step: shorter holes cannot be seen in a picture
# The host is too slow to launch, by three thresholds: an A100 under DDP with 76% idle time must be found, a CUDA graph
# with 64% (queued for 162 ms) must not.
IDLE_SHARE = 0.15  # of the step
KERNEL_TO_INTERVAL = 1.5  # the median kernel's length by the time between launches
QUEUE_US = 50.0
# of the median kernel, and of the time without one between two launches: in more, the host does something else
MAX_SMALL_US = 1_000.0
COMPILED = re.compile(r"## Call CompiledFxGraph|Torch-Compiled Region|CompiledFunction")
MAY_WAIT = re.compile(
    r"c10d::|record_param_comms|gloo|torch[.:]+distributed|Torch-Compiled Region|_c10d_functional|c10d_functional"
)


@dataclass(frozen=True)
class SteadySteps:
    """The steps that count; at least one does."""

    count: int
    cover: Cover  # their windows, on the device's clock where there is one
    host_cover: Cover
    typical: int  # index of the step whose length is nearest to the median
    notes: tuple[str, ...]

    def per_step(self, cover: Cover) -> float:
        """Mean ms per step of the cover inside the windows."""
        return self.mean_ms(intersection(cover, self.cover).length)

    def per_step_on_host(self, cover: Cover) -> float:
        """Mean ms per step of the cover inside the steps on the host."""
        return self.mean_ms(intersection(cover, self.host_cover).length)

    def mean_ms(self, ns: int) -> float:
        """Mean ms per step of what takes so many ns in all of them."""
        return ns / 1e6 / self.count


def rank_time(trace: Trace, placing: Placing) -> RankTime:
    """Measure a trace whose events are placed: empty figures, with a note, where no step has any work."""
    on_gpu = len(trace.device_rows) > 0
    if not any(step.steady for step in placing.steps):
        device = placing.device if on_gpu else 0
        return RankTime(
            rank=trace.rank,
            device=trace.name_device(device),
            on_gpu=on_gpu,
            steps=placing.steps,
            notes=placing.notes,
        )
    steady = _choose_steady(placing.steps)
    measure = _measure_device if on_gpu else _measure_host
    return measure(trace, placing, steady)


def _choose_steady(steps: tuple[Step, ...]) -> SteadySteps:
    """Choose the steps that count, of which there is at least one."""
    counted = [step for step in steps if step.steady]
    median_ms = np.median([step.ms for step in counted])
    typical = min(counted, key=lambda step: abs(step.ms - median_ms))
    notes = []
    if len(counted) < MIN_TIMED_STEPS <= len(steps):
        left_out = [f"{step.name} ({step.why_not})" for step in steps if not step.steady]
        notes.append(f"only one step counts; left out: {', '.join(left_out)}")
    return SteadySteps(
        count=len(counted),
        cover=union(
            [step.start_ns for step in counted],
            [step.end_ns for step in counted],
        ),
        host_cover=union(
            [step.host_start_ns for step in counted],
            [step.host_end_ns for step in counted],
        ),
        typical=steps.index(typical),
        notes=tuple(notes),
    )


def _measure_device(trace: Trace, placing: Placing, steady: SteadySteps) -> RankTime:
    """Measure the time of a rank whose trace has device work."""
    rows = trace.on_device(trace.device_rows, placing.device)
    covers = device_covers(trace, rows)
    activity = find_host_activity(trace, placing)
    others = _find_other_devices(trace, placing.device, steady)
    gaps = _find_gaps(trace, rows, covers, steady, activity, others)
    breakdown = _break_down(covers, gaps, steady)
    communication_ms = steady.per_step(covers.communication)
    speed = _measure_launches(trace, placing, rows)
    sites = CallSites(trace, placing)
    spilled = _find_spilled(trace, rows)
    return RankTime(
        rank=trace.rank,
        device=trace.name_device(placing.device),
        on_gpu=True,
        steps=placing.steps,
        step_ms=steady.mean_ms(steady.cover.length),
        rows=breakdown,
        busy_ms=steady.per_step(covers.busy),
        communication_ms=communication_ms,
        copy_ms=steady.per_step(covers.copy),
        overlap=_compute_overlap(breakdown, communication_ms),
        phases=_measure_device_phases(trace, placing, rows),
        syncs=sites.find_sync_sites(activity, gaps),
        hosts=sites.find_host_sites(gaps, gaps.host),
        behind_waits=sites.find_host_sites(gaps, gaps.behind),
        loader_host_ms=steady.per_step_on_host(activity.covers["data_wait"]),
        named=measure_host_work(activity.works, placing.steps),
        short_gaps=measure_short_gaps(gaps, steady.count),
        launches=speed.kernels / steady.count,
        median_kernel_us=speed.kernel_us,
        median_launch_interval_us=speed.interval_us,
        median_queue_us=speed.queue_us,
        launch_bound=_is_launch_bound(breakdown, steady, speed),
        spilled_ms=spilled.ms,
        idle_beside_ms=steady.per_step(difference(others.busy, covers.busy)),
        timeline=_draw_device_timeline(trace, placing, rows, steady, gaps, activity),
        timeline_step=steady.typical,
        notes=(*placing.notes, *steady.notes, *spilled.notes, *others.notes),
    )


def _compute_overlap(breakdown: dict[str, float], communication_ms: float) -> float | None:
    """Compute the share of communication that computing hides; None without communication."""
    if not communication_ms:
        return None
    return 1 - breakdown["exposed_communication"] / communication_ms


def _break_down(covers: DeviceCovers, gaps: Gaps, steady: SteadySteps) -> dict[str, float]:
    """Measure ms per step of each row; they add up to the step.

    Communication and copies count where nothing computes.
    """
    breakdown = {row: steady.per_step(cover) for row, cover in _find_working(covers).items()}
    for row, amounts_ns in gaps.amounts.items():
        breakdown[row] = steady.mean_ms(int(amounts_ns.sum()))
    return breakdown


def _find_working(covers: DeviceCovers) -> dict[str, Cover]:
    """Find when each row lasts in which the device works; none overlaps another."""
    not_copying = joined(covers.compute, covers.communication)
    return {
        "compute": covers.compute,
        "exposed_communication": difference(covers.communication, covers.compute),
        "exposed_copy": difference(covers.copy, not_copying),
    }


def find_rows(trace: Trace, placing: Placing) -> dict[str, Cover]:
    """Find when each row of the steady steps lasts; together they tile the steps. Empty without a steady step.

    Where an idle gap of the device has several causes, they follow each other: first what kept the host from launching,
    then what kept the launched work from starting.
    """
    if not any(step.steady for step in placing.steps):
        return {}
    if not len(trace.device_rows):
        return find_host_rows(trace, placing)
    steady = _choose_steady(placing.steps)
    work = trace.on_device(trace.device_rows, placing.device)
    covers = device_covers(trace, work)
    activity = find_host_activity(trace, placing)
    others = _find_other_devices(trace, placing.device, steady)
    gaps = _find_gaps(trace, work, covers, steady, activity, others)
    rows = {row: intersection(cover, steady.cover) for row, cover in _find_working(covers).items()}
    return rows | _place_gaps(gaps)


def _place_gaps(gaps: Gaps) -> dict[str, Cover]:
    """Lay the causes of each gap one after the other."""
    rows = {}
    start = gaps.start
    late = [row for row in gaps.amounts if row not in QUEUED]
    for row in (*late, *QUEUED):
        end = start + gaps.amounts[row]
        rows[row] = union(start, end)
        start = end
    return rows


def _is_launch_bound(
    breakdown: dict[str, float],
    steady: SteadySteps,
    speed: "LaunchSpeed",
) -> bool:
    """Whether the device is idle for a notable part of the step because the host launches too slowly."""
    idle_ms = sum(breakdown[row] for row in ("host", *AFTER_SYNCS))
    step_ms = steady.mean_ms(steady.cover.length)
    return idle_ms / step_ms >= IDLE_SHARE and speed.is_slow


@dataclass(frozen=True)
class LaunchSpeed:
    """How fast the host launches kernels."""

    kernels: int
    kernel_us: float  # median of each
    interval_us: float  # between calls of the same thread
    queue_us: float  # from the end of a call to its kernel's start; below 0 where that starts before the call returns
    early: float  # share of kernels that start before their calls: the clocks of host and device differ

    @property
    def is_slow(self) -> bool:
        """Whether small kernels are over faster than new ones come, and hardly any waits in the queue."""
        is_small = 0 < self.kernel_us < MAX_SMALL_US and self.interval_us - self.kernel_us < MAX_SMALL_US
        is_faster = self.kernel_us < KERNEL_TO_INTERVAL * self.interval_us
        return is_small and is_faster and self.queue_us < QUEUE_US and self.early <= MAX_EARLY


def _measure_launches(trace: Trace, placing: Placing, rows: Integers) -> LaunchSpeed:
    """Measure the launches of the kernels among the device work `rows` in the steady steps."""
    events = trace.events
    is_kernel = events.kind[rows] == Kind.KERNEL
    kernels = rows[is_kernel & placing.counts[rows]]
    launched = kernels[trace.launch_of[kernels] >= 0]
    call_of_launched = trace.launch_of[launched]
    queue_ns = events.start_ns[launched] - events.end_ns[call_of_launched]
    calls = np.unique(call_of_launched)
    order = np.lexsort((events.start_ns[calls], events.thread[calls]))
    calls = calls[order]
    same_thread = np.diff(events.thread[calls]) == 0
    interval_ns = np.diff(events.start_ns[calls])[same_thread]
    return LaunchSpeed(
        kernels=len(kernels),
        kernel_us=_median_us(trace.lengths_ns(kernels)),
        interval_us=_median_us(interval_ns),
        queue_us=_median_us(queue_ns),
        early=measure_early(trace, kernels)[0],
    )


def _median_us(lengths_ns: Integers) -> float:
    """The median in us; 0 without any lengths."""
    if not len(lengths_ns):
        return 0.0
    return float(np.median(lengths_ns)) / 1e3


@dataclass(frozen=True)
class OtherDevices:
    """The other GPUs that the process drives."""

    busy: Cover  # when any of them is, in the steady steps
    notes: tuple[str, ...]


def _find_other_devices(trace: Trace, device: int, steady: SteadySteps) -> OtherDevices:
    """Find what the process' GPUs but `device` did."""
    rows = trace.device_rows
    numbers = np.unique(trace.events.device[rows])
    busy = NOTHING
    described = []
    for number in np.setdiff1d(numbers, [device]).tolist():
        cover = intersection(trace.cover(trace.on_device(rows, number)), steady.cover)
        busy = joined(busy, cover)
        described.append(f"GPU {number} is busy {steady.per_step(cover):,.1f} ms")
    if not described:
        return OtherDevices(NOTHING, ())
    note = (
        f"the process drives {len(described) + 1} GPUs; "
        f"steps, kernels and FLOPs are those of GPU {device}, which computes "
        f"most; per step {', '.join(described)}"
    )
    return OtherDevices(busy, (note,))


def _find_gaps(
    trace: Trace,
    rows: Integers,
    covers: DeviceCovers,
    steady: SteadySteps,
    activity: HostActivity,
    others: OtherDevices,
) -> Gaps:
    """Find the idle time of a device in the steady steps, and why it is there.

    Args:
        trace: the trace.
        rows: the device's work, by start.
        covers: when it computes, communicates and copies.
        steady: the steps that count.
        activity: what the host did.
        others: the other GPUs that the process drives.
    """
    gaps = find_idle_gaps(trace, rows, covers.busy, steady.cover, activity)
    return _wait_for_others(gaps, others.busy)


def _wait_for_others(gaps: Gaps, busy: Cover) -> Gaps:
    """The gaps, where idle time after a synchronization or without a reason is waiting for another stream while another
    GPU of the process is busy: the host waits for that one, or this GPU needs its result."""
    amounts = dict(gaps.amounts)
    end = gaps.start + sum(amounts.values())
    beside = busy.within(gaps.start, end)
    for row in ("sync", "unexplained"):
        moved = np.minimum(amounts[row], beside)
        amounts[row] = amounts[row] - moved
        amounts["dependency"] = amounts["dependency"] + moved
        beside = beside - moved
    still_waited = np.where(amounts["sync"] > 0, gaps.waited, -1)
    return replace(gaps, amounts=amounts, waited=still_waited, behind=difference(gaps.behind, busy))


@dataclass(frozen=True)
class SpilledWork:
    """Device work whose launch lies outside of the trace."""

    ms: float  # for how long any of it lasts, in the whole trace
    notes: tuple[str, ...]


def _find_spilled(trace: Trace, rows: Integers) -> SpilledWork:
    """Find what of the device work `rows` has no launch call."""
    spilled = rows[trace.launch_of[rows] < 0]
    ms = trace.cover(spilled).length / 1e6
    if not len(spilled):
        return SpilledWork(ms, ())
    note = (
        f"{len(spilled)} of {len(rows)} kernels and copies have no launch call in the trace ({ms:.1f} ms): "
        "they keep the device busy, but belong to no step or phase"
    )
    if len(spilled) == len(rows):
        note = (
            "no device work can be joined with the call that launched it: its phase and why the GPU idled are unknown"
        )
    return SpilledWork(ms, (note,))


def _measure_host(trace: Trace, placing: Placing, steady: SteadySteps) -> RankTime:
    """Measure the time of a rank whose trace has no device work: the main thread's, since the host is the device.

    Each moment of a step is, in this order: saving or evaluating; compiling; in the loader; an operator at work on the
    main thread or on autograd's; waiting for communication (a backend's span such as gloo:all_reduce runs on a thread
    of its own, and no operator does); the garbage collector or another named cause; else Python between operators.
    """
    activity = find_host_activity(trace, placing)
    sites = CallSites(trace, placing)
    communication = _find_host_communication(trace, steady)
    working = _find_working_operators(trace, activity, communication)
    rows = _divide_host_time(activity.covers, working, communication, steady)
    breakdown = {row: steady.mean_ms(cover.length) for row, cover in rows.items()}
    compute = intersection(working, steady.cover)
    communication_ms = steady.per_step(communication)
    return RankTime(
        rank=trace.rank,
        device=None,
        on_gpu=False,
        steps=placing.steps,
        step_ms=steady.mean_ms(steady.cover.length),
        rows=breakdown,
        busy_ms=steady.per_step(joined(compute, communication)),
        communication_ms=communication_ms,
        overlap=_compute_overlap(breakdown, communication_ms),
        phases=_measure_host_phases(trace, placing, compute, communication),
        hosts=sites.find_python_sites(rows["host"]),
        loader_host_ms=steady.per_step(activity.covers["data_wait"]),
        named=measure_host_work(activity.works, placing.steps),
        timeline=_draw_host_timeline(trace, placing, communication, steady, rows),
        timeline_step=steady.typical,
        notes=(*placing.notes, *steady.notes),
        recorded_between=_measure_recorded_between(trace, activity, steady),
        stretches=sites.find_long_stretches(rows["host"]),
        short_gaps=sites.measure_short_stretches(rows["host"]),
    )


def find_host_rows(trace: Trace, placing: Placing) -> dict[str, Cover]:
    """Find when each row of the steady steps lasts, in a trace without device work that has such steps."""
    steady = _choose_steady(placing.steps)
    activity = find_host_activity(trace, placing)
    communication = _find_host_communication(trace, steady)
    working = _find_working_operators(trace, activity, communication)
    return _divide_host_time(activity.covers, working, communication, steady)


def _find_host_communication(trace: Trace, steady: SteadySteps) -> Cover:
    """Find when communication is under way on the host in the steady steps."""
    is_range = trace.events.kind == Kind.ANNOTATION
    talks = find_communication_names(trace)[trace.events.name]
    return intersection(trace.cover(is_range & talks), steady.cover)


def _divide_host_time(
    covers: dict[str, Cover],
    working: Cover,
    communication: Cover,
    steady: SteadySteps,
) -> dict[str, Cover]:
    """Divide the steady steps among their rows; what several claim belongs to the first of them.

    Args:
        covers: when the host did what names tell.
        working: when an operator was at work.
        communication: when communication was under way.
        steady: the steps that count.

    Returns:
        Each row's time, that of "host" being what no other row claims.
    """
    claims = (
        ("save", covers["save"]),
        ("compile", covers["compile"]),
        ("data_wait", covers["data_wait"]),
        ("compute", working),
        ("exposed_communication", communication),
        ("garbage_collector", covers["garbage_collector"]),
        ("profiler", covers["profiler"]),
        ("startup", covers["startup"]),
        ("process_wait", covers["process_wait"]),
    )
    rows: dict[str, Cover] = {}
    left = steady.cover
    for row, cover in claims:
        rows[row] = intersection(left, cover)
        left = difference(left, cover)
    rows["host"] = left
    return rows


def _find_working_operators(
    trace: Trace,
    activity: HostActivity,
    communication: Cover,
) -> Cover:
    """Find when an operator is at work.

    autograd's wrappers count as operators only while nothing is communicated: DistributedDataParallel waits for gloo
    inside them. Nor does an operator that calls `wait_tensor` work meanwhile.
    """
    events = trace.events
    is_compiled = (events.kind == Kind.ANNOTATION) & trace.matching(COMPILED.match)
    is_operator = (events.kind == Kind.OP) | is_compiled
    mine = is_operator & np.isin(events.thread, activity.threads)
    may_wait = trace.matching(lambda name: AUTOGRAD.match(name) or MAY_WAIT.match(name))
    waits = trace.cover(mine & trace.matching(is_wait))
    plain = trace.cover(mine & ~may_wait)
    wrappers = trace.cover(mine & may_wait)
    working = difference(plain, intersection(waits, communication))
    return joined(working, difference(wrappers, communication))


def _measure_recorded_between(
    trace: Trace,
    activity: HostActivity,
    steady: SteadySteps,
) -> float:
    """Measure which share of the host's recorded events lies outside of all operators, on the threads that work.

    Recording costs each event about the same: before its start and after its end, which is inside of the operator
    around it.
    """
    events = trace.events
    is_recorded = np.isin(events.kind, (Kind.OP, Kind.ANNOTATION, Kind.PYTHON))
    on_threads = np.isin(events.thread, activity.threads)
    in_steps = steady.host_cover.holds(events.start_ns)
    nest = trace.nest(np.flatnonzero(is_recorded & on_threads & in_steps))
    if not len(nest.rows):
        return 1.0
    is_operator = events.kind[nest.rows] == Kind.OP
    is_inside = np.zeros(len(nest.rows), bool)
    # parents come before their children
    for depth in range(1, int(nest.depth.max()) + 1):
        at = np.flatnonzero(nest.depth == depth)
        parent = nest.parent[at]
        is_inside[at] = is_operator[parent] | is_inside[parent]
    return 1.0 - float(is_inside.mean())


# --- phases: what their label on the host says, and what the device really did for them


@dataclass(frozen=True)
class HostTime:
    """When the host was in a phase: its ranges, else the operators placed there. [k] each."""

    start_ns: Integers
    step: Integers
    cover: Cover  # without other phases inside


NO_HOST_TIME = HostTime(
    start_ns=np.empty(0, np.int64),
    step=np.empty(0, np.int64),
    cover=NOTHING,
)


def find_host_time(
    trace: Trace,
    placing: Placing,
    phase: int,
    steps: Flags,
    thread: int | None = None,
) -> HostTime:
    """Find when the host was in a phase.

    Args:
        trace: the trace.
        placing: where its events belong.
        phase: the phase.
        steps: which steps count, as Placing.steady.
        thread: the only thread that counts; None: all do.
    """
    ranges = placing.ranges
    is_chosen = (ranges.phase == phase) & steps[ranges.step]
    if thread is not None:
        is_chosen &= ranges.thread == thread
    chosen = np.flatnonzero(is_chosen)
    if len(chosen):
        return HostTime(
            start_ns=ranges.start_ns[chosen],
            step=ranges.step[chosen],
            cover=ranges.cover_own(chosen),
        )
    rows = trace.rows[Kind.OP]
    is_in_steps = steps[placing.step[rows]]
    rows = rows[is_in_steps & (placing.phase[rows] == phase)]
    if thread is not None:
        rows = trace.on_thread(rows, thread)
    return HostTime(
        start_ns=trace.events.start_ns[rows],
        step=placing.step[rows],
        cover=trace.cover(rows),
    )


def _sort_by_entry(times: list[tuple[int, PhaseTime]]) -> tuple[PhaseTime, ...]:
    """The times of phases in the order in which the host enters them. times: (moment of the entry, time) of each."""
    times.sort(key=lambda pair: pair[0])
    return tuple(time for _, time in times)


def _measure_device_phases(
    trace: Trace,
    placing: Placing,
    rows: Integers,
) -> tuple[PhaseTime, ...]:
    """Measure each phase's time on the device.

    Args:
        trace: the trace.
        placing: where its events belong.
        rows: [k] the trace's device work.

    Returns:
        The phases in the order in which the host enters them.
    """
    rows = rows[placing.counts[rows]]
    found = []
    for phase, name in enumerate((NO_PHASE, *placing.phases), -1):
        work = rows[placing.phase[rows] == phase]
        host = NO_HOST_TIME
        if phase >= 0:
            host = find_host_time(trace, placing, phase, placing.steady)
        if not len(work) and not len(host.step):
            continue
        starts_ns = host.start_ns
        if not len(host.step):
            starts_ns = trace.events.start_ns[trace.launch_of[work]]
        time = _measure_device_phase(name, trace, placing, work, host)
        found.append((int(starts_ns.min()), time))
    return _sort_by_entry(found)


def _measure_device_phase(
    name: str,
    trace: Trace,
    placing: Placing,
    work: Integers,
    host: HostTime,
) -> PhaseTime:
    """Measure one phase per steady step.

    Args:
        name: the phase's name.
        trace: the trace.
        placing: where its events belong.
        work: [k] the phase's device work.
        host: when the host was in the phase.
    """
    events = trace.events
    steps = int(placing.steady.sum())
    per_step = 1 / steps / 1e6
    covers = device_covers(trace, work)
    kernels = np.count_nonzero(events.kind[work] == Kind.KERNEL)
    first_ns = _find_first_per_step(placing.step[work], events.start_ns[work])
    # the last end is the first of the times that run backwards
    last_ns = _find_first_per_step(placing.step[work], -events.end_ns[work])
    entered_ns = _find_first_per_step(host.step, host.start_ns)
    span_ns = 0
    lags_ns = []
    for step, first in first_ns.items():
        span_ns += -last_ns[step] - first
        if step in entered_ns:
            lags_ns.append(first - entered_ns[step])
    return PhaseTime(
        name,
        host_ms=host.cover.length * per_step,
        device_sum_ms=float(trace.lengths_ns(work).sum()) * per_step,
        device_ms=covers.busy.length * per_step,
        device_span_ms=span_ns * per_step,
        lag_ms=float(np.mean(lags_ns)) / 1e6 if lags_ns else 0.0,
        compute_ms=covers.compute.length * per_step,
        communication_ms=covers.communication.length * per_step,
        copy_ms=covers.copy.length * per_step,
        kernels=kernels / steps,
    )


def _find_first_per_step(step: Integers, times: Integers) -> dict[int, int]:
    """Find the first of the times of each step. step, times: [k] of events or ranges."""
    steps, place_of_step = np.unique(step, return_inverse=True)
    first = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(first, place_of_step, times)
    return dict(zip(steps.tolist(), first.tolist()))


def _measure_host_phases(
    trace: Trace,
    placing: Placing,
    compute: Cover,
    communication: Cover,
) -> tuple[PhaseTime, ...]:
    """Measure each phase's time without a GPU, where the host is the device.

    Args:
        trace: the trace.
        placing: where its events belong.
        compute: when an operator was at work in the steady steps.
        communication: when communication was under way in them.

    Returns:
        The phases in the order in which the host enters them.
    """
    steps = int(placing.steady.sum())
    is_outermost = (trace.events.kind == Kind.OP) & (placing.operator < 0)
    is_outermost &= placing.counts
    found = []
    for phase, name in enumerate(placing.phases):
        host = find_host_time(trace, placing, phase, placing.steady, placing.main_thread)
        if not len(host.step):
            continue
        host_ms = host.cover.length / 1e6 / steps
        compute_ns = compute.within(host.cover.start, host.cover.end)
        communication_ns = communication.within(host.cover.start, host.cover.end)
        operators = np.count_nonzero(is_outermost & (placing.phase == phase))
        time = PhaseTime(
            name,
            host_ms=host_ms,
            device_sum_ms=host_ms,
            device_ms=host_ms,
            device_span_ms=host_ms,
            lag_ms=0.0,
            compute_ms=int(compute_ns.sum()) / 1e6 / steps,
            communication_ms=int(communication_ns.sum()) / 1e6 / steps,
            copy_ms=0.0,
            kernels=operators / steps,
        )
        found.append((int(host.start_ns.min()), time))
    return _sort_by_entry(found)


# --- pictures of one step


def _draw_device_timeline(
    trace: Trace,
    placing: Placing,
    rows: Integers,
    steady: SteadySteps,
    gaps: Gaps,
    activity: HostActivity,
) -> tuple[Span, ...]:
    """Draw what the device did for each phase in the typical step, as spans.

    Args:
        trace: the trace.
        placing: where its events belong.
        rows: [k] the device's work.
        steady: the steps that count.
        gaps: the device's idle time.
        activity: what the host did, in which it may have waited for others.

    Returns:
        Spans of computing by phase, of "communication" and "copies", and of the waits; by start.
    """
    events = trace.events
    step = placing.steps[steady.typical]
    rows = rows[events.end_ns[rows] > step.start_ns]
    rows = rows[events.start_ns[rows] < step.end_ns]
    spans = []
    for phase, name in enumerate((NO_PHASE, *placing.phases), -1):
        covers = device_covers(trace, rows[placing.phase[rows] == phase])
        spans += _draw_spans(name, covers.compute, step)
        spans += _draw_spans("communication", covers.communication, step)
        spans += _draw_spans("copies", covers.copy, step)
    waits = _find_waits_for_others(gaps, activity.covers)
    return _draw_waits(waits, step, spans)


def _draw_host_timeline(
    trace: Trace,
    placing: Placing,
    communication: Cover,
    steady: SteadySteps,
    rows: dict[str, Cover],
) -> tuple[Span, ...]:
    """Draw what the main thread did in the typical step, in a trace without a GPU.

    Args:
        trace: the trace.
        placing: where its events belong.
        communication: when communication was under way.
        steady: the steps that count.
        rows: each row's time.

    Returns:
        Spans of the main thread's phases, of "communication", and of waits; by start.
    """
    step = placing.steps[steady.typical]
    is_typical = np.arange(len(placing.steady)) == steady.typical
    spans = _draw_spans("communication", communication, step)
    for phase, name in enumerate(placing.phases):
        host = find_host_time(trace, placing, phase, is_typical, placing.main_thread)
        spans += _draw_spans(name, host.cover, step)
    waits = {row: rows[row] for row in WAITS if row in rows}
    return _draw_waits(waits, step, spans)


def _find_waits_for_others(gaps: Gaps, covers: dict[str, Cover]) -> dict[str, Cover]:
    """Idle time of the device in which the host waited for the loader or another process, by row of the step."""
    late = union(gaps.start, gaps.start + gaps.late)
    found = {}
    # what belongs to two causes counts for the first
    earlier = NOTHING
    for row in CAUSES:
        if row in WAITS:
            own = difference(covers[row], earlier)
            found[row] = intersection(own, late)
        earlier = joined(earlier, covers[row])
    return found


def _draw_waits(
    waits: dict[str, Cover],
    step: Step,
    drawn: list[Span],
) -> tuple[Span, ...]:
    """Add the waits that no drawn span shows already, by the titles of their rows; all by start."""
    drawn = sorted(drawn, key=lambda span: span.start_ns)
    starts = [span.start_ns for span in drawn]
    ends = [span.end_ns for span in drawn]
    shown = union(starts, ends)
    for row, cover in waits.items():
        not_shown = difference(cover, shown)
        drawn += _draw_spans(ROW_TITLES[row], not_shown, step)
    drawn.sort(key=lambda span: span.start_ns)
    return tuple(drawn)


def _draw_spans(name: str, cover: Cover, step: Step) -> list[Span]:
    """The cover within the step, with holes too short for a picture closed."""
    starts = np.clip(cover.start, step.start_ns, step.end_ns)
    ends = np.clip(cover.end, step.start_ns, step.end_ns)
    real = ends > starts
    starts = starts[real]
    ends = ends[real]
    if not len(starts):
        return []
    shortest_ns = int(BRIDGED * (step.end_ns - step.start_ns))
    bridged = union(starts, ends + shortest_ns)
    # each bridge ends where the last interval in it does
    last = np.searchsorted(starts, bridged.end, side="left") - 1
    spans = []
    for start_ns, end_ns in zip(bridged.start.tolist(), ends[last].tolist()):
        spans.append(Span(name, start_ns, end_ns))
    return spans
