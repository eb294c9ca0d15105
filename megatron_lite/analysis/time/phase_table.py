"""Phases of the steady steps: what their label on the host says, and what the device really did for them."""

import numpy as np

from megatron_lite.analysis.intervals import Cover, difference, union
from megatron_lite.analysis.time.idle_gaps import device_covers
from megatron_lite.analysis.time.time_results import PhaseTime, Placing, Span
from megatron_lite.analysis.trace.columns import Kind, Trace

NO_PHASE = "outside of all phases"
BRIDGED = 0.002  # of a step: shorter holes cannot be seen in a picture


def _find_host_ranges(trace: Trace, placing: Placing, phase: int, counts: np.ndarray) -> np.ndarray:
    """Rows, among events with `counts`, that say when the host was in the phase: its ranges, else the operators placed there."""
    for kind in (Kind.ANNOTATION, Kind.OP):
        rows = trace.rows[kind]
        rows = rows[(placing.phase[rows] == phase) & counts[rows]]
        if len(rows):
            break
    return rows


def measure_device_phases(
    trace: Trace, placing: Placing, rows: np.ndarray, steady: np.ndarray
) -> tuple[PhaseTime, ...]:
    """Per phase in the order in which the host enters them. `rows`: device work; `steady`: bool per step, False at [-1]."""
    events, counts, steps, found = trace.events, steady[placing.step], int(steady.sum()), []
    per_step = 1 / steps / 1e6
    for phase, name in enumerate((NO_PHASE, *placing.phases), -1):
        work = rows[(placing.phase[rows] == phase) & counts[rows]]
        ranges = _find_host_ranges(trace, placing, phase, counts) if phase >= 0 else np.empty(0, np.int64)
        if not len(work) and not len(ranges):
            continue
        covers = device_covers(trace, work)
        first, last = _find_ends_per_step(trace, placing, work)
        begun, _ = _find_ends_per_step(trace, placing, ranges)
        lags = [first[step] - begun[step] for step in first if step in begun]
        entered = int(events.start_ns[ranges if len(ranges) else trace.launch_of[work]].min())
        time = PhaseTime(
            name,
            host_ms=trace.cover(ranges).length * per_step,
            device_sum_ms=float((events.end_ns[work] - events.start_ns[work]).sum()) * per_step,
            device_ms=covers.busy.length * per_step,
            device_span_ms=sum(last[step] - first[step] for step in first) * per_step,
            lag_ms=float(np.mean(lags)) / 1e6 if lags else 0.0,
            compute_ms=covers.compute.length * per_step,
            communication_ms=covers.communication.length * per_step,
            copy_ms=covers.copy.length * per_step,
            kernels=np.count_nonzero(events.kind[work] == Kind.KERNEL) / steps,
        )
        found.append((entered, time))
    return tuple(time for _, time in sorted(found, key=lambda pair: pair[0]))


def _find_ends_per_step(trace: Trace, placing: Placing, rows: np.ndarray) -> tuple[dict[int, int], dict[int, int]]:
    """({step: earliest start}, {step: latest end}) of the events `rows`."""
    steps, inverse = np.unique(placing.step[rows], return_inverse=True)
    first, last = np.full(len(steps), np.iinfo(np.int64).max), np.zeros(len(steps), np.int64)
    np.minimum.at(first, inverse, trace.events.start_ns[rows])
    np.maximum.at(last, inverse, trace.events.end_ns[rows])
    return dict(zip(steps.tolist(), first.tolist())), dict(zip(steps.tolist(), last.tolist()))


def measure_host_phases(
    trace: Trace, placing: Placing, compute: Cover, communication: Cover, steady: np.ndarray
) -> tuple[PhaseTime, ...]:
    """The same without a GPU: the host is the device. compute, communication: unions inside the steady steps."""
    events, counts, steps, found = trace.events, steady[placing.step], int(steady.sum()), []
    for phase, name in enumerate(placing.phases):
        ranges = _find_host_ranges(trace, placing, phase, counts & (events.thread == placing.main_thread))
        if not len(ranges):
            continue
        cover = _find_own_time(trace, placing, phase, ranges)
        host = cover.length / 1e6 / steps
        outermost = counts & (placing.phase == phase) & (events.kind == Kind.OP) & (placing.operator < 0)
        time = PhaseTime(
            name, host_ms=host, device_sum_ms=host, device_ms=host, device_span_ms=host, lag_ms=0.0,
            compute_ms=int(compute.within(cover.start, cover.end).sum()) / 1e6 / steps,
            communication_ms=int(communication.within(cover.start, cover.end).sum()) / 1e6 / steps,
            copy_ms=0.0, kernels=np.count_nonzero(outermost) / steps,
        )  # fmt: skip
        found.append((int(events.start_ns[ranges].min()), time))
    return tuple(time for _, time in sorted(found, key=lambda pair: pair[0]))


def _find_own_time(trace: Trace, placing: Placing, phase: int, ranges: np.ndarray) -> Cover:
    """When the phase's ranges last, without the ranges of other phases inside of them."""
    events = trace.events
    on_main = (events.kind == Kind.ANNOTATION) & (events.thread == placing.main_thread)
    nest = trace.nest(np.flatnonzero((placing.phase >= 0) & on_main))
    in_phase = (nest.parent >= 0) & (placing.phase[nest.row_of(nest.parent)] == phase)
    return difference(trace.cover(ranges), trace.cover(nest.rows[in_phase & (placing.phase[nest.rows] != phase)]))


def draw_device_timeline(trace: Trace, placing: Placing, rows: np.ndarray, step: int) -> tuple[Span, ...]:
    """What the device did for each phase in one step: computing, and "communication" and "copies" apart, as spans."""
    start, end = placing.steps[step].start_ns, placing.steps[step].end_ns
    rows = rows[(trace.events.end_ns[rows] > start) & (trace.events.start_ns[rows] < end)]
    spans = []
    for phase, name in enumerate((NO_PHASE, *placing.phases), -1):
        covers = device_covers(trace, rows[placing.phase[rows] == phase])
        for title, cover in ((name, covers.compute), ("communication", covers.communication), ("copies", covers.copy)):
            spans += _draw_spans(title, cover, start, end)
    return tuple(sorted(spans, key=lambda span: span.start_ns))


def draw_host_timeline(trace: Trace, placing: Placing, communication: Cover, step: int) -> tuple[Span, ...]:
    """The same without a GPU: the main thread's phases, and "communication"."""
    start, end = placing.steps[step].start_ns, placing.steps[step].end_ns
    inside = (trace.events.thread == placing.main_thread) & (placing.step == step)
    spans = _draw_spans("communication", communication, start, end)
    for phase, name in enumerate(placing.phases):
        ranges = _find_host_ranges(trace, placing, phase, inside)
        spans += _draw_spans(name, _find_own_time(trace, placing, phase, ranges), start, end)
    return tuple(sorted(spans, key=lambda span: span.start_ns))


def _draw_spans(name: str, cover: Cover, start: int, end: int) -> list[Span]:
    """The cover within [start, end), with holes too short for a picture closed."""
    starts, ends = np.clip(cover.start, start, end), np.clip(cover.end, start, end)
    real = ends > starts
    bridged = union(starts[real], ends[real] + int(BRIDGED * (end - start)))
    ends = ends[real][np.searchsorted(starts[real], bridged.end, side="left") - 1] if len(bridged) else bridged.end
    return [Span(name, int(a), int(b)) for a, b in zip(bridged.start, ends)]
