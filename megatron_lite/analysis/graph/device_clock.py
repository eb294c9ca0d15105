"""The device's clock beside the host's: no call that waits for the device may return before what it waited for ends."""

from dataclasses import replace

import numpy as np

from megatron_lite.analysis.time.idle_gaps import find_host_activity
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Trace
from megatron_lite.analysis.trace.launches import CLOCK_ERROR_US

MIN_WAIT_NS = 100_000  # a shorter call may have waited for nothing


def measure_device_lead(trace: Trace, placing: Placing) -> int:
    """Measure by how many ns the device's clock is ahead of the host's, as calls show that wait for the device.

    They return a little before the last work ends that was launched before them; 0 where they return behind it. More
    than clocks are known to differ is no error of theirs: then the call waited for something else.
    """
    events = trace.events
    waits = find_host_activity(trace, placing).waits
    waits = waits[trace.lengths_ns(waits) >= MIN_WAIT_NS]
    rows = trace.device_rows
    launched = rows[trace.launch_of[rows] >= 0]
    if not len(waits) or not len(launched):
        return 0
    moment_ns = events.start_ns[trace.launch_of[launched]]
    order = np.argsort(moment_ns, kind="stable")
    reach_ns = np.maximum.accumulate(events.end_ns[launched[order]])
    called_ns = events.start_ns[waits]
    last = np.searchsorted(moment_ns[order], called_ns, side="right") - 1
    waits = waits[last >= 0]
    awaited_ns = reach_ns[last[last >= 0]]
    early_ns = awaited_ns - events.end_ns[waits]
    is_error = (early_ns > 0) & (early_ns <= CLOCK_ERROR_US * 1e3)
    return int(early_ns[is_error].max(initial=0))


def move_device(trace: Trace, by_ns: int) -> Trace:
    """The trace with all device work earlier by some ns. Events then stand in the order of their old starts."""
    if not by_ns:
        return trace
    start_ns = trace.events.start_ns.copy()
    end_ns = trace.events.end_ns.copy()
    start_ns[trace.device_rows] -= by_ns
    end_ns[trace.device_rows] -= by_ns
    return replace(trace, events=replace(trace.events, start_ns=start_ns, end_ns=end_ns))
