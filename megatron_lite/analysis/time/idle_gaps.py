"""Why the GPU was idle, gap by gap: each gap is ended by some work, and what kept that work from starting is the cause.

Definitions (h: the moment at which the call that launches this work returned, at the latest the gap's end):

- until h the host was late. What it did on the threads that drive the GPU decides: first what names tell
  (host_names.py:
  loader, saving, compiling, allocator, ...); then the price of a synchronization, as far as the host had been standing
  in one (without it, it would have come as much earlier); then clipping and logging by name; the rest is the host
  itself.
- after h the work was queued: up to 10 us are launch latency; more is a dependency if the stream was told to wait for
  an
  event before this work; else unexplained, as is a gap whose work has no launch call in the trace.
"""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import (
    NOTHING,
    Cover,
    Flags,
    Integers,
    complement,
    difference,
    intersection,
    joined,
    union,
)
from megatron_lite.analysis.kernels.kernel_words import is_communication
from megatron_lite.analysis.time.host_causes import HostWork, cover_causes, find_host_work
from megatron_lite.analysis.time.host_names import AFTER_SYNCS, CAUSES
from megatron_lite.analysis.time.range_names import is_backward
from megatron_lite.analysis.time.time_results import MIN_STRETCH_MS, Placing, ShortGaps
from megatron_lite.analysis.trace.columns import Kind, Trace

# --- what a GPU is busy with: compute, communication, copies


@dataclass(frozen=True)
class DeviceCovers:
    """Unions over all streams of one device."""

    compute: Cover  # kernels that are not communication
    communication: Cover
    copy: Cover  # memcpy and memset

    @cached_property
    def busy(self) -> Cover:
        """When the device does anything."""
        return joined(self.compute, self.communication, self.copy)


def device_covers(trace: Trace, rows: Integers) -> DeviceCovers:
    """Find what the device is busy with in the device work `rows`."""
    is_kernel = trace.events.kind[rows] == Kind.KERNEL
    talks = find_communication_names(trace)[trace.events.name[rows]]
    return DeviceCovers(
        compute=trace.cover(rows[is_kernel & ~talks]),
        communication=trace.cover(rows[is_kernel & talks]),
        copy=trace.cover(rows[~is_kernel]),
    )


def find_communication_names(trace: Trace) -> Flags:
    """Tell for each name of the trace (bool) whether it is of a kernel or a host span that communicates."""
    return trace.passing(is_communication, Kind.KERNEL, Kind.ANNOTATION)


# --- what keeps the host from launching

WAITS = re.compile(
    r"(cuda|hip|cu|mt|xpu)(Stream|Device|Event|Ctx|Thread)Synchronize"
    r"|(cuda|hip)Memcpy(2D|3D|ToSymbol|FromSymbol|WithStream)?(_v\d+)?(_ptds)?$"
    r"|cuMemcpy(HtoD|DtoH)(_v2)?$"
    r"|(musa|mu|tops|cnrt|cn|syn)(Stream|Device|Event|Ctx|Queue|Notifier)(Sync|Synchronize)$|(musa|tops|cnrt)Memcpy$"
    r"|(AscendCL@)?aclrt(SynchronizeStream|SynchronizeDevice|SynchronizeEvent|Memcpy$)"
    r"|(Runtime@)?rt(Stream|Device|Event)Synchronize"
    r"|ur(EventWait|QueueFinish)|ze(Event|Fence|CommandList)HostSynchronize"
    r"|zeCommandQueueSynchronize|cl(Finish|WaitForEvents)"
)
MANY_LAUNCHES = 0.2  # of the device work: a thread that launches so much drives the GPU


@dataclass(frozen=True)
class HostActivity:
    """Activity of the threads that drive the GPU: the main one, autograd's, and others with many launches."""

    threads: NDArray[np.int64]  # indices into Trace.threads
    waits: Integers  # rows of calls in which the host waits for the device, ordered by start
    works: tuple[HostWork, ...]  # what names tell
    covers: dict[str, Cover]  # keys of ROW_TITLES -> when; what belongs to two counts for the first


def find_host_activity(trace: Trace, placing: Placing) -> HostActivity:
    """Find what the threads that drive the GPU did."""
    events = trace.events
    threads = _find_driving_threads(trace, placing)
    waits = trace.find_named(WAITS.match, Kind.RUNTIME)
    waits = np.union1d(waits, find_pageable_copies(trace))
    is_on_threads = np.isin(events.thread[waits], threads) & (events.device[waits] < 0)
    works = find_host_work(trace, threads)
    return HostActivity(
        threads=threads,
        waits=waits[is_on_threads],
        works=works,
        covers=cover_causes(trace, placing, threads, works),
    )


def _find_driving_threads(trace: Trace, placing: Placing) -> NDArray[np.int64]:
    """Sorted indices into Trace.threads of the main thread, autograd's, and others with many launches."""
    launches = trace.launch_of[trace.device_rows]
    launches = launches[launches >= 0]
    counts = np.bincount(trace.events.thread[launches], minlength=1)
    busy = np.flatnonzero(counts > MANY_LAUNCHES * counts.sum())
    main_thread = max(placing.main_thread, 0)
    of_autograd = trace.events.thread[is_backward(trace)]
    threads = np.concatenate((busy, [main_thread], of_autograd))
    return np.unique(threads).astype(np.int64)


def find_pageable_copies(trace: Trace) -> Integers:
    """Rows of the copy calls that return only when the device has begun or finished: their memory is not pinned."""
    events = trace.events
    copies = trace.find_named(lambda name: "ageable" in name, Kind.MEMCPY)
    copies = copies[trace.launch_of[copies] >= 0]
    calls = trace.launch_of[copies]
    waits = events.end_ns[calls] >= events.start_ns[copies]
    return np.unique(calls[waits])


# --- the gaps

LAUNCH_LATENCY_NS = 10_000


@dataclass(frozen=True)
class Gaps:
    """Gaps of the device, g in order, and what each is made of in ns: [g] each; the amounts add up to its length."""

    start: Integers
    end: Integers
    graph: Flags  # of a graph is the work that ends it
    thread: Integers  # that launched the work that ends it; -1: unknown
    late: Integers  # h - start: how long the host was late
    waited: Integers  # row of the last call in which the host waited for the device meanwhile; -1: none
    amounts: dict[str, Integers]  # keys of ROW_TITLES
    host: Cover  # when the host itself was the cause
    behind: Cover  # of what synchronizations cost: the host worked for long without a call to the device


def find_idle_gaps(
    trace: Trace,
    rows: Integers,
    busy: Cover,
    steady: Cover,
    activity: HostActivity,
) -> Gaps:
    """Find the gaps between a device's work, and why they are there.

    Args:
        trace: the trace.
        rows: the device's work, by start.
        busy: when any of it lasts.
        steady: the steady steps, inside of which gaps count.
        activity: what the host did.
    """
    events = trace.events
    idle = intersection(steady, complement(busy, int(steady.start[0]), int(steady.end[-1])))
    start = idle.start
    end = idle.end
    at = np.searchsorted(events.start_ns[rows], end, side="left")
    # the row of the work that ends the gap; -1: nothing does
    ended_by = np.append(rows, -1)[at]
    launch = np.where(ended_by >= 0, trace.launch_of[ended_by], -1)
    is_known = launch >= 0
    launched = np.clip(events.end_ns[launch], start, end)
    late = np.where(is_known, launched - start, 0)
    lateness = _explain_lateness(trace, start, late, activity)
    awaits = _find_event_waits(trace, rows, at, launch)
    amounts = lateness.amounts | _explain_queue(end - start - late, is_known, awaits)
    behind = _find_work_behind_waits(trace, lateness, start, start + late, activity)
    host = _take_named_from_host(amounts, lateness, start, late, activity)
    launches_graph = trace.passing(lambda name: "GraphLaunch" in name, Kind.RUNTIME)
    return Gaps(
        start=start,
        end=end,
        graph=is_known & launches_graph[events.name[launch]],
        thread=np.where(is_known, events.thread[launch], -1),
        late=late,
        waited=np.where(amounts["sync"] > 0, lateness.waited, -1),
        amounts=amounts,
        host=host,
        behind=behind,
    )


@dataclass(frozen=True)
class _Lateness:
    """Why the host was late, for g gaps: what names tell first, then synchronizations, then the host itself."""

    amounts: dict[str, Integers]  # CAUSES, "sync" and "host" -> ns [g]; they add up to the lateness of each gap
    waited: Integers  # [g], row of the last call in which the host waited for the device meanwhile; -1: none
    host: Cover  # when the host itself was the cause


def _explain_lateness(
    trace: Trace,
    start: Integers,  # [g], of the gaps
    late: Integers,  # [g], ns from there on
    activity: HostActivity,
) -> _Lateness:
    """Explain the first `late` ns of each gap."""
    until = start + late
    amounts: dict[str, Integers] = {}
    named = NOTHING
    free = late
    for cause in CAUSES:
        cover = activity.covers[cause]
        amounts[cause] = difference(cover, named).within(start, until)
        named = joined(named, cover)
        free = free - amounts[cause]
    waited, blocked = _find_waits(trace, activity.waits, start, until)
    amounts["sync"] = np.minimum(free, blocked)
    amounts["host"] = free - amounts["sync"]
    # the host itself is the last part of each gap's lateness: what a synchronization caused comes first
    host = difference(union(start, until), named)
    if len(host):
        after_sync = host.covered_until(start) + amounts["sync"]
        begin = np.maximum(host.time_at(after_sync), start)
        host = intersection(host, union(begin, until))
    return _Lateness(amounts, waited, host)


def _find_work_behind_waits(
    trace: Trace,
    lateness: _Lateness,
    start: Integers,  # [g], of the gaps
    until: Integers,  # [g], ns: the host was late until then
    activity: HostActivity,
) -> Cover:
    """Find when the host worked for MIN_STRETCH_MS or longer without a call to the device, of what waits cost.

    Had the host not waited, this work would have been done while the device computed; without the work, the wait would
    have cost no more than the next launch.
    """
    has_waited = lateness.amounts["sync"] > 0
    if not has_waited.any():
        return NOTHING
    events = trace.events
    waits = activity.waits[trace.lengths_ns(activity.waits) > 0]
    # each gap has a wait that touches it: the first one that ends behind the gap's start
    ends = np.maximum.accumulate(events.end_ns[waits])
    first = np.searchsorted(ends, start[has_waited], side="right")
    late = union(ends[first], until[has_waited])
    for cause in CAUSES:
        late = difference(late, activity.covers[cause])
    calls = trace.rows[Kind.RUNTIME]
    on_threads = np.isin(events.thread[calls], activity.threads)
    quiet = difference(late, trace.cover(calls[on_threads]))
    is_long = quiet.end - quiet.start >= MIN_STRETCH_MS * 1e6
    return difference(Cover(quiet.start[is_long], quiet.end[is_long]), lateness.host)


def _take_named_from_host(
    amounts: dict[str, Integers],
    lateness: _Lateness,
    start: Integers,  # [g], of the gaps
    late: Integers,  # [g], ns from there on
    activity: HostActivity,
) -> Cover:
    """Move what AFTER_SYNCS explain from the amounts of "host" to theirs, and return when still the host was late."""
    host = lateness.host
    for cause in AFTER_SYNCS:
        cover = activity.covers[cause]
        amounts[cause] = intersection(host, cover).within(start, start + late)
        amounts["host"] = amounts["host"] - amounts[cause]
        host = difference(host, cover)
    return host


def _explain_queue(
    queued: Integers,
    known: Flags,
    awaits: Flags,
) -> dict[str, Integers]:
    """Explain the ns for which the work that ends each gap was queued.

    Args:
        queued: [g], ns from the launch of the work to its start.
        known: [g], the launch call of the work is in the trace.
        awaits: [g], the stream was told to wait for an event before the work.
    """
    quick = known & (queued < LAUNCH_LATENCY_NS)
    depends = known & ~quick & awaits
    return {
        "launch": np.where(quick, queued, 0),
        "dependency": np.where(depends, queued, 0),
        "unexplained": np.where(quick | depends, 0, queued),
    }


def measure_short_gaps(gaps: Gaps, steps: int) -> ShortGaps:
    """Measure what nothing but the host, latency and the queue explains in gaps below MIN_STRETCH_MS, per step."""
    is_short = gaps.end - gaps.start < MIN_STRETCH_MS * 1e6
    is_graph = gaps.graph[is_short]
    is_launched = gaps.thread[is_short] >= 0
    host = gaps.amounts["host"][is_short]
    latency = gaps.amounts["launch"][is_short]
    unexplained = gaps.amounts["unexplained"][is_short]
    number = np.count_nonzero(host + latency + unexplained)

    def mean_ms(amounts: Integers) -> float:
        return float(amounts.sum()) / 1e6 / steps

    return ShortGaps(
        number=float(number) / steps,
        host_ms=mean_ms(host),
        launch_ms=mean_ms(latency[~is_graph]),
        graph_ms=mean_ms((latency + unexplained)[is_graph]),
        queued_ms=mean_ms(unexplained[is_launched & ~is_graph]),
    )


def _find_waits(
    trace: Trace,
    waits: Integers,
    start: Integers,
    end: Integers,
) -> tuple[Integers, Integers]:
    """Find how long the host had waited for the device in some stretches of time.

    Args:
        trace: the trace.
        waits: rows of the calls in which the host waits, by start.
        start: [g], of the stretches.
        end: [g], ns.

    Returns:
        [g], the row of the last wait that touches [start, end), -1 for none; [g], ns from the beginning of the first
        such wait on.
    """
    events = trace.events
    waits = waits[trace.lengths_ns(waits) > 0]
    if not len(waits):
        return np.full(len(start), -1, np.int64), np.zeros(len(start), np.int64)
    reach = np.maximum.accumulate(events.end_ns[waits])
    last = np.searchsorted(events.start_ns[waits], end, side="left") - 1
    touches = (last >= 0) & (reach[last] > start)
    last_wait = np.where(touches, waits[last], -1)
    # a wait that began before the stretch counts from its own beginning
    cover = trace.cover(waits)
    before = np.searchsorted(cover.start, start, side="right")
    around = cover.start[np.maximum(before - 1, 0)]
    begun = np.where(cover.holds(start), around, start)
    return last_wait, cover.within(begun, end)


def _find_event_waits(
    trace: Trace,
    rows: Integers,  # [k], a device's work, by start
    at: Integers,  # [g], place in `rows` of the work that ends each gap; k for none
    launch: Integers,  # [g], row of the call that launched it; -1: unknown
) -> Flags:
    """Tell for each gap (bool [g]) whether a stream was told to wait since the launch of the work before it."""
    events = trace.events
    waits = trace.find_named(lambda name: "StreamWaitEvent" in name, Kind.RUNTIME)
    if not len(waits) or not len(at):
        return np.zeros(len(at), bool)
    moments = np.sort(events.start_ns[waits])
    before_ns = _find_launch_before(trace, rows)[np.minimum(at, len(rows) - 1)]
    launch_ns = events.start_ns[np.maximum(launch, 0)]
    is_told = np.searchsorted(moments, launch_ns) > np.searchsorted(moments, before_ns)
    return is_told & (at < len(rows))


def _find_launch_before(trace: Trace, rows: Integers) -> Integers:
    """Find when the work before each of `rows` on its stream was launched: int64 [k]; 0: nothing was."""
    launch = trace.launch_of[rows]
    launched_ns = np.where(launch >= 0, trace.events.start_ns[launch], 0)
    stream = trace.events.stream[rows]
    # by stream, and on each in the order of `rows`
    order = np.argsort(stream, kind="stable")
    is_same_stream = np.diff(stream[order]) == 0
    launched_ns = launched_ns[order]
    before_ns = np.zeros(len(rows), np.int64)
    before_ns[order[1:]] = np.where(is_same_stream, launched_ns[:-1], 0)
    return before_ns
