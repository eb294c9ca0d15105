"""Calls on the host that start work on a device, of any runtime: launch_calls.tsv, which a user can extend."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.trace.columns import Kind, Trace

MAX_LOST = 0.05  # of the launches, without work in the trace; work at a window's edges is regularly missing
# Of device work, that starts before its launch. Clocks of host and device are compared to some microseconds.
MAX_EARLY = 0.3
CLOCK_ERROR_US = 20.0
# Runtimes whose calls and kernels always have the same correlation id in a trace.
ALWAYS_JOINED = ("cuda",)
MIN_JOINED = 0.5  # of the launches of another runtime: some have work without an id


@dataclass(frozen=True)
class LaunchCall:
    """A row of launch_calls.tsv."""

    pattern: re.Pattern[str]
    runtime: str
    work: str  # "kernel", "graph" or "copy"


@lru_cache(maxsize=1)
def read_launch_calls() -> tuple[LaunchCall, ...]:
    """The table of calls."""
    rows = []
    text = Path(__file__).with_name("launch_calls.tsv").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            pattern, runtime, work, *_ = line.split("\t")
            rows.append(LaunchCall(re.compile(pattern), runtime, work))
    return tuple(rows)


@lru_cache(maxsize=4096)
def find_launch_call(name: str) -> LaunchCall | None:
    """The row for a call of this name; None if the call starts nothing on a device."""
    for row in read_launch_calls():
        if row.pattern.match(name):
            return row
    return None


@dataclass(frozen=True)
class Launches:
    """Calls of one runtime that start one kind of work."""

    runtime: str
    work: str
    rows: Integers  # in order of start
    call: str  # the most frequent call's name


def find_launches(trace: Trace, rows: Integers | None = None) -> list[Launches]:
    """The launches among `rows` of calls (None: all), by runtime and kind of work, most calls first."""
    calls = trace.rows[Kind.RUNTIME] if rows is None else rows
    name_of_call = trace.events.name[calls]
    by_kind: dict[tuple[str, str], list[int]] = {}
    for name in np.unique(name_of_call).tolist():
        row = find_launch_call(trace.names[name])
        if row is not None:
            by_kind.setdefault((row.runtime, row.work), []).append(name)
    found = []
    for (runtime, work), names in by_kind.items():
        is_own = np.isin(name_of_call, names)
        times = Counter(name_of_call[is_own].tolist())
        [(most, _)] = times.most_common(1)
        launches = Launches(runtime, work, calls[is_own], trace.names[most])
        found.append(launches)
    return sorted(found, key=lambda one: -len(one.rows))


def count_lost(trace: Trace, launches: Launches) -> int:
    """How many of the launches have no device work with their correlation id.

    0 where the ids of this runtime are not known to be those of device work: then only a trace without most of it is
    told.
    """
    correlation = trace.events.correlation
    ids = correlation[launches.rows]
    ids = ids[ids >= 0]
    is_joined = np.isin(ids, correlation[trace.device_rows])
    share = is_joined.mean() if len(ids) else 1.0
    is_plausible = share == 0 or share > MIN_JOINED
    if launches.runtime not in ALWAYS_JOINED and is_plausible:
        return 0
    return int((~is_joined).sum())


def measure_early(trace: Trace, work: Integers) -> tuple[float, float]:
    """Measure device work that starts before the call that launches it, which no clock may show.

    Args:
        trace: the trace.
        work: rows of device work.

    Returns:
        Its share of all work that is joined with a call, and how much before its call the median of it starts, us.
    """
    start_ns = trace.events.start_ns
    launched = work[trace.launch_of[work] >= 0]
    if not len(launched):
        return 0.0, 0.0
    launch = trace.launch_of[launched]
    before_us = (start_ns[launch] - start_ns[launched]) / 1e3
    is_early = before_us > CLOCK_ERROR_US
    if not is_early.any():
        return 0.0, 0.0
    median_us = np.median(before_us[is_early])
    return float(is_early.mean()), float(median_us)


def describe_early(trace: Trace, work: Integers) -> str:
    """Why the times of host and device cannot be compared: work starts before its launch; '' where hardly any does."""
    share, median_us = measure_early(trace, work)
    if share <= MAX_EARLY:
        return ""
    return (
        f"{share:.0%} of the device's work starts before the call that launches it, in the median by "
        f"{median_us / 1e3:,.2f} ms: the clocks of host and device differ, so what the device waited for is not known"
    )


def describe_launches(launches: Launches) -> str:
    """Describe launches as in "200 kernel launches (urEnqueueKernelLaunch)"."""
    number = len(launches.rows)
    singular, plural = {
        "kernel": ("kernel launch", "kernel launches"),
        "graph": ("graph launch", "graph launches"),
        "copy": ("call for a copy", "calls for copies"),
    }[launches.work]
    what = singular if number == 1 else plural
    return f"{number:,} {what} ({launches.call})"
