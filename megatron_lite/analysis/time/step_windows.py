"""Steps on the device's clock, and which of them are steady.

The GPU runs behind the host, so a step of the host is not a step of the GPU. Step s lasts from the end of the last work
of step s-1 to the end of its own last work, on the stream that computes: tiles without holes, so their mean is the time
per step, and waiting for the loader, which comes before a step's work, belongs to that step. (Tiles from first to first
event would put it into the step before, and leave a window's last step without its waiting.) The first step has no
predecessor: it begins where the host began it, or where work from before the window ends, and lacks what the step before
left to do after its last work. With enough others it does not count.
"""

from dataclasses import replace

import numpy as np

from megatron_lite.analysis.intervals import Nesting, union
from megatron_lite.analysis.kernels.roles import is_communication
from megatron_lite.analysis.time.find_phases import find_phases
from megatron_lite.analysis.time.host_steps import HostSteps, host_steps
from megatron_lite.analysis.time.time_results import Placing, Step
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.phases import Phase

LONGER = 1.25  # a first or last step so much longer than the median of the others pays for the profiler
ENOUGH = 3  # complete steps: then the window's first one is not needed
NO_WORK, CUT = "no work in it", "the trace cuts it"
FEWER = 0.8  # of the others' device events: the trace cuts the step


def computing_stream(trace: Trace) -> tuple[int, int] | None:
    """(device, stream) with most kernel time, communication left out; None without device work."""
    events, rows = trace.events, trace.device_rows
    if not len(rows):
        return None
    kernels = rows[(events.kind[rows] == Kind.KERNEL) & ~trace.matching(is_communication)[rows]]
    rows = kernels if len(kernels) else rows
    key = events.device[rows].astype(np.int64) << 32 | events.stream[rows].astype(np.int64) & 0xFFFFFFFF
    _, inverse = np.unique(key, return_inverse=True)
    most = rows[inverse == np.bincount(inverse, events.end_ns[rows] - events.start_ns[rows] + 1).argmax()][0]
    return int(events.device[most]), int(events.stream[most])


def device_windows(trace: Trace, host: HostSteps, step: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(start_ns, end_ns) [k] of the steps' tiles. `step` [n]: the step of each event, by its launch."""
    events, rows = trace.events, trace.device_rows
    device, stream = computing_stream(trace)
    on_stream = rows[(events.device[rows] == device) & (events.stream[rows] == stream)]
    count = len(host.names)
    end, first = np.full(count, -1, np.int64), np.full(count, np.iinfo(np.int64).max)
    mine = on_stream[step[on_stream] >= 0]
    np.maximum.at(end, step[mine], events.end_ns[mine])
    np.minimum.at(first, step[mine], events.start_ns[mine])
    end = np.maximum.accumulate(np.where(end >= 0, end, host.end_ns))
    before = np.concatenate(([0], end[:-1]))
    start = np.where(host.follows(), before, np.maximum(host.start_ns, before))
    for lonely in np.flatnonzero(~host.follows()):
        older = on_stream[(step[on_stream] < lonely) & (events.start_ns[on_stream] < first[lonely])]
        reach = events.end_ns[older].max() if len(older) else 0
        start[lonely] = min(max(start[lonely], reach), first[lonely])
    return np.clip(start, before, end), end


def host_windows(host: HostSteps) -> tuple[np.ndarray, np.ndarray]:
    """The same without a GPU: from each step's start to the next one's; the last to its own end."""
    following = np.concatenate((host.follows()[1:], [False])) if len(host.names) else np.empty(0, bool)
    after = np.concatenate((host.start_ns[1:], host.end_ns[-1:]))
    return host.start_ns, np.where(following, after, host.end_ns)


def find_steps(
    trace: Trace, host: HostSteps, step: np.ndarray, phases: tuple[str, ...], phase: np.ndarray
) -> tuple[Step, ...]:
    """The steps with their windows, each marked as steady or not, with the reason."""
    on_gpu = len(trace.device_rows) > 0
    start, end = device_windows(trace, host, step) if on_gpu else host_windows(host)
    work = trace.device_rows if on_gpu else trace.rows[Kind.OP]
    counts = np.bincount(step[work][step[work] >= 0], minlength=len(host.names))
    last = max(np.flatnonzero(counts), default=0)  # behind it a full buffer may have ended the record of the GPU
    unfinished = trace.cut and not (trace.events.start_ns[work] >= end[last : last + 1]).any()
    why_not = _why_not(end - start, counts, last, unfinished, _chores(trace, phases, phase, host, start, end))
    if on_gpu and sum(not why for why in why_not[1:]) >= ENOUGH:
        why_not[0] = why_not[0] or "the window begins in it"
    return tuple(
        Step(
            host.names[k],
            host.numbers[k],
            int(start[k]),
            int(end[k]),
            int(host.start_ns[k]),
            int(host.end_ns[k]),
            steady=not why_not[k],
            why_not=why_not[k],
        )
        for k in range(len(host.names))
    )


def _chores(trace: Trace, phases, phase, host: HostSteps, start, end) -> dict[str, np.ndarray]:
    """eval and save -> bool [k]: does it happen in the step, on the host or while the tile lasts?"""
    events, found = trace.events, {}
    for name in (str(Phase.EVAL), str(Phase.SAVE)):
        if name not in phases:
            continue
        rows = np.flatnonzero((phase == phases.index(name)) & (events.kind == Kind.ANNOTATION))
        cover = union(events.start_ns[rows], events.end_ns[rows])
        found[name] = (cover.within(host.start_ns, host.end_ns) > 0) | (cover.within(start, end) > 0)
    return found


def _why_not(
    lengths: np.ndarray, counts: np.ndarray, last: int, unfinished: bool, chores: dict[str, np.ndarray]
) -> list[str]:
    """A reason per step, "" for steady ones. last: step with work; unfinished: more of it may have been cut off."""
    why = [next((f"has {name} in it" for name, hit in chores.items() if hit[k]), "") for k in range(len(lengths))]
    why = [NO_WORK if not counts[k] or not lengths[k] else why[k] for k in range(len(lengths))]
    if unfinished and len(why) > 1:
        why[last] = why[last] or CUT
    for k in (0, last):
        inner = [j for j in range(1, last) if not why[j]]
        others = inner or [j for j in range(len(why)) if j != k and not why[j]]
        if why[k] or not others:
            continue
        if counts[k] < FEWER * np.median(counts[others]):
            why[k] = CUT
        elif lengths[k] > LONGER * np.median(lengths[others]):
            why[k] = f"longer than the others: the profiler {'starts' if k == 0 else 'stops'} in it"
    return why


def empty_end(steps: tuple[Step, ...], on_gpu: bool) -> tuple[str, ...]:
    """A note on steps behind the last one with work on the GPU: the profiler may have stopped recording before its window ended."""
    full = [k for k, step in enumerate(steps) if step.why_not != NO_WORK]
    empty = steps[full[-1] + 1 :] if full and on_gpu else ()
    if not empty:
        return ()
    names = empty[0].name if len(empty) == 1 else f"{empty[0].name} to {empty[-1].name}"
    return (
        f"the trace holds no work of the GPU in {names}: a full buffer ends the record of the GPU early; profile fewer steps",
    )


def steady_or_all(steps: tuple[Step, ...]) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """The steps with at least one that counts, and a note if none was steady."""
    if not steps or any(step.steady for step in steps):
        return steps, ()
    usable = [step.end_ns > step.start_ns and step.why_not != NO_WORK for step in steps]
    if not any(usable):
        return steps, ("no step has any work in it",)
    reasons = ", ".join(dict.fromkeys(step.why_not for step in steps))
    steps = tuple(replace(step, steady=True) if use else step for step, use in zip(steps, usable, strict=True))
    return steps, (f"no step is a steady one ({reasons}): the figures are of all that there are",)


# --- finds the step, phase and operator of every event of a trace


def attribute_events(trace: Trace) -> Placing:
    """Device work belongs where its launch call stands, whichever thread made it; host events where they start."""
    host = host_steps(trace)
    thread, moment = _where_the_host_was(trace)
    step = _step_at(host, _has_a_step(trace, thread), moment)
    phases, phase = find_phases(trace, host, thread, moment)
    found = find_steps(trace, host, step, phases, phase)
    steps, notes = steady_or_all(found)
    notes += empty_end(found, len(trace.device_rows) > 0)
    return Placing(steps, step, phases, phase, _operators(trace, thread, moment), host.thread, host.notes + notes)


def _where_the_host_was(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    """(thread, ns) [n] of each event: its own, or its launch call's; thread -1 where that is not in the trace."""
    events, launch = trace.events, trace.launch_of
    at = np.where(launch >= 0, launch, np.arange(len(events)))
    thread = events.thread[at].astype(np.int64)
    unplaced = ((events.device >= 0) | (events.kind == Kind.GPU_ANNOTATION)) & (launch < 0)
    return np.where(unplaced, -1, thread), events.start_ns[at]


def _has_a_step(trace: Trace, thread: np.ndarray) -> np.ndarray:
    """bool [n]: events that the host made. In a trace without any launch call device work has to be placed by its own time."""
    known = thread >= 0
    if not known[trace.device_rows].any():
        known[trace.device_rows] = True
    return known


def _step_at(host: HostSteps, known: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """int32 [n]. What lies between two steps belongs to the later one, if that one follows directly."""
    if not len(host.names):
        return np.full(len(moment), -1, np.int32)
    step = np.searchsorted(host.end_ns, moment, side="right")
    inside = step < len(host.names)
    at = np.minimum(step, len(host.names) - 1)
    inside &= (moment >= host.start_ns[at]) | host.follows()[at]
    return np.where(inside & known, step, -1).astype(np.int32)


def _operators(trace: Trace, thread: np.ndarray, moment: np.ndarray) -> np.ndarray:
    events, rows = trace.events, trace.rows[Kind.OP]
    nest = Nesting(rows, events.start_ns[rows], events.end_ns[rows], events.thread[rows])
    operator = np.full(len(events), -1, np.int64)
    operator[nest.rows] = nest.parent_rows()
    others = np.flatnonzero((thread >= 0) & (events.kind != Kind.OP))
    operator[others] = nest.row_at(moment[others], thread[others])
    return operator
