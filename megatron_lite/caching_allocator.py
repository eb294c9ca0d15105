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
from typing import NamedTuple

from megatron_lite.formats.memory_snapshot import Frame
from megatron_lite.units import MIB

MIN_BLOCK_BYTES = 512
LARGEST_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_STEP = 2 * MIB
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


class FreeBlock(NamedTuple):
    """A block that nobody holds; sorted, the smallest comes first, of equal ones the one at the lowest address."""

    size: int
    address: int
    number: int  # of its segment


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
        """A copy that shares the allocations."""
        return Segment(
            self.address,
            self.size,
            self.pool,
            self.frames,
            starts=self.starts[:],
            sizes=self.sizes[:],
            holders=self.holders[:],
        )

    def find_block(self, address: int) -> int:
        """Find the index of the block at an address."""
        return bisect.bisect_left(self.starts, address)

    def split(self, index: int, size: int) -> None:
        """Cut a block to a size; the rest is a free one behind it."""
        self.starts.insert(index + 1, self.starts[index] + size)
        self.sizes.insert(index + 1, self.sizes[index] - size)
        self.holders.insert(index + 1, None)
        self.sizes[index] = size

    def are_free(self, index: int) -> bool:
        """Whether a block and the one behind it exist and are both free."""
        if not 0 <= index < len(self.starts) - 1:
            return False
        return self.holders[index] is None and self.holders[index + 1] is None

    def join(self, index: int) -> None:
        """Make one block of a block and the one behind it."""
        self.sizes[index] += self.sizes.pop(index + 1)
        del self.starts[index + 1]
        del self.holders[index + 1]

    def append(self, size: int) -> None:
        """Add a free block behind the last one."""
        self.starts.append(self.address + self.size)
        self.sizes.append(size)
        self.holders.append(None)

    def drop_last(self) -> None:
        """Forget the last block."""
        del self.starts[-1]
        del self.sizes[-1]
        del self.holders[-1]


def round_up(size: int, step: int) -> int:
    """The smallest multiple of a step that is at least a size."""
    return -(-size // step) * step


def rounded(size: int) -> int:
    """Bytes of the block that an allocation of `size` bytes takes."""
    return max(MIN_BLOCK_BYTES, round_up(size, MIN_BLOCK_BYTES))


class SegmentMap:
    """The segments of memory, and which allocation lies where."""

    def __init__(self, expandable: bool = False):
        self.segments: list[Segment] = []
        self.address_of: dict[Allocation, int] = {}
        self.reserved = 0  # bytes of all segments
        self._expandable = expandable
        # of a pool and stream, sorted
        self._free: dict[tuple[str, int], list[FreeBlock]] = {}
        self._arena: dict[tuple[str, int], int] = {}  # number of its segment, if expandable
        self._number_of: dict[Allocation, int] = {}
        self._next = FIRST_ADDRESS

    def copy(self) -> "SegmentMap":
        """A copy that shares the allocations."""
        other = SegmentMap(self._expandable)
        other.segments = [segment.copy() for segment in self.segments]
        other.address_of = dict(self.address_of)
        other.reserved = self.reserved
        other._free = {key: blocks[:] for key, blocks in self._free.items()}
        other._arena = dict(self._arena)
        other._number_of = dict(self._number_of)
        other._next = self._next
        return other

    def place(self, allocation: Allocation) -> Segment | None:
        """Place an allocation; returns the segment if a new one had to be made for it."""
        size = rounded(allocation.size)
        pool = "small" if size <= LARGEST_SMALL else "large"
        free = self._free.setdefault((pool, allocation.stream), [])
        new = None
        at = self._find_free(free, size, pool, allocation.stream)
        if at == len(free):
            new = self._room(size, pool, allocation)
            at = bisect.bisect_left(free, (size,))
        block = free.pop(at)
        segment = self.segments[block.number]
        index = segment.find_block(block.address)
        if block.size - size >= self._get_min_rest(pool):
            segment.split(index, size)
            bisect.insort(free, FreeBlock(block.size - size, block.address + size, block.number))
        segment.holders[index] = allocation
        self.address_of[allocation] = block.address
        self._number_of[allocation] = block.number
        return new

    def _find_free(self, free: list[FreeBlock], size: int, pool: str, stream: int) -> int:
        """Find the place of the smallest free block of at least `size` bytes; len(free) where there is none."""
        at = bisect.bisect_left(free, (size,))
        if self._expandable and at < len(free) - 1:
            growing = self.segments[self._arena[pool, stream]]
            # a block that ends its growing segment is as large as need be
            if free[at].address == growing.starts[-1]:
                at += 1
        return at

    def _get_min_rest(self, pool: str) -> int:
        """Bytes that must be left of a block for it to be split."""
        return MIN_BLOCK_BYTES if pool == "small" or self._expandable else LARGEST_SMALL + 1

    def release(self, allocation: Allocation) -> int:
        """Free an allocation's block; returns its address."""
        address = self.address_of.pop(allocation)
        number = self._number_of.pop(allocation)
        segment = self.segments[number]
        free = self._free[segment.pool, allocation.stream]
        index = segment.find_block(address)
        segment.holders[index] = None
        for left in (index, index - 1):  # join the block to its right, then the one to its left
            if segment.are_free(left):
                self._forget(free, segment, left, number)
                self._forget(free, segment, left + 1, number)
                segment.join(left)
                index = left
        bisect.insort(free, FreeBlock(segment.sizes[index], segment.starts[index], number))
        return address

    def give_back(self) -> None:
        """Return what is free to the device, as torch.cuda.empty_cache does: whole segments, or the last pages of
        growing ones (CUDA's allocator returns pages in the middle too)."""
        for (pool, _), free in self._free.items():
            for block in free[:]:
                amount = self._count_returned(block, pool)
                if not amount:
                    continue
                free.remove(block)
                self.reserved -= amount
                segment = self.segments[block.number]
                segment.size -= amount
                segment.sizes[-1] -= amount
                if amount < block.size:
                    bisect.insort(free, block._replace(size=block.size - amount))
                else:
                    segment.drop_last()

    def _count_returned(self, block: FreeBlock, pool: str) -> int:
        """Bytes of a free block that can go back to the device."""
        segment = self.segments[block.number]
        if block.size == segment.size:
            return block.size
        if not self._expandable or block.address != segment.starts[-1]:
            return 0
        page = _get_page_bytes(pool)
        return block.size // page * page

    @staticmethod
    def _forget(free: list[FreeBlock], segment: Segment, index: int, number: int) -> None:
        entry = FreeBlock(segment.sizes[index], segment.starts[index], number)
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
        total = round_up(size, page)
        if self._expandable:
            self._arena[pool, allocation.stream] = len(self.segments)
        elif size >= MIN_OWN_SEGMENT:
            total = round_up(size, LARGE_STEP)
        segment = Segment(self._next, total, pool, allocation.frames, [self._next], [total], [None])
        free = self._free[pool, allocation.stream]
        bisect.insort(free, FreeBlock(total, self._next, len(self.segments)))
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
        more = round_up(missing, page)
        if has_tail:
            self._forget(free, segment, len(segment.starts) - 1, number)
            segment.sizes[-1] += more
        else:
            segment.append(more)
        segment.size += more
        self.reserved += more
        bisect.insort(free, FreeBlock(segment.sizes[-1], segment.starts[-1], number))


def _get_page_bytes(pool: str) -> int:
    return SMALL_SEGMENT if pool == "small" else LARGE_SEGMENT
