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
    for line in Path(__file__).with_name("launch_calls.tsv").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern, runtime, work = line.split("\t")[:3]
            rows.append(LaunchCall(re.compile(pattern), runtime, work))
    return tuple(rows)


@lru_cache(maxsize=4096)
def find_launch_call(name: str) -> LaunchCall | None:
    """The row for a call of this name; None if the call starts nothing on a device."""
    return next((row for row in read_launch_calls() if row.pattern.match(name)), None)


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
    by_kind: dict[tuple[str, str], list[int]] = {}
    for name in np.unique(trace.events.name[calls]).tolist():
        row = find_launch_call(trace.names[name])
        if row is not None:
            by_kind.setdefault((row.runtime, row.work), []).append(name)
    found = []
    for (runtime, work), names in by_kind.items():
        own = calls[np.isin(trace.events.name[calls], names)]
        [(most, _)] = Counter(trace.events.name[own].tolist()).most_common(1)
        found.append(Launches(runtime, work, own, trace.names[most]))
    return sorted(found, key=lambda one: -len(one.rows))


def count_lost(trace: Trace, launches: Launches) -> int:
    """How many of the launches have no device work with their correlation id.

    0 where the ids of this runtime are not known to be those of device work: then only a trace without most of it is
    told.
    """
    correlation = trace.events.correlation
    known = launches.rows[correlation[launches.rows] >= 0]
    joined = np.isin(correlation[known], correlation[trace.device_rows])
    share = joined.mean() if len(known) else 1.0
    if launches.runtime not in ALWAYS_JOINED and (share == 0 or share > MIN_JOINED):
        return 0
    return int((~joined).sum())


def measure_early(trace: Trace, work: Integers) -> tuple[float, float]:
    """Measure device work that starts before the call that launches it, which no clock may show.

    Args:
        trace: the trace.
        work: rows of device work.

    Returns:
        Its share of all work that is joined with a call, and how much before its call the median of it starts, us.
    """
    events = trace.events
    launched = work[trace.launch_of[work] >= 0]
    if not len(launched):
        return 0.0, 0.0
    before_us = (events.start_ns[trace.launch_of[launched]] - events.start_ns[launched]) / 1e3
    early = before_us > CLOCK_ERROR_US
    return float(early.mean()), float(np.median(before_us[early])) if early.any() else 0.0


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
    """'200 kernel launches (urEnqueueKernelLaunch)'."""
    number = len(launches.rows)
    what = {"kernel": "kernel launch", "graph": "graph launch", "copy": "call for a copy"}[launches.work]
    plural = "calls for copies" if launches.work == "copy" else f"{what}es"
    return f"{number:,} {what if number == 1 else plural} ({launches.call})"
