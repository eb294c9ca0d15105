"""Memory of a run without a snapshot, from the memory events that a profiler wrote into its trace (profile_memory)."""

import itertools
from collections import Counter

import numpy as np

from megatron_lite.analysis.memory.memory_results import TraceMemory
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Kind, Trace

CURVE_POINTS = 800


def measure_trace_memory(trace: Trace, placing: Placing) -> TraceMemory | None:
    """Of the device with the most events, GPUs before the host; None for a trace without memory events."""
    seen = trace.memory
    if not len(seen):
        return None
    devices = Counter(seen.device.tolist())
    device = max(devices, key=lambda number: (number >= 0, devices[number], -number))
    rows = np.flatnonzero(seen.device == device)
    given = bool(np.any(seen.total_allocated[rows] > 0))
    sums = np.cumsum(seen.num_bytes[rows])
    allocated = seen.total_allocated[rows] if given else sums - min(0, int(sums.min()))
    peak = int(np.argmax(allocated))
    operators = _operators_at(trace, placing, seen.time_ns[rows])
    phases = _phases(placing, operators)
    reserved = seen.total_reserved[rows]
    return TraceMemory(
        source=trace.source,
        rank=trace.rank,
        device=device,
        peak_bytes=int(allocated[peak]),
        peak_ns=int(seen.time_ns[rows[peak]]),
        peak_phase=phases[peak],
        peak_operator=_name(trace, operators[peak]),
        reserved_bytes=int(reserved.max()) if np.any(reserved > 0) else None,
        curve=_curve(seen.time_ns[rows], allocated, peak),
        total_is_given=given,
    )


def _operators_at(trace: Trace, placing: Placing, times: np.ndarray) -> np.ndarray:
    """Row of the innermost OP that is open at each time, on the thread that began one last; -1 outside of all."""
    rows = trace.rows[Kind.OP]
    if not len(rows):
        return np.full(len(times), -1)
    end = trace.events.end_ns
    before = np.searchsorted(trace.events.start_ns[rows], times, side="right") - 1
    at = np.where(before >= 0, rows[before], -1)
    over = np.flatnonzero((at >= 0) & (end[at] < times))
    while len(over):  # those that have ended: the operator around them
        at[over] = placing.operator[at[over]]
        over = over[(at[over] >= 0) & (end[at[over]] < times[over])]
    return at


def _phases(placing: Placing, operators: np.ndarray) -> list[str]:
    numbers = np.where(operators >= 0, placing.phase[operators], -1)
    return [placing.phases[number] if number >= 0 else "" for number in numbers.tolist()]


def _name(trace: Trace, operator: int) -> str:
    return trace.name_of(operator) if operator >= 0 else ""


def _curve(times: np.ndarray, allocated: np.ndarray, peak: int) -> tuple[tuple[int, int], ...]:
    edges = np.unique(np.linspace(0, len(times), min(len(times), CURVE_POINTS) + 1).astype(np.int64))
    highest = [int(start + np.argmax(allocated[start:end])) for start, end in itertools.pairwise(edges)]
    at = np.unique([0, *highest, peak, len(times) - 1])
    return tuple(zip(times[at].tolist(), allocated[at].tolist()))
