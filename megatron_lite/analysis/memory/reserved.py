"""Memory that the allocator took from the device beyond what tensors hold: in its default pool, and in private ones.

CUDA graphs and torch.cuda.MemPool have pools of their own. No request outside of them can use what is free there, so
that it is no fragmentation.
"""

import re

import numpy as np

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.memory.lifetimes import Lives
from megatron_lite.analysis.memory.memory_results import Fragmentation, PrivatePool
from megatron_lite.analysis.memory.record import LESS_RESERVED, MORE_RESERVED, OOM, SEGMENT_MAP, AllocatorEvents, Ints
from megatron_lite.caching_allocator import Allocation, SegmentMap

MAX_ERROR = 0.05  # of what was reserved: a replay of the allocator as it was must come as near, or nothing is said
# Code that captures graphs: PyTorch, inductor's trees of graphs, Megatron-LM, vLLM, SGLang, TensorRT-LLM.
CAPTURES = re.compile(
    r"cuda_?graph|graph_?captur|/(cuda|accelerator)/graphs\.py|capture_(model|graph|begin)", re.IGNORECASE
)


def measure_reserved(record: AllocatorEvents, private: bool | None = None, pool: int | None = None) -> Integers:
    """Bytes of segments before the first event, then after each: int64 [n + 1].

    Args:
        record: The record.
        private: True for all private pools, False for the default pool, None for all.
        pool: One pool only.
    """
    counted = _choose_pools(len(record.pools), private, pool)
    of_pools = np.array(record.reserved_of_pool, np.int64)
    at_end = int(of_pools[counted].sum())
    in_pools = counted[record.pool]
    change = np.zeros(len(record), np.int64)
    grows = in_pools & np.isin(record.action, MORE_RESERVED)
    change[grows] = record.size[grows]
    shrinks = in_pools & np.isin(record.action, LESS_RESERVED)
    change[shrinks] = -record.size[shrinks]
    # only the end is known: what each event and those after it changed is taken off
    from_here_on: Ints = np.cumsum(change[::-1])[::-1]
    reserved: Ints = at_end - np.append(from_here_on, 0)
    return np.maximum(reserved, 0)


def _choose_pools(
    count: int,
    private: bool | None,
    pool: int | None,
) -> Flags:
    """Choose the pools (bool [count]) that `measure_reserved` counts. The first is the default pool."""
    chosen = np.zeros(count, bool)
    if pool is not None:
        chosen[pool] = True
    elif private is None:
        chosen[:] = True
    elif private:
        chosen[1:] = True
    else:
        chosen[0] = True
    return chosen


def measure_fragmentation(record: AllocatorEvents, lives: Lives) -> tuple[Fragmentation, list[str]]:
    """Reserved against allocated in the default pool, and what expandable segments would have reserved.

    Returns:
        The figures, and notes: why the record could not be replayed.
    """
    reserved = measure_reserved(record, private=False)
    reserved_bytes = int(reserved.max())
    allocated = lives.sum_held(lives.pool == 0)
    # the moment that leaves the least unused, of those at which most is reserved
    fullest = reserved == reserved_bytes
    allocated_bytes = int(allocated[fullest].max())
    had_maps = bool(np.any(record.action == SEGMENT_MAP))
    was_expandable = record.settings.get("expandable_segments") is True or had_maps
    as_it_was = None
    expandable = None
    notes = []
    if reserved_bytes > 0:
        is_simulated = record.settings.get("simulated")
        as_it_was = reserved_bytes if is_simulated else replay_peak(record, lives, was_expandable)
        if abs(as_it_was - reserved_bytes) <= MAX_ERROR * reserved_bytes:
            expandable = replay_peak(record, lives, True)
        else:
            notes.append(
                f"a replay of the allocator reserves {as_it_was / reserved_bytes:.0%} of what was reserved: "
                "whether expandable segments would help is unknown"
            )
    found = Fragmentation(
        reserved_bytes=reserved_bytes,
        allocated_bytes=allocated_bytes,
        largest_free_block=_find_largest_free_block(record),
        expandable=was_expandable,
        replay_reserved_bytes=expandable,
        replay_as_it_was_bytes=as_it_was,
    )
    return found, notes


def _find_largest_free_block(record: AllocatorEvents) -> int:
    """Bytes of the largest free block of the default pool at the end of the record; 0 without one."""
    blocks = record.blocks
    free = ~blocks["live"] & (blocks["pool"] == 0)
    return int(blocks["size"][free].max(initial=0))


def measure_private_pools(record: AllocatorEvents, lives: Lives) -> tuple[PrivatePool, ...]:
    """Private pools that hold memory when a request failed, or else at the end of the record; largest first."""
    failed = np.flatnonzero(record.action == OOM)
    moment = len(record)  # index into curves, whose first value is before the first event
    if len(failed):
        moment = int(failed[-1]) + 1
    found = []
    for number in range(1, len(record.pools)):
        pool = _describe_pool(record, lives, number, moment)
        if pool.reserved_bytes:
            found.append(pool)
    return tuple(sorted(found, key=lambda pool: -pool.reserved_bytes))


def _describe_pool(
    record: AllocatorEvents,
    lives: Lives,  # all, of other pools too
    number: int,  # index into the record's pools
    moment: int,  # index into curves
) -> PrivatePool:
    """A private pool, with what owns it as far as its id and stacks tell."""
    reserved = measure_reserved(record, pool=number)
    in_pool = lives.pool == number
    allocated = lives.sum_held(in_pool)
    # all of its memory counts, also what was given back before
    stacks = lives.stack[in_pool]
    bytes_of_stack = np.bincount(stacks, lives.num_bytes[in_pool], minlength=1)
    # ids are (capture, 0) where a graph made the pool for itself, (0, n) where a handle or a MemPool was made
    identity = record.pools[number]
    made_by_graph = identity[0] > 0
    return PrivatePool(
        pool=str(identity),
        of_graphs=made_by_graph or _have_capture(record, np.unique(stacks)),
        reserved_bytes=int(reserved[moment]),
        allocated_bytes=int(allocated[moment]),
        site=record.stacks.site(int(np.argmax(bytes_of_stack))),
    )


def _have_capture(record: AllocatorEvents, stacks: Ints) -> bool:
    """Whether code that captures graphs is in one of these stacks."""
    for stack in stacks.tolist():
        for file, _, name in record.stacks.frames_of[stack]:
            if CAPTURES.search(f"{file} {name}"):
                return True
    return False


def replay_peak(record: AllocatorEvents, lives: Lives, expandable: bool) -> int:
    """Replay the record's events of the default pool in an empty allocator, which first takes what was there before.

    Args:
        record: The record.
        lives: Pieces of the pool's memory.
        expandable: Whether the allocator has expandable segments.

    Returns:
        The most bytes that it reserves.
    """
    layout = SegmentMap(expandable)
    # what awaits its free is the second part of a piece that is placed already
    goes_on = lives.awaiting & (lives.begin >= 0)
    rows = np.flatnonzero((lives.pool == 0) & ~goes_on)
    begin = lives.begin[rows]
    pieces = []
    for num_bytes, stream in zip(lives.requested[rows].tolist(), lives.stream[rows].tolist()):
        pieces.append(Allocation(num_bytes, "", [], stream))
    old = np.flatnonzero(begin < 0)
    address = lives.address[rows[old]]
    for number in old[np.argsort(address, kind="stable")].tolist():
        layout.place(pieces[number])
    peak = layout.reserved
    actions, numbers = _order_actions(record, begin, lives.returned[rows])
    for action, number in zip(actions, numbers):
        if action == "allocate":
            layout.place(pieces[number])
            peak = max(peak, layout.reserved)
        elif action == "free":
            layout.release(pieces[number])
        else:
            layout.give_back()
    return peak


def _order_actions(
    record: AllocatorEvents,  # of n events
    begin: Ints,  # [m], event that allocates a piece; -1: before the record
    end: Ints,  # [m], event after which it serves others; n: after the record
) -> tuple[list[str], list[int]]:
    """Order what an allocator has to do for m pieces of memory as the record does.

    Returns:
        Actions: "allocate", "free" or "give back" (segments to the device); and for each the number of its piece, which
        says nothing where segments are given back.
    """
    allocated = np.flatnonzero(begin >= 0)
    freed = np.flatnonzero(end < len(record))
    shrinks = np.isin(record.action, LESS_RESERVED) & (record.pool == 0)
    # once for each run of them
    starts_run = shrinks.copy()
    starts_run[1:] &= ~shrinks[:-1]
    given_back = np.flatnonzero(starts_run)
    counts = [len(allocated), len(freed), len(given_back)]
    actions = np.repeat(["allocate", "free", "give back"], counts)
    numbers = np.concatenate([allocated, freed, given_back])
    events = np.concatenate([begin[allocated], end[freed], given_back])
    order = np.argsort(events, kind="stable")
    return actions[order].tolist(), numbers[order].tolist()
