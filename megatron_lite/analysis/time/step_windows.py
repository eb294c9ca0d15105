"""Steps on the device's clock, and which of them are steady; and the step, phase and operator of every event.

The GPU runs behind the host, so a step of the host is not a step of the GPU. Step s lasts from the end of the last work
of step s-1 to the end of its own last work, on the stream that computes: tiles without holes, so their mean is the time
per step, and waiting for the data loader, which comes before a step's work, belongs to that step. (Tiles from first to
first event would put it into the step before, and leave a window's last step without its waiting.) The first step has
no predecessor: it begins where the host began it, or where work from before the window ends, and lacks what the step
before left to do after its last work. With enough others it does not count.
"""

import itertools
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.kernels.kernel_words import is_communication
from megatron_lite.analysis.time.find_phases import find_phases
from megatron_lite.analysis.time.host_causes import explain_paying_steps
from megatron_lite.analysis.time.host_steps import HostSteps, find_host_steps
from megatron_lite.analysis.time.sites import is_program_frame
from megatron_lite.analysis.time.time_results import NEVER_NS, Placing, Step
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.analysis.trace.launches import find_launch_call
from megatron_lite.phases import Phase

LONGER = 1.25  # a first or last step so much longer than the median of the others pays for the profiler
ENOUGH = 3  # complete steps: then the window's first one is not needed
NO_WORK = "no work in it"
CUT = "the trace ends in it"
FEWER_EVENTS = "fewer events than the others"
FEWER = 0.8  # of the others' device events: the trace cuts the step


def attribute_events(trace: Trace) -> Placing:
    """Find the step, phase and operator of every event.

    Device work belongs where its launch call stands, whichever thread made it; host events where they start.
    """
    events = trace.events
    host = _leave_out_empty_end(trace, find_host_steps(trace))
    thread, moment = _find_places_on_host(trace)
    step = _find_step_of_events(trace, host, thread, moment)
    phases, phase, ranges = find_phases(trace, host, thread, moment)
    ranges = replace(ranges, step=_find_step_at(host, ranges.start_ns))
    steps, notes = _find_steps(trace, host, step, phases, phase)
    device = -1
    if len(trace.device_rows):
        device, _ = find_computing_stream(trace)
    is_others = (events.device >= 0) & (events.device != device)
    return Placing(
        steps=steps,
        step=step,
        phases=phases,
        phase=phase,
        operator=_find_operators(trace, thread, moment),
        main_thread=host.thread,
        notes=host.notes + notes,
        device=device,
        on_other_device=is_others if is_others.any() else None,
        ranges=ranges,
    )


def _find_places_on_host(trace: Trace) -> tuple[Integers, Integers]:
    """Find thread and moment [n] at which the host was for each event; thread -1 where that is not in the trace."""
    events = trace.events
    launch = trace.launch_of
    own = np.arange(len(events))
    at = np.where(launch >= 0, launch, own)
    thread = events.thread[at].astype(np.int64)
    is_of_device = (events.device >= 0) | (events.kind == Kind.GPU_ANNOTATION)
    thread[is_of_device & (launch < 0)] = -1
    return thread, events.start_ns[at]


def _find_step_of_events(
    trace: Trace,
    host: HostSteps,
    thread: Integers,
    moment: Integers,
) -> NDArray[np.int32]:
    """Find the step of each event by the host's place for it: int32 [n]; -1 for none."""
    is_known = thread >= 0
    # without any launch call device work has to be placed by its own time
    if not is_known[trace.device_rows].any():
        is_known[trace.device_rows] = True
    step = np.where(is_known, _find_step_at(host, moment), -1)
    return step.astype(np.int32)


def _find_operators(trace: Trace, thread: Integers, moment: Integers) -> NDArray[np.int64]:
    """Find the row of the innermost operator around the host's place for each event: int64 [n]; -1 for none."""
    events = trace.events
    nest = trace.nest(trace.rows[Kind.OP])
    operator = np.full(len(events), -1, np.int64)
    operator[nest.rows] = nest.row_of(nest.parent)
    is_placed = thread >= 0
    others = np.flatnonzero(is_placed & (events.kind != Kind.OP))
    operator[others] = nest.row_at(moment[others], thread[others])
    return operator


def _find_step_at(host: HostSteps, moment: Integers) -> Integers:
    """Find the step of each moment of the host: int64 [k]; -1: outside all."""
    count = len(host.names)
    if not count:
        return np.full(len(moment), -1, np.int64)
    after = np.searchsorted(host.end_ns, moment, side="right")
    nearest = np.minimum(after, count - 1)
    has_begun = moment >= host.start_ns[nearest]
    # what lies between two steps belongs to the later one, if that one follows directly
    is_inside = has_begun | host.follows()[nearest]
    return np.where((after < count) & is_inside, after, -1)


def _leave_out_empty_end(trace: Trace, steps: HostSteps) -> HostSteps:
    """Leave out the steps at the end in which nothing but their marks was recorded.

    The window's last mark often begins a step that the loop never makes.
    """
    works = np.isin(trace.events.kind, (Kind.OP, Kind.ANNOTATION))
    is_mark = trace.matching(set(steps.names).__contains__)
    works &= ~is_mark
    works[trace.find_named(find_launch_call, Kind.RUNTIME)] = True
    works[trace.find_named(is_program_frame, Kind.PYTHON)] = True
    works[trace.device_rows] = trace.launch_of[trace.device_rows] < 0
    moments = trace.events.start_ns[works]
    last = int(moments.max(initial=-1))
    begun = int(np.searchsorted(steps.start_ns, last, side="right"))
    # a trace with nothing but marks keeps its first step
    kept = max(begun, 1)
    return replace(
        steps,
        names=steps.names[:kept],
        numbers=steps.numbers[:kept],
        start_ns=steps.start_ns[:kept],
        end_ns=steps.end_ns[:kept],
    )


def find_computing_stream(trace: Trace) -> tuple[int, int]:
    """Find the stream that computes most, of the device that does, in a trace with device work.

    Args:
        trace: the trace.

    Returns:
        (device, stream) with most time in kernels, communication left out.
    """
    events = trace.events
    rows = trace.device_rows
    is_kernel = events.kind[rows] == Kind.KERNEL
    talks = trace.matching(is_communication)[rows]
    kernels = rows[is_kernel & ~talks]
    if len(kernels):
        rows = kernels
    rows = rows[_is_largest(trace, rows, events.device)]
    rows = rows[_is_largest(trace, rows, events.stream)]
    first = rows[0]
    device = int(events.device[first])
    stream = int(events.stream[first])
    return device, stream


def _is_largest(
    trace: Trace,
    rows: Integers,  # [k]
    number: Integers,  # [n], the device (or stream) of each event
) -> Flags:
    """Tell for each event of `rows` (bool [k]) whether it belongs to the device (or stream) with most time."""
    found, number_of_row = np.unique(number[rows], return_inverse=True)
    # one ns more each: of events without a length the number decides
    lengths_ns = trace.lengths_ns(rows) + 1
    ns = np.bincount(number_of_row, lengths_ns, len(found))
    largest: Flags = number_of_row == ns.argmax()
    return largest


def _find_own_work(trace: Trace) -> Integers:
    """Rows of the work of the device that computes most."""
    device, _ = find_computing_stream(trace)
    return trace.on_device(trace.device_rows, device)


def _find_windows(trace: Trace, host: HostSteps, step: Integers) -> tuple[Integers, Integers]:
    """Find the steps' tiles.

    Args:
        trace: the trace of one rank.
        host: the steps on the host.
        step: [n], the step of each event, by its launch.

    Returns:
        (start_ns, end_ns), [k] each.
    """
    if len(trace.device_rows):
        return _find_device_windows(trace, host, step)
    return host.start_ns, _find_host_ends(host)


def _find_host_ends(host: HostSteps) -> Integers:
    """Find the end of each step: int64 [k], the start of the next one where that follows directly, else its own end."""
    count = len(host.names)
    next_starts = np.append(host.start_ns[1:], host.end_ns[-1:])
    next_follows = np.zeros(count, bool)
    next_follows[:-1] = host.follows()[1:]
    return np.where(next_follows, next_starts, host.end_ns)


def _find_device_windows(trace: Trace, host: HostSteps, step: Integers) -> tuple[Integers, Integers]:
    """Find start and end [k], ns, of the steps' tiles on the stream that computes. step: [n], of each event."""
    events = trace.events
    device, stream = find_computing_stream(trace)
    on_stream = trace.on_device(trace.device_rows, device)
    on_stream = on_stream[events.stream[on_stream] == stream]
    mine = on_stream[step[on_stream] >= 0]
    last_end = np.full(len(host.names), -1, np.int64)
    np.maximum.at(last_end, step[mine], events.end_ns[mine])
    first = np.full(len(host.names), NEVER_NS)
    np.minimum.at(first, step[mine], events.start_ns[mine])
    # a step without work ends with the host's; none ends before the one before it
    end = np.where(last_end >= 0, last_end, host.end_ns)
    end = np.maximum.accumulate(end)
    before = np.concatenate(([0], end[:-1]))
    follows = host.follows()
    start = np.where(follows, before, np.maximum(host.start_ns, before))
    # a step that follows none begins after the work of earlier ones that was still queued
    for lonely in np.flatnonzero(~follows):
        is_before = events.start_ns[on_stream] < first[lonely]
        older = on_stream[is_before & (step[on_stream] < lonely)]
        reach = events.end_ns[older].max(initial=0)
        after_older = max(start[lonely], reach)
        start[lonely] = min(after_older, first[lonely])
    return np.clip(start, before, end), end


def _find_steps(
    trace: Trace,
    host: HostSteps,
    step: Integers,
    phases: tuple[str, ...],
    phase: Integers,
) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """Find the steps' windows, and which steps are steady; at least one is if any has work.

    Args:
        trace: the trace of one rank.
        host: the steps on the host.
        step: [n], the step of each event, by its launch; -1: none.
        phases: names of the phases.
        phase: [n], index into `phases` of each event.

    Returns:
        The steps, each marked as steady or with the reason why it is not, and notes.
    """
    on_gpu = len(trace.device_rows) > 0
    start, end = _find_windows(trace, host, step)
    work = _find_own_work(trace) if on_gpu else trace.rows[Kind.OP]
    step_of_work = step[work]
    step_of_work = step_of_work[step_of_work >= 0]
    counts = np.bincount(step_of_work, minlength=len(host.names))
    why_not = _explain_by_contents(trace, host, start, end, phases, phase)
    is_empty = (counts == 0) | (end <= start)
    for k in np.flatnonzero(is_empty).tolist():
        why_not[k] = NO_WORK
    if why_not:
        last_end = end[_find_last(counts)]
        goes_on = (trace.events.start_ns[work] >= last_end).any()
        is_cut = trace.cut and not goes_on
        _explain_edges(why_not, counts, end - start, is_cut, on_gpu)
    steps = tuple(
        Step(
            name=host.names[k],
            number=host.numbers[k],
            start_ns=int(start[k]),
            end_ns=int(end[k]),
            host_start_ns=int(host.start_ns[k]),
            host_end_ns=int(host.end_ns[k]),
            steady=not why,
            why_not=why,
        )
        for k, why in enumerate(why_not)
    )
    return _use_unsteady_steps(steps, on_gpu)


def _explain_by_contents(
    trace: Trace,
    host: HostSteps,
    start: Integers,  # [k], of the steps' tiles
    end: Integers,  # [k]
    phases: tuple[str, ...],
    phase: Integers,  # [n], of each event
) -> list[str]:
    """Explain for each step by what it holds why it is not a steady one: saving, evaluation, what it pays for.

    Returns:
        [k], '' for nothing of it.
    """
    why_not = explain_paying_steps(trace, host.thread, host.start_ns, host.end_ns)
    is_range = trace.events.kind == Kind.ANNOTATION
    # evaluation is named rather than saving
    for name in (str(Phase.SAVE), str(Phase.EVAL)):
        if name not in phases:
            continue
        cover = trace.cover((phase == phases.index(name)) & is_range)
        on_host = cover.within(host.start_ns, host.end_ns) > 0
        in_tile = cover.within(start, end) > 0
        for k in np.flatnonzero(on_host | in_tile).tolist():
            why_not[k] = f"has {name} in it"
    return why_not


def _find_last(counts: Integers) -> int:
    """The last step with work, 0 if none has any. counts: [k], events of each step's work."""
    return int(np.flatnonzero(counts).max(initial=0))


def _explain_edges(
    why_not: list[str],  # [k], why each step is not a steady one
    counts: Integers,  # [k], events of each step's work
    lengths: Integers,  # [k], ns
    is_cut: bool,
    on_gpu: bool,
) -> None:
    """Write into `why_not` why the window's first and last step are not steady ones, where nothing says it yet.

    is_cut: whether the trace ends in the last step with work, so that more of it may have been cut off.
    """
    last = _find_last(counts)
    if is_cut and len(why_not) > 1:
        why_not[last] = why_not[last] or CUT
    for edge in (0, last):
        if not why_not[edge]:
            why_not[edge] = _explain_edge(edge, last, counts, lengths, why_not)
    steady_others = why_not[1:].count("")
    if on_gpu and steady_others >= ENOUGH:
        why_not[0] = why_not[0] or "the window begins in it"


def _explain_edge(
    edge: int,
    last: int,
    counts: Integers,
    lengths: Integers,
    why_not: list[str],
) -> str:
    """Why the window's first or last step is not a steady one, compared with the steady steps between them; '' if it
    is.

    Args:
        edge: the step, the first or the last one.
        last: the last step with work.
        counts: [k], events of each step's work.
        lengths: [k], ns of each step.
        why_not: [k], why each step is not a steady one as far as it is known.
    """
    steady = [k for k, why in enumerate(why_not) if not why]
    inner = [k for k in steady if 0 < k < last]
    others = inner or [k for k in steady if k != edge]
    if not others:
        return ""
    median_count = np.median(counts[others])
    if counts[edge] < FEWER * median_count:
        return FEWER_EVENTS
    median_length = np.median(lengths[others])
    if lengths[edge] > LONGER * median_length:
        where = "beginning" if edge == 0 else "end"
        return f"longer than the others, at the {where} of the window"
    return ""


def _use_unsteady_steps(
    steps: tuple[Step, ...],
    on_gpu: bool,
) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """The steps, where none is steady those with any work counted as such, and notes."""
    if not steps:
        return steps, ()
    notes = []
    if not any(map(_has_work, steps)):
        notes.append("no step has any work in it")
    elif not any(step.steady for step in steps):
        reasons = ", ".join(dict.fromkeys(step.why_not for step in steps))
        notes.append(f"no step is a steady one ({reasons}): the figures are of all that there are")
        steps = tuple(replace(step, steady=_has_work(step)) for step in steps)
    if on_gpu:
        notes += _describe_empty_end(steps)
    return steps, tuple(notes)


def _has_work(step: Step) -> bool:
    return step.why_not != NO_WORK and step.end_ns > step.start_ns


def _describe_empty_end(steps: tuple[Step, ...]) -> list[str]:
    """A note on the steps at the end without work of the GPU, if earlier ones have any."""
    from_end = itertools.takewhile(lambda step: step.why_not == NO_WORK, reversed(steps))
    empty = list(from_end)
    if not empty or len(empty) == len(steps):
        return []
    names = empty[-1].name
    if len(empty) > 1:
        names += f" to {empty[0].name}"
    return [f"the trace holds no work of the GPU in {names}, in which the host worked"]
