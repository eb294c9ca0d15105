"""Memory of a run without a snapshot, from the memory events that a profiler wrote into its trace (profile_memory)."""

from collections import Counter

import numpy as np

from megatron_lite.analysis.memory.memory_results import TraceMemory, choose_points
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Kind, Trace


def measure_trace_memory(trace: Trace, placing: Placing) -> TraceMemory | None:
    """Of the device with the most events, GPUs before the host; None for a trace without memory events."""
    seen = trace.memory
    if not len(seen):
        return None
    devices = Counter(seen.device.tolist())
    device = max(devices, key=lambda number: (number >= 0, devices[number], -number))
    rows = np.flatnonzero(seen.device == device)
    times, reserved = seen.time_ns[rows], seen.total_reserved[rows]
    given = bool(np.any(seen.total_allocated[rows] > 0))
    sums = np.cumsum(seen.num_bytes[rows])
    allocated = seen.total_allocated[rows] if given else sums - min(0, int(sums.min()))
    peak = int(np.argmax(allocated))
    # the innermost operator that is open then, on the thread that began one last
    operators, end_ns = trace.rows[Kind.OP], trace.events.end_ns
    before = int(np.searchsorted(trace.events.start_ns[operators], times[peak], side="right")) - 1
    operator = int(operators[before]) if before >= 0 else -1
    while operator >= 0 and end_ns[operator] < times[peak]:
        operator = int(placing.operator[operator])
    phase = int(placing.phase[operator]) if operator >= 0 else -1
    at = choose_points(allocated)
    return TraceMemory(
        source=trace.source,
        rank=trace.rank,
        device=device,
        peak_bytes=int(allocated[peak]),
        peak_ns=int(times[peak]),
        peak_phase=placing.phases[phase] if phase >= 0 else "",
        peak_operator=trace.name_of(operator) if operator >= 0 else "",
        reserved_bytes=int(reserved.max()) if np.any(reserved > 0) else None,
        curve=tuple(zip(times[at].tolist(), allocated[at].tolist())),
        total_is_given=given,
    )
