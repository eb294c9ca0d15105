"""Where the steps of a trace are, on the host: by the profiler's marks, else by ranges that look like steps."""

import re
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.trace.columns import Kind, Trace

PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,18})$")
NUMBERED = re.compile(r"(?:train(?:ing)?[ _-]?)?(?:step|iter|iteration)[ _#:=-]*(\d{1,18})$", re.IGNORECASE)
NOT_A_STEP = re.compile(
    r"nccl|gloo:|c10d::|Optimizer\.|enumerate\(DataLoader\)|nn\.Module|PyTorch Profiler", re.IGNORECASE
)
MIN_COVERED = 0.5  # of its thread's time, by a range that repeats and so may be the step


@dataclass(frozen=True)
class HostSteps:
    """k steps in order, none overlapping another."""

    names: tuple[str, ...]
    numbers: tuple[int | None, ...]
    start_ns: Integers  # int64 [k]
    end_ns: Integers  # int64 [k]
    thread: int  # that drives them; -1: no host event
    notes: tuple[str, ...] = ()

    def follows(self) -> Flags:
        """bool [k]: does the step come right after the one before? Two windows in one file leave a hole."""
        pairs = zip(self.numbers, self.numbers[1:])
        direct = [before is None or number is None or number == before + 1 for before, number in pairs]
        return np.array([False, *direct][: len(self.names)], bool)


def find_host_steps(trace: Trace) -> HostSteps:
    """The steps of the trace; at least one if it has any event."""
    events, ranges = trace.events, trace.rows[Kind.ANNOTATION]
    for pattern in (PROFILER_STEP, NUMBERED):
        rows = ranges[trace.matching(pattern.match)[ranges]]
        if len(rows):
            thread = int(np.bincount(events.thread[rows]).argmax())
            rows = rows[events.thread[rows] == thread]
            # nested marks: those that begin before an earlier one has ended are none
            reach = np.maximum.accumulate(events.end_ns[rows])
            rows = rows[np.concatenate(([True], events.start_ns[rows][1:] >= reach[:-1]))]
            names = tuple(trace.name_of(row) for row in rows)
            numbers = tuple(int(found[1]) for name in names if (found := pattern.match(name)))
            return HostSteps(names, numbers, events.start_ns[rows], events.end_ns[rows], thread)
    rows = _find_repeating(trace, ranges[~trace.matching(NOT_A_STEP.match)[ranges]])
    if len(rows):
        name, count, thread = trace.name_of(rows[0]), len(rows), int(events.thread[rows[0]])
        note = f"no step marks (ProfilerStep#N): steps are taken from the range '{name}', which comes {count} times"
        return HostSteps((name,) * count, (None,) * count, events.start_ns[rows], events.end_ns[rows], thread, (note,))
    kinds = (Kind.OP, Kind.ANNOTATION, Kind.RUNTIME, Kind.PYTHON)
    host = np.flatnonzero((events.device < 0) & np.isin(events.kind, kinds))
    rows = np.concatenate((host, trace.device_rows))
    if not len(rows):
        return HostSteps((), (), rows, rows, -1, ("no event of a host or a device",))
    start, end = events.start_ns[rows].min(keepdims=True), events.end_ns[rows].max(keepdims=True)
    thread = int(np.bincount(events.thread[host]).argmax()) if len(host) else -1
    note = "no step marks (ProfilerStep#N): the whole trace counts as one step"
    return HostSteps(("whole trace",), (None,), start, end, thread, (note,))


def _find_repeating(trace: Trace, rows: Integers) -> Integers:
    """Those of `rows` that are the range that comes back and covers most of its thread; none if it covers too little."""
    events = trace.events

    def number_ranges(rows: Integers) -> Integers:
        """For each of `rows` a number for its name on its thread."""
        key = events.thread[rows].astype(np.int64) * (len(trace.names) + 1) + events.name[rows]
        number: Integers = np.unique(key, return_inverse=True)[1]
        return number

    number = number_ranges(rows)
    nest = trace.nest(rows[np.bincount(number)[number] >= 2])
    top: Integers = nest.rows[nest.depth == 0]
    if not len(top):
        return top
    number = number_ranges(top)
    covered = np.bincount(number, events.end_ns[top] - events.start_ns[top])
    top = np.sort(top[number == covered.argmax()])
    share = covered.max() / (events.end_ns[top].max() - events.start_ns[top].min())
    return top if share >= MIN_COVERED else top[:0]
