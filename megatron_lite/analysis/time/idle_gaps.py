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
        return joined(self.compute, self.communication, self.copy)


def device_covers(trace: Trace, rows: Integers) -> DeviceCovers:
    """Of these rows of device work."""
    kernel, talks = trace.events.kind[rows] == Kind.KERNEL, find_communication_names(trace)[trace.events.name[rows]]
    return DeviceCovers(*(trace.cover(rows[one]) for one in (kernel & ~talks, kernel & talks, ~kernel)))


def find_communication_names(trace: Trace) -> Flags:
    """bool per name of the trace: of a kernel or a host span that communicates?"""
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
    """Of the threads that drive the GPU: the main one, autograd's, and others with many launches."""

    threads: NDArray[np.int64]  # indices into Trace.threads
    waits: Integers  # rows of calls in which the host waits for the device, ordered by start
    works: tuple[HostWork, ...]  # what names tell
    covers: dict[str, Cover]  # keys of ROW_TITLES -> when; what belongs to two counts for the first


def find_host_activity(trace: Trace, placing: Placing) -> HostActivity:
    events, launches = trace.events, trace.launch_of[trace.device_rows]
    counts = np.bincount(events.thread[launches[launches >= 0]], minlength=1)
    busy = np.flatnonzero(counts > MANY_LAUNCHES * counts.sum())
    threads = np.unique([*busy, max(placing.main_thread, 0), *np.unique(events.thread[is_backward(trace)])])
    on_threads = np.isin(events.thread, threads) & (events.device < 0)

    def find(pattern: re.Pattern[str], kind: Kind) -> Integers:
        return np.flatnonzero(trace.matching(pattern.match) & on_threads & (events.kind == kind))

    unpinned = find_pageable_copies(trace)
    works = find_host_work(trace, threads)
    return HostActivity(
        threads.astype(np.int64),
        np.union1d(find(WAITS, Kind.RUNTIME), unpinned[on_threads[unpinned]]),
        works,
        cover_causes(trace, placing, threads, works),
    )


def find_pageable_copies(trace: Trace) -> Integers:
    """Rows of the copy calls that return only when the device has begun or finished: their memory is not pinned."""
    events, copies = trace.events, trace.rows[Kind.MEMCPY]
    copies = copies[trace.matching(lambda name: "ageable" in name)[copies] & (trace.launch_of[copies] >= 0)]
    calls = trace.launch_of[copies]
    return np.unique(calls[events.end_ns[calls] >= events.start_ns[copies]])


# --- the gaps

LAUNCH_LATENCY_NS = 10_000


@dataclass(frozen=True)
class Gaps:
    """g gaps in order, and what each is made of in ns: [g] each; the amounts add up to its length."""

    start: Integers
    end: Integers
    graph: Flags  # of a graph is the work that ends it
    thread: Integers  # that launched the work that ends it; -1: unknown
    late: Integers  # h - start: how long the host was late
    waited: Integers  # row of the last call in which the host waited for the device meanwhile; -1: none
    amounts: dict[str, Integers]  # keys of ROW_TITLES
    host: Cover  # when the host itself was the cause


def find_idle_gaps(trace: Trace, rows: Integers, busy: Cover, steady: Cover, activity: HostActivity) -> Gaps:
    """The gaps of `busy` inside the steady steps. `rows`: the device work that `busy` is made of, by start."""
    events = trace.events
    idle = intersection(steady, complement(busy, int(steady.start[0]), int(steady.end[-1])))
    start = idle.start
    end = idle.end
    at = np.searchsorted(events.start_ns[rows], end, side="left")
    # the row of the work that ends the gap; -1: nothing does
    ended_by = np.append(rows, -1)[at]
    launch = np.where(ended_by >= 0, trace.launch_of[ended_by], -1)
    known = launch >= 0
    late = np.where(known, np.clip(events.end_ns[launch], start, end) - start, 0)
    lateness = _explain_lateness(trace, start, late, activity)
    awaits = _find_event_waits(trace, rows, at, launch)
    amounts = lateness.amounts | _explain_queue(end - start - late, known, awaits)
    host = lateness.host
    for cause in AFTER_SYNCS:
        cover = activity.covers[cause]
        amounts[cause] = intersection(host, cover).within(start, start + late)
        amounts["host"] = amounts["host"] - amounts[cause]
        host = difference(host, cover)
    launches_graph = trace.passing(lambda name: "GraphLaunch" in name, Kind.RUNTIME)
    return Gaps(
        start=start,
        end=end,
        graph=known & launches_graph[events.name[launch]],
        thread=np.where(known, events.thread[launch], -1),
        late=late,
        waited=np.where(amounts["sync"] > 0, lateness.waited, -1),
        amounts=amounts,
        host=host,
    )


@dataclass(frozen=True)
class _Lateness:
    """Why the host was late, for g gaps: what names tell first, then synchronizations, then the host itself."""

    amounts: dict[str, Integers]  # CAUSES, "sync" and "host" -> ns [g]; they add up to the lateness of each gap
    waited: Integers  # [g], row of the last call in which the host waited for the device meanwhile; -1: none
    host: Cover  # when the host itself was the cause


def _explain_lateness(trace: Trace, start: Integers, late: Integers, activity: HostActivity) -> _Lateness:
    """Explain the first `late` ns of the gaps that begin at `start`."""
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
        begin = host.time_at(host.covered_until(start) + amounts["sync"])
        host = intersection(host, union(np.maximum(begin, start), until))
    return _Lateness(amounts, waited, host)


def _explain_queue(queued: Integers, known: Flags, awaits: Flags) -> dict[str, Integers]:
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
    """What nothing but the host, latency and the queue explains in gaps below MIN_STRETCH_MS."""
    short = gaps.end - gaps.start < MIN_STRETCH_MS * 1e6
    host = gaps.amounts["host"] * short
    latency = gaps.amounts["launch"] * short
    unexplained = gaps.amounts["unexplained"] * short

    def per_step(amounts: Integers) -> float:
        return float(amounts.sum()) / 1e6 / steps

    return ShortGaps(
        number=float(np.count_nonzero(host + latency + unexplained)) / steps,
        host_ms=per_step(host),
        launch_ms=per_step(latency[~gaps.graph]),
        graph_ms=per_step((latency + unexplained)[gaps.graph]),
        queued_ms=per_step(unexplained[~gaps.graph & (gaps.thread >= 0)]),
    )


def _find_waits(trace: Trace, waits: Integers, start: Integers, end: Integers) -> tuple[Integers, Integers]:
    """(row of the last wait that touches [start, end), ns from the beginning of the first such wait on)."""
    events = trace.events
    waits = waits[events.end_ns[waits] > events.start_ns[waits]]
    if not len(waits):
        return np.full(len(start), -1, np.int64), np.zeros(len(start), np.int64)
    reach = np.maximum.accumulate(events.end_ns[waits])
    last = np.searchsorted(events.start_ns[waits], end, side="left") - 1
    touches = (last >= 0) & (reach[last] > start)
    cover = trace.cover(waits)
    at = np.maximum(np.searchsorted(cover.start, start, side="right") - 1, 0)
    begun = np.where(cover.holds(start), cover.start[at], start)
    return np.where(touches, waits[last], -1), cover.within(begun, end)


def _find_event_waits(trace: Trace, rows: Integers, at: Integers, launch: Integers) -> Flags:
    """bool per gap: was the stream of the work rows[at] told to wait for an event, after the work before it on this
    stream was launched?"""
    events, calls = trace.events, trace.rows[Kind.RUNTIME]
    waits = calls[trace.matching(lambda name: "StreamWaitEvent" in name)[calls]]
    if not len(waits) or not len(at):
        return np.zeros(len(at), bool)
    launched = np.where(trace.launch_of[rows] >= 0, events.start_ns[trace.launch_of[rows]], 0)
    order = np.lexsort((np.arange(len(rows)), events.stream[rows]))
    same = np.concatenate(([False], np.diff(events.stream[rows][order]) == 0))
    before = np.empty(len(rows), np.int64)  # when the work before was launched; 0: nothing was
    before[order] = np.where(same, np.roll(launched[order], 1), 0)
    moments = np.sort(events.start_ns[waits])
    asked = np.searchsorted(moments, events.start_ns[np.maximum(launch, 0)])
    there = at < len(rows)
    return there & (asked > np.searchsorted(moments, before[np.minimum(at, len(rows) - 1)]))
