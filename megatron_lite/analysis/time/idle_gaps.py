"""Why the GPU was idle, gap by gap: each gap is ended by some work, and what kept that work from starting is the cause.

Definitions (h: the moment at which the call that launches this work returned, at the latest the gap's end):

- until h the host was late. What it did on the threads that drive the GPU decides: loader, saving, allocator and garbage
  collector by name; else it is the price of a synchronisation, as far as the host had been standing in one (without it,
  it would have come as much earlier); the rest is the host itself: Python and dispatch.
- after h the work was queued: up to 10 us are launch latency; more is a dependency if the stream was told to wait for an
  event before this work; else unexplained, as is a gap whose work has no launch call in the trace.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.intervals import Cover, complement, difference, intersection, joined, union
from megatron_lite.analysis.kernels.roles import is_communication
from megatron_lite.analysis.time.host_activity import HostActivity
from megatron_lite.analysis.trace.columns import Kind, Trace

# --- what a GPU is busy with, as unions: compute, communication, copies


@dataclass(frozen=True)
class DeviceCovers:
    """Unions over all streams of one device."""

    compute: Cover  # kernels that are not communication
    communication: Cover
    copy: Cover  # memcpy and memset

    @cached_property
    def busy(self) -> Cover:
        return joined(self.compute, self.communication, self.copy)

    @cached_property
    def exposed_communication(self) -> Cover:
        return difference(self.communication, self.compute)

    @cached_property
    def exposed_copy(self) -> Cover:
        return difference(self.copy, joined(self.compute, self.communication))


def device_covers(trace: Trace, rows: np.ndarray) -> DeviceCovers:
    """Of these rows of device work."""
    events = trace.events
    kernel, talks = events.kind[rows] == Kind.KERNEL, communication_names(trace)[events.name[rows]]
    classes = (kernel & ~talks, kernel & talks, ~kernel)
    return DeviceCovers(*(union(events.start_ns[rows[one]], events.end_ns[rows[one]]) for one in classes))


def communication_names(trace: Trace) -> np.ndarray:
    """bool per name of the trace: of a kernel or a host span that communicates?"""
    return trace.passing(is_communication, Kind.KERNEL, Kind.ANNOTATION)


# --- why the GPU was idle, gap by gap: each gap is ended by some work, and what kept that work from starting is the cause


LAUNCH_LATENCY_NS = 10_000


@dataclass(frozen=True)
class Gaps:
    """g gaps in order, and what each is made of in ns: [g] each; the amounts add up to its length."""

    start: np.ndarray
    end: np.ndarray
    by: np.ndarray  # row of the work that ends it; -1: nothing does
    thread: np.ndarray  # that launched this work; -1: unknown
    late: np.ndarray  # h - start: how long the host was late
    waited: np.ndarray  # row of the last call in which the host waited for the device meanwhile; -1: none
    amounts: dict[str, np.ndarray]  # keys of ROW_TITLES
    host: Cover  # when the host itself was the cause

    def total(self, row: str) -> int:
        return int(self.amounts[row].sum())


def find_idle_gaps(trace: Trace, rows: np.ndarray, busy: Cover, steady: Cover, activity: HostActivity) -> Gaps:
    """The gaps of `busy` inside the steady steps. `rows`: the device work that `busy` is made of, by start."""
    events = trace.events
    idle = intersection(steady, complement(busy, int(steady.start[0]), int(steady.end[-1])))
    start, end = idle.start, idle.end
    by = _first_from(events.start_ns[rows], rows, end)
    launch = np.where(by >= 0, trace.launch_of[np.maximum(by, 0)], -1)
    known = launch >= 0
    late = np.where(known, np.clip(events.end_ns[np.maximum(launch, 0)], start, end) - start, 0)
    amounts = _named(activity, start, start + late)
    free = late - sum(amounts.values())
    waited, blocked = _waiting(trace, activity.waits, start, start + late)
    amounts["sync"] = np.minimum(free, blocked)
    amounts["host"] = free - amounts["sync"]
    queued = end - start - late
    quick, awaits = known & (queued < LAUNCH_LATENCY_NS), _awaits(trace, rows, by, launch)
    amounts["launch"] = np.where(quick, queued, 0)
    amounts["dependency"] = np.where(known & ~quick & awaits, queued, 0)
    amounts["unexplained"] = np.where(quick | known & awaits, 0, queued)
    thread = np.where(known, events.thread[np.maximum(launch, 0)], -1)
    return Gaps(
        start,
        end,
        by,
        thread,
        late,
        np.where(amounts["sync"] > 0, waited, -1),
        amounts,
        _host_itself(activity, start, late, amounts["sync"]),
    )


def _first_from(starts: np.ndarray, rows: np.ndarray, moment: np.ndarray) -> np.ndarray:
    """The first of `rows` that starts at the moment or later; -1: none."""
    at = np.searchsorted(starts, moment, side="left")
    return np.where(at < len(rows), rows[np.minimum(at, len(rows) - 1)], -1)


def _named(activity: HostActivity, start: np.ndarray, end: np.ndarray) -> dict[str, np.ndarray]:
    """What has a name of its own; where two have, the first in this order."""
    covers = {
        "save": activity.save,
        "garbage_collector": activity.garbage,
        "allocator": activity.allocator,
        "data_wait": activity.data,
    }
    amounts, taken = {}, union((), ())
    for row, cover in covers.items():
        amounts[row] = difference(cover, taken).within(start, end)
        taken = union(np.concatenate((taken.start, cover.start)), np.concatenate((taken.end, cover.end)))
    return amounts


def _waiting(trace: Trace, waits: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row of the last wait that touches [start, end), ns from the beginning of the first such wait on)."""
    events = trace.events
    waits = waits[events.end_ns[waits] > events.start_ns[waits]]
    if not len(waits):
        return np.full(len(start), -1, np.int64), np.zeros(len(start), np.int64)
    reach = np.maximum.accumulate(events.end_ns[waits])
    last = np.searchsorted(events.start_ns[waits], end, side="left") - 1
    touches = (last >= 0) & (reach[np.maximum(last, 0)] > start)
    cover = union(events.start_ns[waits], events.end_ns[waits])
    at = np.maximum(np.searchsorted(cover.start, start, side="right") - 1, 0)
    begun = np.where(cover.holds(start), cover.start[at], start)
    return np.where(touches, waits[np.maximum(last, 0)], -1), cover.within(begun, end)


def _awaits(trace: Trace, rows: np.ndarray, by: np.ndarray, launch: np.ndarray) -> np.ndarray:
    """Was the work's stream told to wait for an event, after the work before it on this stream was launched?"""
    events = trace.events
    waits = trace.rows[Kind.RUNTIME]
    waits = waits[trace.matching(lambda name: "StreamWaitEvent" in name)[waits]]
    if not len(waits) or not len(by):
        return np.zeros(len(by), bool)
    before = _launch_before(trace, rows)[np.searchsorted(rows, np.maximum(by, 0)).clip(0, len(rows) - 1)]
    moments = np.sort(events.start_ns[waits])
    asked = np.searchsorted(moments, events.start_ns[np.maximum(launch, 0)])
    return (asked > np.searchsorted(moments, before)) & (by >= 0)


def _launch_before(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """For each of `rows` when the work before it on its stream was launched, ns; 0: nothing was."""
    events = trace.events
    launch = trace.launch_of[rows]
    launched = np.where(launch >= 0, events.start_ns[np.maximum(launch, 0)], 0)
    order = np.lexsort((np.arange(len(rows)), events.stream[rows]))
    same = np.concatenate(([False], np.diff(events.stream[rows][order]) == 0))
    before = np.empty(len(rows), np.int64)
    before[order] = np.where(same, np.roll(launched[order], 1), 0)
    return before


def _host_itself(activity: HostActivity, start: np.ndarray, late: np.ndarray, sync: np.ndarray) -> Cover:
    """The last part of each gap's lateness: what a synchronisation caused comes first."""
    lateness = difference(union(start, start + late), activity.named)
    if not len(lateness):
        return lateness
    begin = lateness.time_at(lateness.covered_until(start) + sync)
    return intersection(lateness, union(np.maximum(begin, start), start + late))
