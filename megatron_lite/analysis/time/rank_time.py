"""Where the steps of one rank go."""

import re
from collections.abc import Iterator
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

MIN_STEPS = 2
WAITS = ("data_wait", "process_wait")  # rows that the picture of a step shows beside its phases
BRIDGED = 0.002  # of a step: shorter holes cannot be seen in a picture
# The host is too slow to launch, by three thresholds: an A100 under DDP with 76% idle time must be found, a CUDA graph
# with 64% (queued for 162 ms) must not.
IDLE_SHARE, KERNEL_TO_INTERVAL, QUEUE_US = 0.15, 1.5, 50.0
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
        """ms of the cover inside the windows, per step."""
        return intersection(cover, self.cover).length / 1e6 / self.count


def rank_time(trace: Trace, placing: Placing) -> RankTime:
    """The figures of a trace whose events are placed; empty ones, with a note, where no step has any work."""
    steps, on_gpu = placing.steps, len(trace.device_rows) > 0
    if not any(step.steady for step in steps):
        device = placing.device if on_gpu else 0
        return RankTime(trace.rank, trace.name_device(device), on_gpu, steps, notes=placing.notes)
    steady = _choose_steady(steps)
    return (_measure_device if on_gpu else _measure_host)(trace, placing, steady)


def _choose_steady(steps: tuple[Step, ...]) -> SteadySteps:
    counted = [step for step in steps if step.steady]
    usual = np.median([step.ms for step in counted])
    left_out = [f"{step.name} ({step.why_not})" for step in steps if not step.steady]
    few = len(counted) < MIN_STEPS <= len(steps)
    return SteadySteps(
        count=len(counted),
        cover=union([step.start_ns for step in counted], [step.end_ns for step in counted]),
        host_cover=union([step.host_start_ns for step in counted], [step.host_end_ns for step in counted]),
        typical=steps.index(min(counted, key=lambda step: abs(step.ms - usual))),
        notes=(f"only one step counts; left out: {', '.join(left_out)}",) if few else (),
    )


def _measure_device(trace: Trace, placing: Placing, steady: SteadySteps) -> RankTime:
    """Measure the time of a rank whose trace has device work."""
    events = trace.events
    device = placing.device
    rows = trace.device_rows[events.device[trace.device_rows] == device]
    covers = device_covers(trace, rows)
    activity = find_host_activity(trace, placing)
    sites = CallSites(trace, placing)
    others = _find_other_devices(trace, device, steady)
    gaps = find_idle_gaps(trace, rows, covers.busy, steady.cover, activity)
    idle_beside_ms = 0.0
    if others:
        gaps = _wait_for_others(gaps, joined(*others.values()))
        idle_beside_ms = steady.per_step(difference(joined(*others.values()), covers.busy))
    breakdown = _break_down(covers, gaps, steady)
    step_ms = _measure_step(steady)
    communication_ms = steady.per_step(covers.communication)
    speed = _measure_launches(trace, rows[placing.counts[rows] & (events.kind[rows] == Kind.KERNEL)])
    spilled = rows[trace.launch_of[rows] < 0]
    spilled_ms = trace.cover(spilled).length / 1e6
    timeline = _draw_device_timeline(trace, placing, rows, steady.typical)
    waits = _find_waits_for_others(gaps, activity.covers)
    return RankTime(
        rank=trace.rank,
        device=trace.name_device(device),
        on_gpu=True,
        steps=placing.steps,
        step_ms=step_ms,
        rows=breakdown,
        busy_ms=steady.per_step(covers.busy),
        communication_ms=communication_ms,
        copy_ms=steady.per_step(covers.copy),
        overlap=_compute_overlap(breakdown, communication_ms),
        phases=_measure_device_phases(trace, placing, rows),
        syncs=sites.find_sync_sites(activity.waits, gaps, activity.covers),
        hosts=sites.find_host_sites(gaps),
        loader_host_ms=intersection(activity.covers["data_wait"], steady.host_cover).length / 1e6 / steady.count,
        named=measure_host_work(activity.works, placing.steps),
        short_gaps=measure_short_gaps(gaps, steady.count),
        launches=speed.kernels / steady.count,
        median_kernel_us=speed.kernel_us,
        median_launch_interval_us=speed.interval_us,
        median_queue_us=speed.queue_us,
        launch_bound=_is_launch_bound(breakdown, step_ms, speed),
        spilled_ms=spilled_ms,
        idle_beside_ms=idle_beside_ms,
        timeline=_draw_waits(waits, placing.steps[steady.typical], timeline),
        timeline_step=steady.typical,
        notes=(
            *placing.notes,
            *steady.notes,
            *_describe_gaps(rows, spilled, spilled_ms),
            *_describe_devices(device, others, steady),
        ),
    )


def _measure_step(steady: SteadySteps) -> float:
    """Measure the mean steady step, ms."""
    return steady.cover.length / 1e6 / steady.count


def _compute_overlap(breakdown: dict[str, float], communication_ms: float) -> float | None:
    """Compute the share of communication that computing hides; None without communication."""
    if not communication_ms:
        return None
    return 1 - breakdown["exposed_communication"] / communication_ms


def _break_down(covers: DeviceCovers, gaps: Gaps, steady: SteadySteps) -> dict[str, float]:
    """ms per step of each row; they add up to the step. Communication and copies count where nothing computes."""
    exposed_communication = difference(covers.communication, covers.compute)
    exposed_copy = difference(covers.copy, joined(covers.compute, covers.communication))
    breakdown = {
        "compute": steady.per_step(covers.compute),
        "exposed_communication": steady.per_step(exposed_communication),
        "exposed_copy": steady.per_step(exposed_copy),
    }
    for row, amounts_ns in gaps.amounts.items():
        breakdown[row] = int(amounts_ns.sum()) / 1e6 / steady.count
    return breakdown


def _is_launch_bound(breakdown: dict[str, float], step_ms: float, speed: "LaunchSpeed") -> bool:
    """Whether the device is idle for a notable part of the step because the host launches too slowly."""
    idle_ms = sum(breakdown[row] for row in ("host", *AFTER_SYNCS))
    return idle_ms / step_ms >= IDLE_SHARE and speed.is_slow


@dataclass(frozen=True)
class LaunchSpeed:
    """How fast the host launches kernels."""

    kernels: int
    kernel_us: float  # median of each
    interval_us: float  # between calls of the same thread
    queue_us: float  # from the end of a call to its kernel's start; below 0 where that starts before the call returns

    @property
    def is_slow(self) -> bool:
        """Are kernels over faster than new ones come, and hardly any waits in the queue?"""
        return 0 < self.kernel_us < KERNEL_TO_INTERVAL * self.interval_us and self.queue_us < QUEUE_US


def _measure_launches(trace: Trace, kernels: Integers) -> LaunchSpeed:
    events, launch = trace.events, trace.launch_of
    launched = kernels[launch[kernels] >= 0]
    calls = np.unique(launch[launched])
    calls = calls[np.lexsort((events.start_ns[calls], events.thread[calls]))]
    between = np.diff(events.start_ns[calls])[np.diff(events.thread[calls]) == 0]
    return LaunchSpeed(
        kernels=len(kernels),
        kernel_us=_median_us(events.end_ns[kernels] - events.start_ns[kernels]),
        interval_us=_median_us(between),
        queue_us=_median_us(events.start_ns[launched] - events.end_ns[launch[launched]]),
    )


def _median_us(lengths: Integers) -> float:
    return float(np.median(lengths)) / 1e3 if len(lengths) else 0.0


def _find_other_devices(trace: Trace, device: int, steady: SteadySteps) -> dict[int, Cover]:
    """{number: when it is busy in the steady steps} of the other GPUs that the process drives."""
    events, rows = trace.events, trace.device_rows
    numbers = np.unique(events.device[rows]).tolist()
    covers = {number: trace.cover(rows[events.device[rows] == number]) for number in numbers if number != device}
    return {number: intersection(cover, steady.cover) for number, cover in covers.items()}


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
    return replace(gaps, amounts=amounts, waited=np.where(amounts["sync"] > 0, gaps.waited, -1))


def _describe_devices(device: int, others: dict[int, Cover], steady: SteadySteps) -> Iterator[str]:
    if others:
        busy = ", ".join(f"GPU {number} is busy {steady.per_step(cover):,.1f} ms" for number, cover in others.items())
        yield (
            f"the process drives {len(others) + 1} GPUs; "
            f"steps, kernels and FLOPs are those of GPU {device}, which computes "
            f"most; per step {busy}"
        )


def _describe_gaps(rows: Integers, spilled: Integers, spilled_ms: float) -> Iterator[str]:
    if len(spilled) == len(rows):
        yield "no device work can be joined with the call that launched it: its phase and why the GPU idled are unknown"
    elif len(spilled):
        yield (
            f"{len(spilled)} of {len(rows)} kernels and copies have no launch call in the trace ({spilled_ms:.1f} ms): "
            "they keep the device busy, but belong to no step or phase"
        )


def _measure_host(trace: Trace, placing: Placing, steady: SteadySteps) -> RankTime:
    """The time of a rank whose trace has no device work: the main thread's, since the host is the device.

    Each moment of a step is, in this order: saving or evaluating; compiling; in the loader; an operator at work on the
    main thread or on autograd's; waiting for communication (a backend's span such as gloo:all_reduce runs on a thread
    of its own, and no operator does); the garbage collector or another named cause; else Python between operators.
    """
    events = trace.events
    activity = find_host_activity(trace, placing)
    sites = CallSites(trace, placing)
    spans = find_communication_names(trace)[events.name] & (events.kind == Kind.ANNOTATION)
    communication = intersection(trace.cover(spans), steady.cover)
    working = _find_working_operators(trace, activity, communication)
    rows = _divide_host_time(activity.covers, working, communication, steady)
    breakdown = {row: cover.length / 1e6 / steady.count for row, cover in rows.items()}
    compute = intersection(working, steady.cover)
    communication_ms = steady.per_step(communication)
    timeline = _draw_host_timeline(trace, placing, communication, steady.typical)
    waits = {row: rows[row] for row in WAITS if row in rows}
    return RankTime(
        rank=trace.rank,
        device=None,
        on_gpu=False,
        steps=placing.steps,
        step_ms=_measure_step(steady),
        rows=breakdown,
        busy_ms=steady.per_step(joined(compute, communication)),
        communication_ms=communication_ms,
        overlap=_compute_overlap(breakdown, communication_ms),
        phases=_measure_host_phases(trace, placing, compute, communication),
        hosts=sites.find_python_sites(rows["host"]),
        loader_host_ms=steady.per_step(activity.covers["data_wait"]),
        named=measure_host_work(activity.works, placing.steps),
        timeline=_draw_waits(waits, placing.steps[steady.typical], timeline),
        timeline_step=steady.typical,
        notes=(*placing.notes, *steady.notes),
        recorded_between=_measure_recorded_between(trace, activity, steady),
        stretches=sites.find_long_stretches(rows["host"]),
        short_gaps=sites.measure_short_stretches(rows["host"]),
    )


def _divide_host_time(
    covers: dict[str, Cover], working: Cover, communication: Cover, steady: SteadySteps
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


def _find_working_operators(trace: Trace, activity: HostActivity, communication: Cover) -> Cover:
    """autograd's wrappers count as operators only while nothing is communicated: DistributedDataParallel waits for gloo
    inside them. Nor does an operator that calls `wait_tensor` work meanwhile."""
    events = trace.events
    compiled = trace.matching(COMPILED.match) & (events.kind == Kind.ANNOTATION)
    mine = ((events.kind == Kind.OP) | compiled) & np.isin(events.thread, activity.threads)
    may_wait = trace.matching(lambda name: bool(AUTOGRAD.match(name) or MAY_WAIT.match(name)))
    waits = intersection(trace.cover(mine & trace.matching(is_wait)), communication)
    working = difference(trace.cover(mine & ~may_wait), waits)
    return joined(working, difference(trace.cover(mine & may_wait), communication))


def _measure_recorded_between(trace: Trace, activity: HostActivity, steady: SteadySteps) -> float:
    """Measure which share of the host's recorded events lies outside of all operators, on the threads that work.

    Recording costs each event about the same: before its start and after its end, which is inside of the operator
    around it.
    """
    events = trace.events
    recorded = np.isin(events.kind, (Kind.OP, Kind.ANNOTATION, Kind.PYTHON)) & np.isin(events.thread, activity.threads)
    rows = np.flatnonzero(recorded & steady.host_cover.holds(events.start_ns))
    nest = trace.nest(rows)
    if not len(nest.rows):
        return 1.0
    is_operator = events.kind[nest.rows] == Kind.OP
    parent = nest.parent
    inside = np.zeros(len(parent), bool)
    for depth in range(1, int(nest.depth.max()) + 1):
        at = np.flatnonzero(nest.depth == depth)
        inside[at] = is_operator[parent[at]] | inside[parent[at]]
    return 1.0 - float(inside.mean())


# --- phases: what their label on the host says, and what the device really did for them


@dataclass(frozen=True)
class HostTime:
    """When the host was in a phase: its ranges, else the operators placed there. [k] each."""

    start_ns: Integers
    step: Integers
    cover: Cover  # without other phases inside


NO_HOST_TIME = HostTime(np.empty(0, np.int64), np.empty(0, np.int64), NOTHING)


def _find_host_time(trace: Trace, placing: Placing, phase: int, steps: Flags, main_only: bool = False) -> HostTime:
    """Of the phase, in the steps for which `steps` holds (as Placing.steady); main_only:
    on the thread that drives them."""
    events, ranges = trace.events, placing.ranges
    on_thread = ranges.thread == placing.main_thread if main_only else np.ones(len(ranges), bool)
    chosen = np.flatnonzero((ranges.phase == phase) & steps[ranges.step] & on_thread)
    if len(chosen):
        return HostTime(ranges.start_ns[chosen], ranges.step[chosen], ranges.cover_own(chosen))
    rows = trace.rows[Kind.OP]
    rows = rows[(placing.phase[rows] == phase) & steps[placing.step[rows]]]
    rows = rows[events.thread[rows] == placing.main_thread] if main_only else rows
    return HostTime(events.start_ns[rows], placing.step[rows], trace.cover(rows))


def _measure_device_phases(trace: Trace, placing: Placing, rows: Integers) -> tuple[PhaseTime, ...]:
    """Measure each phase's time on the device.

    Args:
        trace, placing: the trace, and where its events belong.
        rows: [k] the trace's device work.

    Returns:
        The phases in the order in which the host enters them.
    """
    found = []
    for phase, name in enumerate((NO_PHASE, *placing.phases), -1):
        work = rows[(placing.phase[rows] == phase) & placing.counts[rows]]
        host = NO_HOST_TIME if phase < 0 else _find_host_time(trace, placing, phase, placing.steady)
        if not len(work) and not len(host.step):
            continue
        host_starts_ns = host.start_ns if len(host.step) else trace.events.start_ns[trace.launch_of[work]]
        found.append((int(host_starts_ns.min()), _measure_device_phase(name, trace, placing, work, host)))
    return tuple(time for _, time in sorted(found, key=lambda pair: pair[0]))


def _measure_device_phase(name: str, trace: Trace, placing: Placing, work: Integers, host: HostTime) -> PhaseTime:
    """Measure one phase per steady step.

    Args:
        name: the phase's name.
        trace, placing: the trace, and where its events belong.
        work: [k] the phase's device work.
        host: when the host was in the phase.
    """
    events = trace.events
    steps = int(placing.steady.sum())
    per_step = 1 / steps / 1e6
    covers = device_covers(trace, work)
    first, last = _find_ends_per_step(placing.step[work], events.start_ns[work], events.end_ns[work])
    entered, _ = _find_ends_per_step(host.step, host.start_ns, host.start_ns)
    lags = [first[step] - entered[step] for step in first if step in entered]
    return PhaseTime(
        name,
        host_ms=host.cover.length * per_step,
        device_sum_ms=float((events.end_ns[work] - events.start_ns[work]).sum()) * per_step,
        device_ms=covers.busy.length * per_step,
        device_span_ms=sum(last[step] - first[step] for step in first) * per_step,
        lag_ms=float(np.mean(lags)) / 1e6 if lags else 0.0,
        compute_ms=covers.compute.length * per_step,
        communication_ms=covers.communication.length * per_step,
        copy_ms=covers.copy.length * per_step,
        kernels=np.count_nonzero(events.kind[work] == Kind.KERNEL) / steps,
    )


def _find_ends_per_step(step: Integers, start: Integers, end: Integers) -> tuple[dict[int, int], dict[int, int]]:
    """({step: earliest start}, {step: latest end}). step, start, end: [k] of events or ranges."""
    steps, inverse = np.unique(step, return_inverse=True)
    first, last = np.full(len(steps), np.iinfo(np.int64).max), np.zeros(len(steps), np.int64)
    np.minimum.at(first, inverse, start)
    np.maximum.at(last, inverse, end)
    return dict(zip(steps.tolist(), first.tolist())), dict(zip(steps.tolist(), last.tolist()))


def _measure_host_phases(trace: Trace, placing: Placing, compute: Cover, communication: Cover) -> tuple[PhaseTime, ...]:
    """The same without a GPU: the host is the device. compute, communication: unions inside the steady steps."""
    events, counts, steps, found = trace.events, placing.counts, int(placing.steady.sum()), []
    for phase, name in enumerate(placing.phases):
        time_on_host = _find_host_time(trace, placing, phase, placing.steady, main_only=True)
        if not len(time_on_host.step):
            continue
        cover = time_on_host.cover
        host = cover.length / 1e6 / steps
        outermost = counts & (placing.phase == phase) & (events.kind == Kind.OP) & (placing.operator < 0)
        time = PhaseTime(
            name, host_ms=host, device_sum_ms=host, device_ms=host, device_span_ms=host, lag_ms=0.0,
            compute_ms=int(compute.within(cover.start, cover.end).sum()) / 1e6 / steps,
            communication_ms=int(communication.within(cover.start, cover.end).sum()) / 1e6 / steps,
            copy_ms=0.0, kernels=np.count_nonzero(outermost) / steps,
        )  # fmt: skip
        found.append((int(time_on_host.start_ns.min()), time))
    return tuple(time for _, time in sorted(found, key=lambda pair: pair[0]))


def _draw_device_timeline(trace: Trace, placing: Placing, rows: Integers, step: int) -> tuple[Span, ...]:
    """What the device did for each phase in one step: computing, and "communication" and "copies" apart, as spans."""
    start, end = placing.steps[step].start_ns, placing.steps[step].end_ns
    rows = rows[(trace.events.end_ns[rows] > start) & (trace.events.start_ns[rows] < end)]
    spans = []
    for phase, name in enumerate((NO_PHASE, *placing.phases), -1):
        covers = device_covers(trace, rows[placing.phase[rows] == phase])
        for title, cover in ((name, covers.compute), ("communication", covers.communication), ("copies", covers.copy)):
            spans += _draw_spans(title, cover, start, end)
    return tuple(sorted(spans, key=lambda span: span.start_ns))


def _find_waits_for_others(gaps: Gaps, covers: dict[str, Cover]) -> dict[str, Cover]:
    """Idle time of the device in which the host waited for the loader or another process, by row of the step."""
    late = union(gaps.start, gaps.start + gaps.late)
    earlier, found = NOTHING, {}
    for row in CAUSES:
        if row in WAITS:
            found[row] = intersection(difference(covers[row], earlier), late)
        earlier = joined(earlier, covers[row])
    return found


def _draw_waits(waits: dict[str, Cover], step: Step, drawn: tuple[Span, ...]) -> tuple[Span, ...]:
    """The picture of one step with the waits that no span of it shows already, by the titles of their rows."""
    shown = union([span.start_ns for span in drawn], [span.end_ns for span in drawn])
    spans = list(drawn)
    for row, cover in waits.items():
        spans += _draw_spans(ROW_TITLES[row], difference(cover, shown), step.start_ns, step.end_ns)
    return tuple(sorted(spans, key=lambda span: span.start_ns))


def _draw_host_timeline(trace: Trace, placing: Placing, communication: Cover, step: int) -> tuple[Span, ...]:
    """The same without a GPU: the main thread's phases, and "communication"."""
    start, end = placing.steps[step].start_ns, placing.steps[step].end_ns
    inside = np.arange(len(placing.steady)) == step
    spans = _draw_spans("communication", communication, start, end)
    for phase, name in enumerate(placing.phases):
        host = _find_host_time(trace, placing, phase, inside, main_only=True)
        spans += _draw_spans(name, host.cover, start, end)
    return tuple(sorted(spans, key=lambda span: span.start_ns))


def _draw_spans(name: str, cover: Cover, start: int, end: int) -> list[Span]:
    """The cover within [start, end), with holes too short for a picture closed."""
    starts, ends = np.clip(cover.start, start, end), np.clip(cover.end, start, end)
    real = ends > starts
    bridged = union(starts[real], ends[real] + int(BRIDGED * (end - start)))
    ends = ends[real][np.searchsorted(starts[real], bridged.end, side="left") - 1] if len(bridged) else bridged.end
    return [Span(name, int(a), int(b)) for a, b in zip(bridged.start, ends)]
