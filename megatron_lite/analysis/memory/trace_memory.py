"""Memory of a run without a snapshot, from the memory events that a profiler wrote into its trace (profile_memory)."""

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.memory.memory_results import TraceMemory, choose_points
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Kind, Trace


def _draw_curve(trace: Trace, device: int) -> tuple[int, Integers, Integers, bool]:
    """(the device, its rows, bytes allocated after each, whether the trace gives totals)"""
    seen = trace.memory
    rows = np.flatnonzero(seen.device == device)
    given = bool(np.any(seen.total_allocated[rows] > 0))
    sums = np.cumsum(seen.num_bytes[rows])
    return device, rows, seen.total_allocated[rows] if given else sums - min(0, int(sums.min())), given


def measure_trace_memory(trace: Trace, placing: Placing) -> TraceMemory | None:
    """Of the GPU with the highest peak, or of the host where the trace has no GPU's events;
    None for a trace without memory events."""
    seen = trace.memory
    if not len(seen):
        return None
    numbers = np.unique(seen.device)
    numbers = numbers[numbers >= 0] if np.any(numbers >= 0) else numbers
    curves = [_draw_curve(trace, number) for number in numbers.tolist()]
    shown = max(curves, key=lambda curve: (int(curve[2].max()), len(curve[1]), -curve[0]))
    device, rows, allocated, given = shown
    times, reserved = seen.time_ns[rows], seen.total_reserved[rows]
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
        other_peaks=tuple((curve[0], int(curve[2].max())) for curve in curves if curve is not shown),
    )
