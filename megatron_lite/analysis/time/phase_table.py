"""Phases of the steady steps: what their label on the host says, and what the device really did for them."""

import numpy as np

from megatron_lite.analysis.intervals import Cover, Nesting, difference, union
from megatron_lite.analysis.time.idle_gaps import device_covers
from megatron_lite.analysis.time.time_results import PhaseTime, Placing, Span
from megatron_lite.analysis.trace.columns import Kind, Trace

NO_PHASE = "outside of all phases"
BRIDGED = 0.002  # of a step: shorter holes cannot be seen in a picture


def host_ranges(trace: Trace, placing: Placing, phase: int, counts: np.ndarray) -> np.ndarray:
    """Rows, among events with `counts`, that say when the host was in the phase: its ranges, else the operators placed there."""
    for kind in (Kind.ANNOTATION, Kind.OP):
        rows = trace.rows[kind]
        rows = rows[(placing.phase[rows] == phase) & counts[rows]]
        if len(rows):
            break
    return rows


def device_phases(trace: Trace, placing: Placing, rows: np.ndarray, steady: np.ndarray) -> tuple[PhaseTime, ...]:
    """Per phase in the order in which the host enters them. `rows`: device work; `steady`: bool per step, False at [-1]."""
    counts, found = steady[placing.step], []
    for phase in range(-1, len(placing.phases)):
        work = rows[(placing.phase[rows] == phase) & counts[rows]]
        ranges = host_ranges(trace, placing, phase, counts) if phase >= 0 else np.empty(0, np.int64)
        if len(work) or len(ranges):
            name = placing.phases[phase] if phase >= 0 else NO_PHASE
            found.append(
                (_entered(trace, ranges, work), _device_phase(trace, placing, name, work, ranges, int(steady.sum())))
            )
    return tuple(phase for _, phase in sorted(found, key=lambda pair: pair[0]))


def _entered(trace: Trace, ranges: np.ndarray, work: np.ndarray) -> int:
    first = ranges if len(ranges) else trace.launch_of[work]
    return int(trace.events.start_ns[first].min())


def _device_phase(
    trace: Trace, placing: Placing, name: str, work: np.ndarray, ranges: np.ndarray, steps: int
) -> PhaseTime:
    events, per_step = trace.events, 1 / steps / 1e6
    covers = device_covers(trace, work)
    span, lag = _span_and_lag(trace, placing, work, ranges)
    return PhaseTime(
        name,
        host_ms=union(events.start_ns[ranges], events.end_ns[ranges]).length * per_step,
        device_sum_ms=float((events.end_ns[work] - events.start_ns[work]).sum()) * per_step,
        device_ms=covers.busy.length * per_step,
        device_span_ms=span * per_step,
        lag_ms=lag,
        compute_ms=covers.compute.length * per_step,
        communication_ms=covers.communication.length * per_step,
        copy_ms=covers.copy.length * per_step,
        kernels=np.count_nonzero(events.kind[work] == Kind.KERNEL) / steps,
    )


def _span_and_lag(trace: Trace, placing: Placing, work: np.ndarray, ranges: np.ndarray) -> tuple[int, float]:
    """(ns from the first work's start to the last one's end, over all steps; mean ms from entering to the first work)."""
    if not len(work):
        return 0, 0.0
    events = trace.events
    first, last = _ends_per_step(placing.step[work], events.start_ns[work], events.end_ns[work])
    entered, _ = _ends_per_step(placing.step[ranges], events.start_ns[ranges], events.end_ns[ranges])
    both = [step for step in first if step in entered]
    lag = float(np.mean([first[step] - entered[step] for step in both])) / 1e6 if both else 0.0
    return sum(last[step] - first[step] for step in first), lag


def _ends_per_step(step: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[dict[int, int], dict[int, int]]:
    """(earliest start, latest end) of each step."""
    steps, inverse = np.unique(step, return_inverse=True)
    first, last = np.full(len(steps), np.iinfo(np.int64).max), np.zeros(len(steps), np.int64)
    np.minimum.at(first, inverse, start)
    np.maximum.at(last, inverse, end)
    return dict(zip(steps.tolist(), first.tolist(), strict=True)), dict(zip(steps.tolist(), last.tolist(), strict=True))


def host_phases(
    trace: Trace, placing: Placing, compute: Cover, communication: Cover, steady: np.ndarray
) -> tuple[PhaseTime, ...]:
    """The same without a GPU: the host is the device. compute, communication: unions inside the steady steps."""
    events, counts, found = trace.events, steady[placing.step], []
    steps = int(steady.sum())
    for phase, name in enumerate(placing.phases):
        ranges = host_ranges(trace, placing, phase, counts & (events.thread == placing.main_thread))
        if not len(ranges):
            continue
        cover = difference(union(events.start_ns[ranges], events.end_ns[ranges]), _inner(trace, placing, phase))
        host, computing, talking = (
            int(one) / 1e6 / steps
            for one in (
                cover.length,
                compute.within(cover.start, cover.end).sum(),
                communication.within(cover.start, cover.end).sum(),
            )
        )
        operators = np.count_nonzero(
            counts & (placing.phase == phase) & (events.kind == Kind.OP) & (placing.operator < 0)
        )
        found.append(
            (
                int(events.start_ns[ranges].min()),
                PhaseTime(
                    name,
                    host_ms=host,
                    device_sum_ms=host,
                    device_ms=host,
                    device_span_ms=host,
                    lag_ms=0.0,
                    compute_ms=computing,
                    communication_ms=talking,
                    copy_ms=0.0,
                    kernels=operators / steps,
                ),
            )
        )
    return tuple(phase for _, phase in sorted(found, key=lambda pair: pair[0]))


def _inner(trace: Trace, placing: Placing, phase: int) -> Cover:
    """Ranges of other phases that lie inside one of this phase: their time is theirs."""
    events = trace.events
    rows = np.flatnonzero(
        (placing.phase >= 0) & (events.kind == Kind.ANNOTATION) & (events.thread == placing.main_thread)
    )
    nest = Nesting(rows, events.start_ns[rows], events.end_ns[rows], events.thread[rows])
    parents = nest.parent_rows()
    inner = nest.rows[
        (parents >= 0) & (placing.phase[nest.rows] != phase) & (placing.phase[np.maximum(parents, 0)] == phase)
    ]
    return union(events.start_ns[inner], events.end_ns[inner])


def device_timeline(trace: Trace, placing: Placing, rows: np.ndarray, step: int) -> tuple[Span, ...]:
    """What the device did for each phase in one step: computing, and "communication" and "copies" apart, as spans."""
    start, end = placing.steps[step].start_ns, placing.steps[step].end_ns
    rows = rows[(trace.events.end_ns[rows] > start) & (trace.events.start_ns[rows] < end)]
    spans = []
    for phase in range(-1, len(placing.phases)):
        covers = device_covers(trace, rows[placing.phase[rows] == phase])
        name = placing.phases[phase] if phase >= 0 else NO_PHASE
        for title, cover in ((name, covers.compute), ("communication", covers.communication), ("copies", covers.copy)):
            spans += _spans(title, cover, start, end)
    return tuple(sorted(spans, key=lambda span: span.start_ns))


def host_timeline(trace: Trace, placing: Placing, communication: Cover, step: int) -> tuple[Span, ...]:
    """The same without a GPU: the main thread's phases, and "communication"."""
    events, start, end = trace.events, placing.steps[step].start_ns, placing.steps[step].end_ns
    inside = (events.thread == placing.main_thread) & (placing.step == step)
    spans = _spans("communication", communication, start, end)
    for phase, name in enumerate(placing.phases):
        rows = host_ranges(trace, placing, phase, inside)
        cover = difference(union(events.start_ns[rows], events.end_ns[rows]), _inner(trace, placing, phase))
        spans += _spans(name, cover, start, end)
    return tuple(sorted(spans, key=lambda span: span.start_ns))


def _spans(name: str, cover: Cover, start: int, end: int) -> list[Span]:
    """The cover within [start, end), with holes too short for a picture closed."""
    starts, ends = np.clip(cover.start, start, end), np.clip(cover.end, start, end)
    real = ends > starts
    bridged = union(starts[real], ends[real] + int(BRIDGED * (end - start)))
    ends = ends[real][np.searchsorted(starts[real], bridged.end, side="left") - 1] if len(bridged) else bridged.end
    return [Span(name, int(a), int(b)) for a, b in zip(bridged.start, ends, strict=True)]
