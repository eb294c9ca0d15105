"""What the allocator took from the device beyond what tensors hold: in its default pool, and in private ones.

CUDA graphs and torch.cuda.MemPool have pools of their own. No request outside of them can use what is free there, so
that it is no fragmentation.
"""

import re

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.memory.categories import Lives
from megatron_lite.analysis.memory.memory_results import Fragmentation, PrivatePool
from megatron_lite.analysis.memory.record import LESS_RESERVED, MORE_RESERVED, OOM, SEGMENT_MAP, AllocatorEvents
from megatron_lite.formats.caching_allocator import Allocation, SegmentMap

MAX_ERROR = 0.05  # of what was reserved: a replay of the allocator as it was must come as near, or nothing is said
# Code that captures graphs: PyTorch, inductor's trees of graphs, Megatron-LM, vLLM, SGLang, TensorRT-LLM.
CAPTURES = re.compile(
    r"cuda_?graph|graph_?captur|/(cuda|accelerator)/graphs\.py|capture_(model|graph|begin)", re.IGNORECASE
)


def measure_reserved(record: AllocatorEvents, private: bool | None = None, pool: int | None = None) -> Integers:
    """int64 [n + 1]: bytes of segments before the first event, then after each; backwards from those at the end.

    Args:
        record: The record.
        private: True for all private pools, False for the default pool, None for all.
        pool: One pool only.
    """
    numbers = np.arange(len(record.pools))
    if pool is not None:
        counted = numbers == pool
    elif private is not None:
        counted = (numbers > 0) == private
    else:
        counted = np.ones(len(numbers), bool)
    at_end = sum(num_bytes for num_bytes, counts in zip(record.reserved_of_pool, counted.tolist()) if counts)
    mine = counted[record.pool]
    grows = np.where(mine & np.isin(record.action, MORE_RESERVED), record.size, 0)
    change = grows - np.where(mine & np.isin(record.action, LESS_RESERVED), record.size, 0)
    later: NDArray[np.int64] = np.append(np.cumsum(change[::-1])[::-1], 0)
    return np.maximum(at_end - later, 0)


def measure_fragmentation(record: AllocatorEvents, lives: Lives) -> tuple[Fragmentation, list[str]]:
    """Reserved against allocated in the default pool; what expandable segments would have reserved, or a note on why
    the record could not be replayed."""
    ordinary = lives.pool == 0
    reserved = measure_reserved(record, private=False)
    allocated = lives.sum_held(len(record), np.where(ordinary, lives.num_bytes, 0))
    fullest = np.flatnonzero(reserved == reserved.max())
    at = int(fullest[np.argmax(allocated[fullest])])
    as_it_was, expandable, notes, most = None, None, [], int(reserved[at])
    had_maps = bool(np.any(record.action == SEGMENT_MAP))
    was_expandable = record.settings.get("expandable_segments") is True or had_maps
    if most > 0:
        is_simulated = record.settings.get("simulated")
        as_it_was = most if is_simulated else replay_peak(record, lives, was_expandable)
        if abs(as_it_was - most) <= MAX_ERROR * most:
            expandable = replay_peak(record, lives, True)
        else:
            notes.append(
                f"a replay of the allocator reserves {as_it_was / most:.0%} of what was reserved: "
                "whether expandable segments "
                "would help is unknown"
            )
    free = record.blocks["size"][~record.blocks["live"] & (record.blocks["pool"] == 0)]
    largest = int(free.max(initial=0))
    return Fragmentation(most, int(allocated[at]), largest, was_expandable, expandable, as_it_was), notes


def measure_private_pools(record: AllocatorEvents, lives: Lives) -> tuple[PrivatePool, ...]:
    """Those that hold memory when a request failed, or else at the end of the record; largest first."""
    found, failed = [], np.flatnonzero(record.action == OOM)
    moment = int(failed[-1]) + 1 if len(failed) else len(record)
    for number, identity in enumerate(record.pools[1:], 1):
        reserved, mine = measure_reserved(record, pool=number), lives.pool == number
        if not reserved[moment]:
            continue
        allocated = lives.sum_held(len(record), np.where(mine, lives.num_bytes, 0))
        stacks = np.unique(lives.stack[mine], return_inverse=True)
        sums = np.bincount(stacks[1].ravel(), lives.num_bytes[mine], len(stacks[0]))
        largest = int(stacks[0][np.argmax(sums)]) if len(sums) else 0
        frames = [frame for stack in stacks[0].tolist() for frame in record.stacks.frames_of[stack]]
        # ids are (capture, 0) where a graph made the pool for itself, (0, n) where a handle or a MemPool was made
        of_graphs = identity[0] > 0 or any(CAPTURES.search(f"{file} {name}") for file, _, name in frames)
        site = record.stacks.site(largest)
        found.append(PrivatePool(str(identity), of_graphs, int(reserved[moment]), int(allocated[moment]), site))
    return tuple(sorted(found, key=lambda one: -one.reserved_bytes))


def replay_peak(record: AllocatorEvents, lives: Lives, expandable: bool) -> int:
    """Most bytes reserved when an empty allocator first takes what was there, then sees the record's events in its
    default pool."""
    n, layout = len(record), SegmentMap(expandable)
    mine = np.flatnonzero((lives.pool == 0) & ~(lives.awaiting & (lives.begin >= 0)))
    begin, end = lives.begin[mine], lives.returned[mine]
    columns = zip(lives.requested[mine].tolist(), lives.stream[mine].tolist())
    pieces = [Allocation(size, "", [], stream) for size, stream in columns]
    old = np.flatnonzero(begin < 0)
    for row in old[np.argsort(lives.address[mine][old], kind="stable")].tolist():
        layout.place(pieces[row])
    peak = layout.reserved
    begins, ends = np.flatnonzero(begin >= 0), np.flatnonzero(end < n)
    given = np.flatnonzero(np.isin(record.action, LESS_RESERVED) & (record.pool == 0))
    given = given[np.diff(given, prepend=-9) > 1]  # once for each run of them
    order = np.argsort(np.concatenate([begin[begins], end[ends], given]), kind="stable")
    what = np.repeat(["allocate", "free", "give back"], [len(begins), len(ends), len(given)])[order]
    row = np.concatenate([begins, ends, given])[order]
    for action, number in zip(what.tolist(), row.tolist()):
        if action == "allocate":
            layout.place(pieces[number])
            peak = max(peak, layout.reserved)
        elif action == "free":
            layout.release(pieces[number])
        else:
            layout.give_back()
    return peak
