"""When each piece of memory was handed out and given back."""

from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.memory.record import ALLOC, FREE, FREE_REQUESTED, Record

SMALLEST_BLOCK = (
    512  # bytes; CUDA's caching allocator rounds up to multiples (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
)


@dataclass(frozen=True)
class Lives:
    """m allocations, in order of `begin`. A life's memory is held after event e where begin <= e < end."""

    begin: np.ndarray  # int64 [m], event of the allocation; -1: before the record
    end: np.ndarray  # int64 [m], event of the free; n: alive at the end of the record
    requested: np.ndarray  # int64 [m], bytes asked for
    num_bytes: np.ndarray  # int64 [m], as the allocator rounds them
    address: np.ndarray  # int64 [m]
    stack: np.ndarray  # int32 [m], of the allocation, index into Record.stacks; 0: unknown or empty
    tag: np.ndarray  # int32 [m], the same for Record.tags
    stream: np.ndarray  # int64 [m]

    def __len__(self) -> int:
        return len(self.begin)

    def held_after(self, event: int) -> np.ndarray:
        """Rows of what is held after that event."""
        return np.flatnonzero((self.begin <= event) & (self.end > event))


def lives_of(record: Record) -> Lives:
    """Allocations are joined with the next free of the same address. What has no allocation was there before; what has
    no free is there at the end, and where the blocks at the end know nothing of it, it stays all the same."""
    n, blocks = len(record), record.blocks
    freeing = FREE if np.any(record.action == FREE) else FREE_REQUESTED
    rows = np.flatnonzero((record.action == ALLOC) | (record.action == freeing))
    rows = rows[np.argsort(record.address[rows], kind="stable")]
    address, is_alloc = record.address[rows], record.action[rows] == ALLOC
    same = np.empty(len(rows), bool)
    same[-1:], same[:-1] = False, address[1:] == address[:-1]
    closed = is_alloc & same & ~np.append(is_alloc[1:], True)  # followed by its own free
    begins, ends = rows[is_alloc], np.full(len(rows), n)
    ends[closed] = rows[1:][closed[:-1]]
    ends = ends[is_alloc]
    paired = np.zeros(len(rows), bool)
    paired[1:] = closed[:-1]
    stray = rows[~is_alloc & ~paired]  # frees of what was there before
    live = np.flatnonzero(blocks.live)
    held = np.isin(blocks.address[live], record.address[begins[ends == n]])
    old = live[~held]
    requested = np.concatenate([record.size[begins], record.size[stray], blocks.requested[old]])
    begin = np.concatenate([begins, np.full(len(stray) + len(old), -1)])
    nothing = np.zeros(len(stray), np.int64)
    columns = {
        "begin": begin,
        "end": np.concatenate([ends, stray, np.full(len(old), n)]),
        "requested": requested,
        "num_bytes": np.maximum(-(-requested // SMALLEST_BLOCK), 1) * SMALLEST_BLOCK,
        "address": np.concatenate([record.address[begins], record.address[stray], blocks.address[old]]),
        "stack": np.concatenate([record.stack[begins], nothing, blocks.stack[old]]),
        "tag": np.concatenate([record.tag[begins], nothing, blocks.tag[old]]),
        "stream": np.concatenate([record.stream[begins], record.stream[stray], blocks.stream[old]]),
    }
    order = np.argsort(begin, kind="stable")
    return Lives(**{name: column[order] for name, column in columns.items()})


def held_bytes(lives: Lives, n: int, weights: np.ndarray | None = None) -> np.ndarray:
    """int64 [n + 1]: bytes held before the first event, then after each. weights: of each life, else its num_bytes."""
    sizes = lives.num_bytes if weights is None else weights
    change = np.zeros(n + 2, np.int64)
    np.add.at(change, lives.begin + 1, sizes)
    np.subtract.at(change, np.minimum(lives.end, n) + 1, sizes)
    return np.cumsum(change)[: n + 1]
