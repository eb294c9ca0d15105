"""Memory of a run without a snapshot, from the memory events that a profiler wrote into its trace (profile_memory)."""

from typing import NamedTuple

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.memory.memory_results import TraceMemory, choose_points
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Kind, Trace

NO_EVENT = -1
MIN_RISING_STEPS = 4  # with fewer, batches that happen to grow look alike
MIN_RISE_BYTES = 4096  # as in snapshots: counters and log values come and go


class MemoryCurve(NamedTuple):
    """Memory of one device over the trace."""

    device: int
    rows: Integers  # of the trace's memory events
    allocated: Integers  # bytes after each
    total_is_given: bool  # False: a sum of what the window saw

    @property
    def peak_bytes(self) -> int:
        """The most that is allocated."""
        return int(self.allocated.max())


def draw_memory_curve(trace: Trace, device: int) -> MemoryCurve:
    """The curve of a device, of the totals that the trace gives or else of the sums of its events."""
    rows = np.flatnonzero(trace.memory.device == device)
    totals = trace.memory.total_allocated[rows]
    if np.any(totals > 0):
        return MemoryCurve(device, rows, totals, total_is_given=True)
    sums = np.cumsum(trace.memory.num_bytes[rows])
    # what was there before the window keeps its sum from falling below 0
    before_window = -min(0, int(sums.min()))
    return MemoryCurve(device, rows, sums + before_window, total_is_given=False)


def measure_trace_memory(trace: Trace, placing: Placing) -> TraceMemory | None:
    """Memory of the GPU with the highest peak, or of the host where the trace has no GPU's events.

    None for a trace without memory events.
    """
    seen = trace.memory
    if not len(seen):
        return None
    curves = [draw_memory_curve(trace, device) for device in _choose_devices(seen.device)]
    shown = max(curves, key=lambda curve: (curve.peak_bytes, len(curve.rows), -curve.device))
    times_ns = seen.time_ns[shown.rows]
    reserved = seen.total_reserved[shown.rows]
    peak_ns = int(times_ns[np.argmax(shown.allocated)])
    operator = _find_open_operator(trace, placing, peak_ns)
    phase = int(placing.phase[operator]) if operator != NO_EVENT else NO_EVENT
    has_reserved = bool(np.any(reserved > 0))
    others = [curve for curve in curves if curve is not shown]
    points = choose_points(shown.allocated)
    floors = _measure_floors(shown.allocated, times_ns, placing)
    return TraceMemory(
        source=trace.source,
        rank=trace.rank,
        device=shown.device,
        peak_bytes=shown.peak_bytes,
        peak_ns=peak_ns,
        peak_phase=placing.phases[phase] if phase >= 0 else "",
        peak_operator=trace.name_of(operator) if operator != NO_EVENT else "",
        reserved_bytes=int(reserved.max()) if has_reserved else None,
        curve=tuple(zip(times_ns[points].tolist(), shown.allocated[points].tolist())),
        total_is_given=shown.total_is_given,
        other_peaks=tuple((curve.device, curve.peak_bytes) for curve in others),
        steps=len(floors),
        rise_bytes_per_step=_measure_rise(floors),
    )


def _choose_devices(device: Integers) -> list[int]:
    """Choose the GPUs among the devices of memory events; the host where there are none."""
    devices = np.unique(device)
    gpus = devices[devices >= 0]
    chosen: list[int] = (gpus if len(gpus) else devices).tolist()
    return chosen


def _measure_rise(floors: Integers) -> int | None:
    """Measure by how much the least of a step rises to the next one, on average; None where it does not each time.

    Args:
        floors: [steps], bytes.
    """
    rises = np.diff(floors)
    if len(floors) < MIN_RISING_STEPS or rises.min() < MIN_RISE_BYTES:
        return None
    return int(rises.mean())


def _measure_floors(allocated: Integers, times_ns: Integers, placing: Placing) -> Integers:
    """Measure the least that is allocated in each steady step: bytes, int64 [steps].

    What a batch needs for a while is not in it, however large; what is kept from step to step is.

    Args:
        allocated: [m], bytes after each memory event.
        times_ns: [m], when it came, in order.
        placing: the steps.
    """
    floors = []
    for step in placing.steps:
        first, end = np.searchsorted(times_ns, (step.host_start_ns, step.host_end_ns))
        # the level at the step's start counts, too
        levels = allocated[max(first - 1, 0) : end]
        if step.steady and len(levels):
            floors.append(int(levels.min()))
    return np.array(floors, np.int64)


def _find_open_operator(
    trace: Trace,
    placing: Placing,
    moment_ns: int,  # on the trace's clock
) -> int:
    """Event of the innermost operator that is open, on the thread that began one last; NO_EVENT if none is."""
    operators = trace.rows[Kind.OP]
    starts_ns = trace.events.start_ns[operators]
    begun = int(np.searchsorted(starts_ns, moment_ns, side="right"))
    operator = int(operators[begun - 1]) if begun else NO_EVENT
    while operator >= 0 and trace.events.end_ns[operator] < moment_ns:
        operator = int(placing.operator[operator])
    return operator if operator >= 0 else NO_EVENT
