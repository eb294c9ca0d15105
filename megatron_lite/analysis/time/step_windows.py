"""Steps on the device's clock, and which of them are steady; and the step, phase and operator of every event.

The GPU runs behind the host, so a step of the host is not a step of the GPU. Step s lasts from the end of the last work
of step s-1 to the end of its own last work, on the stream that computes: tiles without holes, so their mean is the time
per step, and waiting for the data loader, which comes before a step's work, belongs to that step. (Tiles from first to
first event would put it into the step before, and leave a window's last step without its waiting.) The first step has
no predecessor: it begins where the host began it, or where work from before the window ends, and lacks what the step
before left to do after its last work. With enough others it does not count.
"""

from dataclasses import replace

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.kernels.kernel_words import is_communication
from megatron_lite.analysis.time.find_phases import find_phases
from megatron_lite.analysis.time.host_causes import explain_paying_steps
from megatron_lite.analysis.time.host_steps import HostSteps, find_host_steps
from megatron_lite.analysis.time.sites import is_program_frame
from megatron_lite.analysis.time.time_results import Placing, Step
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
    """Device work belongs where its launch call stands, whichever thread made it; host events where they start."""
    events, launch, operators = trace.events, trace.launch_of, trace.rows[Kind.OP]
    host = _leave_out_empty_end(trace, find_host_steps(trace))
    # where the host was for each event; thread -1 where that is not in the trace
    at = np.where(launch >= 0, launch, np.arange(len(events)))
    unplaced = ((events.device >= 0) | (events.kind == Kind.GPU_ANNOTATION)) & (launch < 0)
    thread, moment = np.where(unplaced, -1, events.thread[at].astype(np.int64)), events.start_ns[at]
    known = thread >= 0
    if not known[trace.device_rows].any():  # without any launch call device work has to be placed by its own time
        known[trace.device_rows] = True
    step = np.where(known, _find_step_at(host, moment), -1).astype(np.int32)
    nest = trace.nest(operators)
    operator = np.full(len(events), -1, np.int64)
    operator[nest.rows] = nest.row_of(nest.parent)
    others = np.flatnonzero((thread >= 0) & (events.kind != Kind.OP))
    operator[others] = nest.row_at(moment[others], thread[others])
    phases, phase, ranges = find_phases(trace, host, thread, moment)
    ranges = replace(ranges, step=_find_step_at(host, ranges.start_ns))
    steps, notes = _find_steps(trace, host, step, phases, phase)
    device = find_computing_stream(trace)[0] if len(trace.device_rows) else -1
    others = (events.device >= 0) & (events.device != device)
    return Placing(
        steps=steps,
        step=step,
        phases=phases,
        phase=phase,
        operator=operator,
        main_thread=host.thread,
        notes=host.notes + notes,
        device=device,
        on_other_device=others if others.any() else None,
        ranges=ranges,
    )


def _find_step_at(host: HostSteps, moment: Integers) -> Integers:
    """int64, the step of each moment of the host; -1: outside all."""
    if not host.names:
        return np.full(len(moment), -1, np.int64)
    after = np.searchsorted(host.end_ns, moment, side="right")
    nearest = np.minimum(after, len(host.names) - 1)
    # what lies between two steps belongs to the later one, if that one follows directly
    inside = (moment >= host.start_ns[nearest]) | host.follows()[nearest]
    return np.where((after < len(host.names)) & inside, after, -1)


def _leave_out_empty_end(trace: Trace, steps: HostSteps) -> HostSteps:
    """The steps without those at the end in which nothing but their marks was recorded: the window's last mark often
    begins a step that the loop never makes."""
    events = trace.events
    works = np.isin(events.kind, (Kind.OP, Kind.ANNOTATION)) & ~trace.matching(set(steps.names).__contains__)
    calls = trace.rows[Kind.RUNTIME]
    works[calls[trace.passing(find_launch_call, Kind.RUNTIME)[events.name[calls]]]] = True
    frames = trace.rows[Kind.PYTHON]
    works[frames[trace.passing(is_program_frame, Kind.PYTHON)[events.name[frames]]]] = True
    works[trace.device_rows] = trace.launch_of[trace.device_rows] < 0
    moments = events.start_ns[works]
    last = int(moments.max(initial=-1))
    kept = max(int(np.searchsorted(steps.start_ns, last, side="right")), min(1, len(steps.names)))
    return replace(
        steps,
        names=steps.names[:kept],
        numbers=steps.numbers[:kept],
        start_ns=steps.start_ns[:kept],
        end_ns=steps.end_ns[:kept],
    )


def find_computing_stream(trace: Trace) -> tuple[int, int]:
    """(device, stream) with most kernel time, communication left out, of a trace with device work: of the device with
    most of it the stream with most."""
    events, rows = trace.events, trace.device_rows
    kernels = rows[(events.kind[rows] == Kind.KERNEL) & ~trace.matching(is_communication)[rows]]
    rows = kernels if len(kernels) else rows
    rows = rows[_is_largest(trace, rows, events.device)]
    rows = rows[_is_largest(trace, rows, events.stream)]
    return int(events.device[rows[0]]), int(events.stream[rows[0]])


def _is_largest(trace: Trace, rows: Integers, number: Integers) -> Flags:
    """bool [k]: whether the event of `rows` belongs to the device (or stream) with most time. number [n]: by event."""
    events = trace.events
    found, inverse = np.unique(number[rows], return_inverse=True)
    ns = np.bincount(inverse, events.end_ns[rows] - events.start_ns[rows] + 1, len(found))
    largest: Flags = inverse == ns.argmax()
    return largest


def _find_own_work(trace: Trace) -> Integers:
    """Rows of the work of the device that computes most."""
    device, _ = find_computing_stream(trace)
    own: Integers = trace.device_rows[trace.events.device[trace.device_rows] == device]
    return own


def _find_windows(trace: Trace, host: HostSteps, step: Integers) -> tuple[Integers, Integers]:
    """(start_ns, end_ns) [k] of the steps' tiles. `step` [n]: the step of each event, by its launch."""
    events, rows, count, follows = trace.events, trace.device_rows, len(host.names), host.follows()
    if not len(rows):  # from each step's start to the next one's; the last to its own end
        following = np.append(host.start_ns[1:], host.end_ns[-1:])
        return host.start_ns, np.where(np.append(follows[1:], False)[:count], following, host.end_ns)
    device, stream = find_computing_stream(trace)
    on_stream = rows[(events.device[rows] == device) & (events.stream[rows] == stream)]
    end, first = np.full(count, -1, np.int64), np.full(count, np.iinfo(np.int64).max)
    mine = on_stream[step[on_stream] >= 0]
    np.maximum.at(end, step[mine], events.end_ns[mine])
    np.minimum.at(first, step[mine], events.start_ns[mine])
    end = np.maximum.accumulate(np.where(end >= 0, end, host.end_ns))
    before = np.concatenate(([0], end[:-1]))
    start = np.where(follows, before, np.maximum(host.start_ns, before))
    for lonely in np.flatnonzero(~follows):
        older = on_stream[(step[on_stream] < lonely) & (events.start_ns[on_stream] < first[lonely])]
        reach = events.end_ns[older].max() if len(older) else 0
        start[lonely] = min(max(start[lonely], reach), first[lonely])
    return np.clip(start, before, end), end


def _find_steps(
    trace: Trace, host: HostSteps, step: Integers, phases: tuple[str, ...], phase: Integers
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
    counts = np.bincount(step[work][step[work] >= 0], minlength=len(host.names))
    why_not = _explain_by_contents(trace, host, start, end, phases, phase)
    why_not = [why if counts[k] and end[k] > start[k] else NO_WORK for k, why in enumerate(why_not)]
    last = int(max(np.flatnonzero(counts), default=0))
    # more of the last step's work may have been cut off
    if trace.cut and len(why_not) > 1 and not (trace.events.start_ns[work] >= end[last]).any():
        why_not[last] = why_not[last] or CUT
    for edge in (0, last) if why_not else ():
        why_not[edge] = why_not[edge] or _explain_edge(edge, last, counts, end - start, why_not)
    if on_gpu and sum(not why for why in why_not[1:]) >= ENOUGH:
        why_not[0] = why_not[0] or "the window begins in it"
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
    trace: Trace, host: HostSteps, start: Integers, end: Integers, phases: tuple[str, ...], phase: Integers
) -> list[str]:
    """Why each step is not a steady one by what it holds: saving, evaluation, what it pays for;
    '' for nothing of it."""
    why_not = [""] * len(host.names)
    for name in (str(Phase.SAVE), str(Phase.EVAL)):
        if name not in phases:
            continue
        cover = trace.cover((phase == phases.index(name)) & (trace.events.kind == Kind.ANNOTATION))
        # on the host, or while the tile lasts
        has_it = (cover.within(host.start_ns, host.end_ns) > 0) | (cover.within(start, end) > 0)
        why_not = [f"has {name} in it" if has else why for has, why in zip(has_it, why_not)]
    pays = explain_paying_steps(trace, host.thread, host.start_ns, host.end_ns)
    return [why or paid for why, paid in zip(why_not, pays)]


def _explain_edge(edge: int, last: int, counts: Integers, lengths: Integers, why_not: list[str]) -> str:
    """Why the window's first or last step is not a steady one, compared with the steady steps between them; '' if it
    is.

    Args:
        edge: the step, the first or the last one.
        last: the last step with work.
        counts: [k], events of each step's work.
        lengths: [k], ns of each step.
        why_not: [k], why each step is not a steady one as far as it is known.
    """
    inner = [k for k in range(1, last) if not why_not[k]]
    others = inner or [k for k, why in enumerate(why_not) if k != edge and not why]
    if not others:
        return ""
    if counts[edge] < FEWER * np.median(counts[others]):
        return FEWER_EVENTS
    if lengths[edge] > LONGER * np.median(lengths[others]):
        where = "beginning" if edge == 0 else "end"
        return f"longer than the others, at the {where} of the window"
    return ""


def _use_unsteady_steps(steps: tuple[Step, ...], on_gpu: bool) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """The steps, where none is steady those with any work counted as such, and notes."""
    notes, usable = [], [step.end_ns > step.start_ns and step.why_not != NO_WORK for step in steps]
    full = [k for k, step in enumerate(steps) if step.why_not != NO_WORK]
    empty = steps[full[-1] + 1 :] if full and on_gpu else ()
    if steps and not any(usable):
        notes.append("no step has any work in it")
    elif steps and not any(step.steady for step in steps):
        reasons = ", ".join(dict.fromkeys(step.why_not for step in steps))
        notes.append(f"no step is a steady one ({reasons}): the figures are of all that there are")
        steps = tuple(replace(step, steady=True) if use else step for step, use in zip(steps, usable))
    if empty:
        names = empty[0].name if len(empty) == 1 else f"{empty[0].name} to {empty[-1].name}"
        notes.append(f"the trace holds no work of the GPU in {names}, in which the host worked")
    return steps, tuple(notes)
