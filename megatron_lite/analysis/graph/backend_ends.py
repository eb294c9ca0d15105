"""Ends of collectives of a backend's thread, which are recorded late where the thread does not get a core at once."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.ranks.calls import POINT_TO_POINT, Calls
from megatron_lite.analysis.time.rank_time import find_host_rows
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Trace

MIN_HOST_WAIT = 0.01  # of the mean step: shorter stretches are Python between two operators


def trim_late_ends(
    trace: Trace,
    placing: Placing,
    calls: Calls,
) -> tuple[Trace, Calls]:
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
    least_ns = MIN_HOST_WAIT * _measure_step(placing)
    is_notable = waiting.end - waiting.start >= least_ns
    ends_ns = calls.end_ns.copy()
    for start_ns, end_ns in zip(waiting.start[is_notable].tolist(), waiting.end[is_notable].tolist()):
        _trim_one(calls.start_ns, ends_ns, start_ns, end_ns)
    return _set_ends(trace, calls, ends_ns)


def trim_unawaited_ends(
    trace: Trace,
    placing: Placing,
    calls: Calls,
    met_ns: Integers,
) -> tuple[Trace, Calls, Integers]:
    """End sends and receives that nobody waited for as soon as the quickest of their kind does.

    What is sent or received beside the host is recorded as under way until the host asks for it, however early it was
    there.

    Args:
        trace: a rank's trace.
        placing: where its events belong.
        calls: its collectives.
        met_ns: [c], when both ranks had come, on the trace's own clock; less than the start where that is not known.

    Returns:
        Both with earlier ends, as they are with a device; and when the host asked for what was there: int64 [c], -1
        where it waited, or the end is as it was.
    """
    asked_ns = np.full(len(calls), -1, np.int64)
    is_steady = any(step.steady for step in placing.steps)
    if len(trace.device_rows) or not len(calls) or not is_steady:
        return trace, calls, asked_ns
    is_known = met_ns >= calls.start_ns
    begins_ns = np.maximum(calls.start_ns, met_ns)
    lengths_ns = calls.end_ns - begins_ns
    is_awaited = _find_awaited(trace, placing, calls)
    kinds = np.array([what.kind for what in calls.whats])
    ends_ns = calls.end_ns.copy()
    for kind in POINT_TO_POINT:
        is_kind = (kinds == kind) & is_known & (lengths_ns > 0)
        early = np.flatnonzero(is_kind & ~is_awaited)
        if not len(early):
            continue
        # nobody waits for what a send takes
        quickest_ns = 0 if kind == "send" else int(lengths_ns[is_kind].min())
        over_ns = begins_ns[early] + quickest_ns
        asked_ns[early] = calls.end_ns[early]
        ends_ns[early] = np.minimum(calls.end_ns[early], over_ns)
    trimmed, of_rank = _set_ends(trace, calls, ends_ns)
    return trimmed, of_rank, asked_ns


def _find_awaited(
    trace: Trace,
    placing: Placing,
    calls: Calls,
) -> Flags:
    """Tell for each collective (bool [c]) whether the main thread had waited for a notable time when it ended.

    Args:
        trace: a rank's trace.
        placing: where its events belong.
        calls: its collectives.
    """
    waiting = find_host_rows(trace, placing)["exposed_communication"]
    if not len(waiting):
        return np.zeros(len(calls), bool)
    least_ns = MIN_HOST_WAIT * _measure_step(placing)
    begun = np.searchsorted(waiting.start, calls.end_ns) - 1
    since_ns = waiting.start[np.maximum(begun, 0)]
    lasted_ns = calls.end_ns - since_ns
    is_in_wait = waiting.holds(calls.end_ns - 1)
    found: Flags = is_in_wait & (lasted_ns >= least_ns)
    return found


def _measure_step(placing: Placing) -> float:
    """The mean steady step, ns."""
    steady = [step for step in placing.steps if step.steady]
    lengths_ns = [step.end_ns - step.start_ns for step in steady]
    return float(np.mean(lengths_ns))


def _set_ends(
    trace: Trace,
    calls: Calls,
    ends_ns: NDArray[np.int64],
) -> tuple[Trace, Calls]:
    """A trace and its collectives with other ends of these.

    Args:
        trace: a rank's trace.
        calls: its collectives.
        ends_ns: [c].
    """
    trace_ends_ns = trace.events.end_ns.copy()
    trace_ends_ns[calls.rows] = ends_ns
    trimmed = replace(trace, events=replace(trace.events, end_ns=trace_ends_ns))
    return trimmed, replace(calls, end_ns=ends_ns)


def _trim_one(
    starts_ns: Integers,
    ends_ns: Integers,
    waits_ns: int,
    resumes_ns: int,
) -> None:
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
