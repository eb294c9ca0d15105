"""An address space for memory that has none of its own: where CUDA's caching allocator would put the same tensors.

Sizes are rounded up to 512 bytes. Blocks up to 1 MiB share segments of 2 MiB, those below 10 MiB segments of 20 MiB,
larger ones get a segment of their own, in steps of 2 MiB. The smallest free block that fits is taken and split; a freed
block joins its free neighbours. Segments are never given back.
(c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge)
"""

import bisect
from dataclasses import dataclass, field

from megatron_lite.units import MIB

MIN_BLOCK = 512
LARGEST_SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT, LARGE_STEP = 2 * MIB, 20 * MIB, 2 * MIB
LEAST_OWN_SEGMENT = 10 * MIB
FIRST_ADDRESS = 0x7F0000000000


@dataclass(eq=False)
class Allocation:
    """Memory of one tensor storage. frames: the Python stack, innermost first, a list that equal stacks share."""

    size: int
    tag: str
    frames: list[dict]


@dataclass
class Segment:
    """Blocks side by side without gaps: addresses, sizes and who is in them, None for free ones."""

    address: int
    size: int
    pool: str  # small | large
    frames: list[dict]
    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    holders: list[Allocation | None] = field(default_factory=list)

    def copy(self) -> "Segment":
        return Segment(
            self.address, self.size, self.pool, self.frames, self.starts[:], self.sizes[:], self.holders[:]
        )


def rounded(size: int) -> int:
    """What a block for `size` bytes takes."""
    return max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)


class Layout:
    """Which allocation lies where."""

    def __init__(self):
        self.segments: list[Segment] = []
        self.address_of: dict[Allocation, int] = {}
        self._free = {"small": [], "large": []}  # (size, address, number of the segment), sorted
        self._number_of: dict[Allocation, int] = {}
        self._next = FIRST_ADDRESS

    def copy(self) -> "Layout":
        """Goes its own way from here; allocations stay the same objects."""
        other = Layout()
        other.segments = [segment.copy() for segment in self.segments]
        other.address_of, other._number_of = dict(self.address_of), dict(self._number_of)
        other._free = {pool: blocks[:] for pool, blocks in self._free.items()}
        other._next = self._next
        return other

    def place(self, allocation: Allocation) -> Segment | None:
        """Find room; returns the segment where one had to be made for it."""
        size = rounded(allocation.size)
        pool = "small" if size <= LARGEST_SMALL else "large"
        free = self._free[pool]
        at = bisect.bisect_left(free, (size,))
        new = self._new_segment(size, pool, allocation.frames) if at == len(free) else None
        found, address, number = free.pop(at)
        segment = self.segments[number]
        index = bisect.bisect_left(segment.starts, address)
        rest = found - size
        if rest >= (MIN_BLOCK if pool == "small" else LARGEST_SMALL + 1):
            segment.sizes[index] = size
            segment.starts.insert(index + 1, address + size)
            segment.sizes.insert(index + 1, rest)
            segment.holders.insert(index + 1, None)
            bisect.insort(free, (rest, address + size, number))
        segment.holders[index] = allocation
        self.address_of[allocation], self._number_of[allocation] = address, number
        return new

    def release(self, allocation: Allocation) -> int:
        """Free its block; returns the address it had."""
        address, number = self.address_of.pop(allocation), self._number_of.pop(allocation)
        segment, free = self.segments[number], self._free[self.segments[number].pool]
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

    @staticmethod
    def _forget(free: list, segment: Segment, index: int, number: int):
        entry = (segment.sizes[index], segment.starts[index], number)
        at = bisect.bisect_left(free, entry)
        if at < len(free) and free[at] == entry:
            del free[at]

    def _new_segment(self, size: int, pool: str, frames: list[dict]) -> Segment:
        if pool == "small":
            total = SMALL_SEGMENT
        else:
            total = LARGE_SEGMENT if size < LEAST_OWN_SEGMENT else -(-size // LARGE_STEP) * LARGE_STEP
        segment = Segment(self._next, total, pool, frames, [self._next], [total], [None])
        bisect.insort(self._free[pool], (total, self._next, len(self.segments)))
        self.segments.append(segment)
        self._next += total + LARGE_STEP  # neighbours never touch
        return segment
