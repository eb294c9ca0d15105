"""What keeps the host from launching: loader, synchronisations, allocator, garbage collector, saving. As unions."""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.intervals import Cover, joined, union
from megatron_lite.analysis.time.find_phases import is_backward
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Kind, Trace
from megatron_lite.phases import Phase

WAITS = re.compile(
    r"(cuda|hip|cu|mt|xpu)(Stream|Device|Event|Ctx|Thread)Synchronize|(cuda|hip)Memcpy(2D|3D|ToSymbol|FromSymbol|WithStream)?(_v\d+)?(_ptds)?$"
    r"|cuMemcpy(HtoD|DtoH)(_v2)?$|urEventWait|zeEventHostSynchronize"
)
ALLOCATES = re.compile(
    r"(cuda|hip)(Malloc|Free|Host(Alloc|Register|Unregister|Malloc|Free)|ExtMalloc)"
    r"|(cu|hip)Mem(Alloc|Free|Create|Map|Unmap|Release|SetAccess|Address|HostAlloc|HostRegister|FreeHost)"
)
COLLECTS_GARBAGE = re.compile(
    r"Python GC|.*\bgc\b.*\bcollect\b|<built-in function collect>|.*garbage.?collect", re.IGNORECASE
)
LOADER_FRAME = re.compile(r".*torch/utils/data/dataloader\.py\(\d+\): __next__")
MANY_LAUNCHES = 0.2  # of the device work: a thread that launches so much drives the GPU


@dataclass(frozen=True)
class HostActivity:
    """Of the threads that drive the GPU: the main one, autograd's, and others with many launches."""

    threads: np.ndarray  # int64, indices into Trace.threads
    waits: np.ndarray  # rows of calls in which the host waits for the device, ordered by start
    data: Cover
    save: Cover  # saving and evaluating
    allocator: Cover
    garbage: Cover

    @cached_property
    def named(self) -> Cover:
        """What has a name of its own besides waiting for the device."""
        return joined(self.data, self.save, self.allocator, self.garbage)


def host_activity(trace: Trace, placing: Placing) -> HostActivity:
    events, threads = trace.events, driving_threads(trace, placing)
    on_threads = np.isin(events.thread, threads) & (events.device < 0)

    def rows(pattern: re.Pattern, *kinds: Kind) -> np.ndarray:
        return np.flatnonzero(trace.matching(pattern.match) & on_threads & np.isin(events.kind, kinds))

    def cover(rows: np.ndarray) -> Cover:
        return union(events.start_ns[rows], events.end_ns[rows])

    frames = (Kind.PYTHON, Kind.ANNOTATION, Kind.OP, Kind.OTHER)
    unpinned = pageable_copies(trace)
    waits = np.union1d(rows(WAITS, Kind.RUNTIME), unpinned[on_threads[unpinned]])
    return HostActivity(
        threads,
        waits,
        data=joined(phase_cover(trace, placing, Phase.DATA), cover(rows(LOADER_FRAME, Kind.PYTHON))),
        save=joined(phase_cover(trace, placing, Phase.SAVE), phase_cover(trace, placing, Phase.EVAL)),
        allocator=cover(rows(ALLOCATES, Kind.RUNTIME)),
        # Python stands still on all threads, whichever collects
        garbage=cover(np.flatnonzero(trace.matching(COLLECTS_GARBAGE.match) & np.isin(events.kind, frames))),
    )


def driving_threads(trace: Trace, placing: Placing) -> np.ndarray:
    """int64, indices into Trace.threads: the main thread, autograd's, and whoever launches much of the device work."""
    events = trace.events
    launches = trace.launch_of[trace.device_rows]
    counts = np.bincount(events.thread[launches[launches >= 0]], minlength=1)
    busy = np.flatnonzero(counts > MANY_LAUNCHES * counts.sum())
    return np.union1d(np.union1d(busy, [max(placing.main_thread, 0)]), np.unique(events.thread[is_backward(trace)]))


def phase_cover(trace: Trace, placing: Placing, phase: str) -> Cover:
    """When the main thread is in that phase, by its ranges."""
    if str(phase) not in placing.phases:
        return union((), ())
    events = trace.events
    mine = (placing.phase == placing.phases.index(str(phase))) & (events.thread == placing.main_thread)
    rows = np.flatnonzero(mine & (events.kind == Kind.ANNOTATION))
    return union(events.start_ns[rows], events.end_ns[rows])


def pageable_copies(trace: Trace) -> np.ndarray:
    """Rows of the copy calls that return only when the device has begun or finished: their memory is not pinned."""
    events, copies = trace.events, trace.rows[Kind.MEMCPY]
    copies = copies[trace.matching(lambda name: "ageable" in name)[copies] & (trace.launch_of[copies] >= 0)]
    calls = trace.launch_of[copies]
    return np.unique(calls[events.end_ns[calls] >= events.start_ns[copies]])
