"""Counters of a device in the steady steps: measurements of what the rest of the report infers."""

import re
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Cover, Integers, Numbers, union
from megatron_lite.analysis.kernels.kernel_results import MEMORY_BUSY, SM_ACTIVE, CounterUse, Role
from megatron_lite.analysis.kernels.selection import Selection
from megatron_lite.analysis.time.time_results import RankTime
from megatron_lite.analysis.trace.columns import CounterSamples, Kind

# Names of libkineto (metrics of CUPTI) and of torch's monitor (_pm_label in monitor_trace.py); both in % of the peak.
MEANINGS = {
    SM_ACTIVE: re.compile(r"SM Active \(%\)|sm__cycles_active\.avg\.pct_of_peak_sustained_(elapsed|active)"),
    MEMORY_BUSY: re.compile(r"(DRAM|HBM) BW \(%\)|(gpu__dram_|dram__)throughput\.avg\.pct_of_peak_sustained_elapsed"),
}
MAX_PERCENT = 110.0  # that a sample may reach, as counters are not read in the same cycle; more is no share
MIN_SAMPLED = 0.5  # of the steady time: fewer samples say nothing of a step
WHOLE_SAMPLE = 0.95  # of a sample's time
MAX_LENGTHS = 4  # of the usual time between samples: after a longer gap samples are missing


def measure_counters(chosen: Selection, time: RankTime, roles: dict[str, Role]) -> tuple[CounterUse, ...]:
    """Measure the counters of the device that works most in the steady steps.

    Args:
        chosen: The trace's work of the steady steps.
        time: Where the rank's steps go.
        roles: The roles of kernels by name.

    Returns:
        A row for each counter whose samples cover half of the steady time; () without any.
    """
    samples = chosen.trace.counters
    if not len(samples) or not len(chosen.device):
        return ()
    trace = chosen.trace
    device = _find_device(chosen)
    covers = _Covers(
        steady=_cover_steps(time),
        working=trace.cover(trace.on_device(trace.device_rows, device)),
        of_roles=_cover_roles(chosen, device, roles),
    )
    found = []
    for number, name in enumerate(samples.names):
        is_own = (samples.name == number) & (samples.device == device)
        sampled = _Sampled(samples, np.flatnonzero(is_own))
        use = _measure(name, sampled, covers)
        if use is not None:
            found.append(use)
    return tuple(found)


@dataclass(frozen=True)
class _Covers:
    """When something happens on the device."""

    steady: Cover  # the steady steps
    working: Cover
    of_roles: dict[Role, Cover]  # kernels of each role run


def _find_device(chosen: Selection) -> int:
    """The number of the device with most events in the steady steps."""
    devices = chosen.trace.events.device[chosen.device]
    events = np.bincount(devices)
    return int(events.argmax())


def _cover_steps(time: RankTime) -> Cover:
    """When the steady steps last, on the device's clock."""
    starts = [step.start_ns for step in time.steady_steps]
    ends = [step.end_ns for step in time.steady_steps]
    return union(np.array(starts, np.int64), np.array(ends, np.int64))


class _Sampled:
    """Samples of one counter by time, each with the time until the next one."""

    def __init__(self, samples: CounterSamples, rows: Integers):
        rows = rows[np.argsort(samples.time_ns[rows], kind="stable")]
        self.start_ns = samples.time_ns[rows]
        self.value = samples.value[rows]
        lengths = np.diff(self.start_ns)
        usual_ns = int(np.median(lengths)) if len(lengths) else 0
        lengths = np.append(lengths, usual_ns)
        self.end_ns = self.start_ns + np.minimum(lengths, MAX_LENGTHS * usual_ns)


def _measure(name: str, sampled: _Sampled, covers: _Covers) -> CounterUse | None:
    """Measure one counter; None where its samples cover too little of the steady time."""
    inside_ns = covers.steady.within(sampled.start_ns, sampled.end_ns)
    weights = inside_ns.astype(np.float64)
    sampled_ns = weights.sum()
    if not sampled_ns or sampled_ns < MIN_SAMPLED * covers.steady.length:
        return None
    by_role = {}
    for role, cover in covers.of_roles.items():
        others = [other for key, other in covers.of_roles.items() if key is not role]
        mean = _mean_inside(sampled, weights, cover, others)
        if mean is not None:
            by_role[role] = mean
    is_share = (sampled.value >= 0).all() and (sampled.value <= MAX_PERCENT).all()
    meanings = [key for key, pattern in MEANINGS.items() if is_share and pattern.fullmatch(name)]
    return CounterUse(
        name=name,
        meaning=meanings[0] if meanings else "",
        mean=float(np.average(sampled.value, weights=weights)),
        working=_mean_inside(sampled, weights, covers.working, []),
        by_role=by_role,
        samples=int(np.count_nonzero(weights)),
    )


def _mean_inside(sampled: _Sampled, weights: Numbers, cover: Cover, others: list[Cover]) -> float | None:
    """The mean of the samples that lie inside a cover and beside others; None for none."""
    length_ns = np.maximum(sampled.end_ns - sampled.start_ns, 1)
    covered_ns = cover.within(sampled.start_ns, sampled.end_ns)
    is_inside = covered_ns >= WHOLE_SAMPLE * length_ns
    for other in others:
        covered_ns = other.within(sampled.start_ns, sampled.end_ns)
        is_inside &= covered_ns <= (1 - WHOLE_SAMPLE) * length_ns
    inside = np.where(is_inside, weights, 0.0)
    if not inside.sum():
        return None
    mean = np.average(sampled.value, weights=inside)
    return float(mean)


def _cover_roles(chosen: Selection, device: int, roles: dict[str, Role]) -> dict[Role, Cover]:
    """When kernels of each role run on the device."""
    trace = chosen.trace
    kernels = trace.on_device(trace.rows[Kind.KERNEL], device)
    rows_of: dict[Role, list[int]] = {}
    for row in kernels.tolist():
        role = roles.get(trace.name_of(row))
        if role is not None:
            rows_of.setdefault(role, []).append(row)
    return {role: trace.cover(np.array(rows, np.int64)) for role, rows in rows_of.items()}
