"""Where the steps of a trace are, on the host: by the profiler's marks, else by ranges that look like steps."""

import re
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Nesting
from megatron_lite.analysis.trace.columns import Kind, Trace

PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")
NUMBERED = re.compile(r"(?:train(?:ing)?[ _-]?)?(?:step|iter|iteration)[ _#:=-]*(\d{1,18})$", re.IGNORECASE)
NOT_A_STEP = re.compile(
    r"nccl|gloo:|c10d::|Optimizer\.|enumerate\(DataLoader\)|nn\.Module|PyTorch Profiler", re.IGNORECASE
)


@dataclass(frozen=True)
class HostSteps:
    """k steps in order, none overlapping another."""

    names: tuple[str, ...]
    numbers: tuple[int | None, ...]
    start_ns: np.ndarray  # int64 [k]
    end_ns: np.ndarray  # int64 [k]
    thread: int  # that drives them; -1: no host event
    notes: tuple[str, ...] = ()

    def follows(self) -> np.ndarray:
        """bool [k]: does the step come right after the one before? Two windows in one file leave a hole."""
        known = [n is not None for n in self.numbers]
        direct = [
            k > 0 and (not (known[k] and known[k - 1]) or self.numbers[k] == self.numbers[k - 1] + 1)
            for k in range(len(self.names))
        ]
        return np.array(direct, bool)


def host_steps(trace: Trace) -> HostSteps:
    """The steps of the trace; at least one if it has any event."""
    rows = trace.rows[Kind.ANNOTATION]
    for pattern in (PROFILER_STEP, NUMBERED):
        found = _numbered(trace, rows, pattern)
        if found is not None:
            return found
    return _repeating(trace, rows) or _whole(trace)


def _numbered(trace: Trace, rows: np.ndarray, pattern: re.Pattern) -> HostSteps | None:
    rows = rows[trace.matching(pattern.match)[rows]]
    if not len(rows):
        return None
    threads, counts = np.unique(trace.events.thread[rows], return_counts=True)
    thread = int(threads[counts.argmax()])
    rows = _apart(trace, rows[trace.events.thread[rows] == thread])
    names = tuple(trace.name_of(row) for row in rows)
    numbers = tuple(int(pattern.match(name)[1]) for name in names)
    return HostSteps(names, numbers, trace.events.start_ns[rows], trace.events.end_ns[rows], thread)


def _apart(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """Without those that begin before an earlier one has ended (nested marks)."""
    reach = np.maximum.accumulate(trace.events.end_ns[rows])
    return rows[np.concatenate(([True], trace.events.start_ns[rows][1:] >= reach[:-1]))]


def _repeating(trace: Trace, rows: np.ndarray) -> HostSteps | None:
    """The range that comes back and covers most of its thread."""
    events = trace.events
    rows = rows[~trace.matching(NOT_A_STEP.match)[rows]]
    if not len(rows):
        return None
    key = events.thread[rows].astype(np.int64) * (len(trace.names) + 1) + events.name[rows]
    _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    rows = rows[counts[inverse] >= 2]
    nest = Nesting(rows, events.start_ns[rows], events.end_ns[rows], events.thread[rows])
    top = nest.rows[nest.outermost()]
    if not len(top):
        return None
    key = events.thread[top].astype(np.int64) * (len(trace.names) + 1) + events.name[top]
    keys, inverse = np.unique(key, return_inverse=True)
    covered = np.bincount(inverse, events.end_ns[top] - events.start_ns[top])
    top = np.sort(top[key == keys[covered.argmax()]])
    if covered.max() < 0.5 * (events.end_ns[top].max() - events.start_ns[top].min()):
        return None
    name = trace.name_of(top[0])
    note = f"no step marks (ProfilerStep#N): steps are taken from the range '{name}', which comes {len(top)} times"
    return HostSteps(
        (name,) * len(top),
        (None,) * len(top),
        events.start_ns[top],
        events.end_ns[top],
        int(events.thread[top[0]]),
        (note,),
    )


def _whole(trace: Trace) -> HostSteps:
    """All of the trace as one step."""
    events = trace.events
    host = np.flatnonzero(
        (events.device < 0) & np.isin(events.kind, (Kind.OP, Kind.ANNOTATION, Kind.RUNTIME, Kind.PYTHON))
    )
    rows = np.concatenate((host, trace.device_rows))
    if not len(rows):
        empty = np.empty(0, np.int64)
        return HostSteps((), (), empty, empty, -1, ("no event of a host or a device",))
    thread = int(np.bincount(events.thread[host]).argmax()) if len(host) else -1
    start, end = events.start_ns[rows].min(keepdims=True), events.end_ns[rows].max(keepdims=True)
    return HostSteps(
        ("whole trace",),
        (None,),
        start,
        end,
        thread,
        ("no step marks (ProfilerStep#N): the whole trace counts as one step",),
    )
