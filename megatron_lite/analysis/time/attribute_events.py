"""Finds the step, phase and operator of every event of a trace."""

import numpy as np

from megatron_lite.analysis.intervals import Nesting
from megatron_lite.analysis.time.attribution import Placing
from megatron_lite.analysis.time.find_phases import phases_of
from megatron_lite.analysis.time.host_steps import HostSteps, host_steps
from megatron_lite.analysis.time.step_windows import empty_end, steady_or_all, steps_of
from megatron_lite.analysis.trace.columns import Kind, Trace


def placing_of(trace: Trace) -> Placing:
    """Device work belongs where its launch call stands, whichever thread made it; host events where they start."""
    host = host_steps(trace)
    thread, moment = _where_the_host_was(trace)
    step = _step_at(host, _has_a_step(trace, thread), moment)
    phases, phase = phases_of(trace, host, thread, moment)
    found = steps_of(trace, host, step, phases, phase)
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
