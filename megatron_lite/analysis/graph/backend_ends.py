"""Ends of collectives of a backend's thread, which are recorded late where the thread does not get a core at once."""

from dataclasses import replace

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.ranks.calls import Calls
from megatron_lite.analysis.time.rank_time import find_host_rows
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Trace

MIN_HOST_WAIT = 0.01  # of the mean step: shorter stretches are Python between two operators


def trim_late_ends(trace: Trace, placing: Placing, calls: Calls) -> tuple[Trace, Calls]:
    """End collectives where the main thread, which waited for them, goes on.

    It waits where no operator works for a notable time while a collective is under way. If none ends meanwhile, the one
    that began first has ended by then, and its thread came to say so only later.

    Args:
        trace: a rank's trace.
        placing: where its events belong.
        calls: its collectives.

    Returns:
        Both with earlier ends; as they are with a device or without such a wait.
    """
    steady = [step for step in placing.steps if step.steady]
    if len(trace.device_rows) or not len(calls) or not steady:
        return trace, calls
    waiting = find_host_rows(trace, placing)["exposed_communication"]
    least_ns = MIN_HOST_WAIT * np.mean([step.end_ns - step.start_ns for step in steady])
    is_notable = waiting.end - waiting.start >= least_ns
    ends_ns = calls.end_ns.copy()
    for start_ns, end_ns in zip(waiting.start[is_notable].tolist(), waiting.end[is_notable].tolist()):
        _trim_one(calls.start_ns, ends_ns, start_ns, end_ns)
    trace_ends_ns = trace.events.end_ns.copy()
    trace_ends_ns[calls.rows] = ends_ns
    trimmed = replace(trace, events=replace(trace.events, end_ns=trace_ends_ns))
    return trimmed, replace(calls, end_ns=ends_ns)


def _trim_one(starts_ns: Integers, ends_ns: Integers, waits_ns: int, resumes_ns: int) -> None:
    """End the collective that one wait was for.

    Args:
        starts_ns: [c], of all collectives.
        ends_ns: [c]; changed.
        waits_ns: when the main thread begins to wait.
        resumes_ns: when it goes on.
    """
    ends_inside = (ends_ns > waits_ns) & (ends_ns <= resumes_ns)
    if ends_inside.any():
        return
    under_way = np.flatnonzero((starts_ns < resumes_ns) & (ends_ns > resumes_ns))
    if len(under_way):
        ends_ns[under_way[0]] = resumes_ns
