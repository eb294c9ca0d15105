"""A model of CUDA's caching allocator: where it would put tensors, and how much memory it would reserve for them.

Sizes are rounded up to 512 bytes. Blocks up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB,
larger ones get a segment of their own, in steps of 2 MiB. The smallest free block that fits is taken and split; a freed
block joins its free neighbors. Streams share nothing.
With expandable segments there is one segment for each pool and stream, which grows by pages of 2 MiB (small blocks) or
20 MiB; its last free block is taken last, and every rest is split off.
(c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge,
should_split, get_free_block, try_allocate_expandable_block)
"""

import bisect
from dataclasses import dataclass, field

from megatron_lite.formats.memory_snapshot import Frame

MIN_BLOCK_BYTES = 512
MIB = 2**20
LARGEST_SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_STEP = 2 * MIB, 20 * MIB, 2 * MIB
MIN_OWN_SEGMENT = 10 * MIB
FIRST_ADDRESS = 0x7F0000000000
ARENA_DISTANCE = 2**42  # between expandable segments: more than any of them grows to


@dataclass(eq=False)
class Allocation:
    """Memory of one tensor storage. frames: the Python stack, innermost first, a list that equal stacks share."""

    size: int
    tag: str
    frames: list[Frame]
    stream: int = 0


@dataclass
class Segment:
    """Blocks side by side without gaps: addresses, sizes and who is in them, None for free ones."""

    address: int
    size: int
    pool: str  # small | large
    frames: list[Frame]
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    holders: list[Allocation | None] = field(default_factory=list)

    def copy(self) -> "Segment":
        return Segment(self.address, self.size, self.pool, self.frames, self.starts[:], self.sizes[:], self.holders[:])


def rounded(size: int) -> int:
    """Bytes of the block that an allocation of `size` bytes takes."""
    return max(MIN_BLOCK_BYTES, -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


class SegmentMap:
    """The segments of memory, and which allocation lies where."""

    def __init__(self, expandable: bool = False):
        self.segments: list[Segment] = []
        self.address_of: dict[Allocation, int] = {}
        self.reserved = 0  # bytes of all segments
        self._expandable = expandable
        # of a pool and stream: (size, address, number of the segment), sorted
        self._free: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        self._arena: dict[tuple[str, int], int] = {}  # number of its segment, if expandable
        self._number_of: dict[Allocation, int] = {}
        self._next = FIRST_ADDRESS

    def copy(self) -> "SegmentMap":
        """A copy that shares the allocations."""
        other = SegmentMap(self._expandable)
        other.segments = [segment.copy() for segment in self.segments]
        other.address_of, other._number_of = dict(self.address_of), dict(self._number_of)
        other._free = {key: blocks[:] for key, blocks in self._free.items()}
        other._arena, other.reserved = dict(self._arena), self.reserved
        other._next = self._next
        return other

    def place(self, allocation: Allocation) -> Segment | None:
        """Place an allocation; returns the segment if a new one had to be made for it."""
        size = rounded(allocation.size)
        pool = "small" if size <= LARGEST_SMALL else "large"
        free = self._free.setdefault((pool, allocation.stream), [])
        at, new = bisect.bisect_left(free, (size,)), None
        if self._expandable and at < len(free) - 1:  # a block that ends its growing segment is as large as need be
            growing = self.segments[self._arena[pool, allocation.stream]]
            at += free[at][1] == growing.starts[-1]
        if at == len(free):
            new = self._room(size, pool, allocation)
            at = bisect.bisect_left(free, (size,))
        found, address, number = free.pop(at)
        segment = self.segments[number]
        index = bisect.bisect_left(segment.starts, address)
        rest = found - size
        if rest >= (MIN_BLOCK_BYTES if pool == "small" or self._expandable else LARGEST_SMALL + 1):
            segment.sizes[index] = size
            segment.starts.insert(index + 1, address + size)
            segment.sizes.insert(index + 1, rest)
            segment.holders.insert(index + 1, None)
            bisect.insort(free, (rest, address + size, number))
        segment.holders[index] = allocation
        self.address_of[allocation], self._number_of[allocation] = address, number
        return new

    def release(self, allocation: Allocation) -> int:
        """Free an allocation's block; returns its address."""
        address, number = self.address_of.pop(allocation), self._number_of.pop(allocation)
        segment = self.segments[number]
        free = self._free[segment.pool, allocation.stream]
        index = bisect.bisect_left(segment.starts, address)
        segment.holders[index] = None
        for left in (index, index - 1):  # join the block to its right, then the one to its left
            if 0 <= left < len(segment.starts) - 1 and segment.holders[left] is segment.holders[left + 1] is None:
                for part in (left, left + 1):
                    self._forget(free, segment, part, number)
                segment.sizes[left] += segment.sizes.pop(left + 1)
                del segment.starts[left + 1], segment.holders[left + 1]
                index = left
        bisect.insort(free, (segment.sizes[index], segment.starts[index], number))
        return address

    def give_back(self) -> None:
        """Return what is free to the device, as torch.cuda.empty_cache does: whole segments, or the last pages of
        growing ones (CUDA's allocator returns pages in the middle too)."""
        for (pool, _), free in self._free.items():
            for entry in free[:]:
                size, address, number = entry
                segment, amount = self.segments[number], 0
                if size == segment.size:
                    amount = size
                elif self._expandable and address == segment.starts[-1]:
                    amount = size // _get_page_bytes(pool) * _get_page_bytes(pool)
                if not amount:
                    continue
                free.remove(entry)
                self.reserved -= amount
                segment.size -= amount
                segment.sizes[-1] -= amount
                if amount < size:
                    bisect.insort(free, (size - amount, address, number))
                else:
                    del segment.starts[-1], segment.sizes[-1], segment.holders[-1]

    @staticmethod
    def _forget(free: list[tuple[int, int, int]], segment: Segment, index: int, number: int) -> None:
        entry = (segment.sizes[index], segment.starts[index], number)
        at = bisect.bisect_left(free, entry)
        if at < len(free) and free[at] == entry:
            del free[at]

    def _room(self, size: int, pool: str, allocation: Allocation) -> Segment | None:
        """Make a free block of at least `size` bytes; returns the new segment."""
        number = self._arena.get((pool, allocation.stream))
        if number is None or not self.segments[number].starts:
            return self._reserve(size, pool, allocation)
        self._extend(number, size, pool, allocation)
        return None

    def _reserve(self, size: int, pool: str, allocation: Allocation) -> Segment:
        """A new segment of whole pages, all of it free."""
        page = _get_page_bytes(pool)
        total = -(-size // page) * page
        if self._expandable:
            self._arena[pool, allocation.stream] = len(self.segments)
        elif size >= MIN_OWN_SEGMENT:
            total = -(-size // LARGE_STEP) * LARGE_STEP
        segment = Segment(self._next, total, pool, allocation.frames, [self._next], [total], [None])
        bisect.insort(self._free[pool, allocation.stream], (total, self._next, len(self.segments)))
        self.segments.append(segment)
        self.reserved += total
        # neighbors never touch
        self._next += ARENA_DISTANCE if self._expandable else total + LARGE_STEP
        return segment

    def _extend(self, number: int, size: int, pool: str, allocation: Allocation) -> None:
        """Map pages behind the last block of an expandable segment, until a free one of `size` bytes ends it."""
        free = self._free[pool, allocation.stream]
        page = _get_page_bytes(pool)
        segment = self.segments[number]
        has_tail = segment.holders[-1] is None
        missing = size - segment.sizes[-1] if has_tail else size
        more = -(-missing // page) * page
        if has_tail:
            self._forget(free, segment, len(segment.starts) - 1, number)
            segment.sizes[-1] += more
        else:
            segment.starts.append(segment.address + segment.size)
            segment.sizes.append(more)
            segment.holders.append(None)
        segment.size += more
        self.reserved += more
        bisect.insort(free, (segment.sizes[-1], segment.starts[-1], number))


def _get_page_bytes(pool: str) -> int:
    return SMALL_SEGMENT if pool == "small" else LARGE_SEGMENT
