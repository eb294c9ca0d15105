"""Sets of time intervals as sorted, disjoint int64 pairs, and the nesting of ranges on threads. All vectorized.

A `Cover` is a union of half-open intervals [start, end): what it holds is counted once, however many events overlap.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Integers = NDArray[np.integer[Any]]
Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]
MAX_INT16 = (1 << 15) - 1


@dataclass(frozen=True)
class Cover:
    """Disjoint intervals in order, none empty, none touching the next."""

    start: NDArray[np.int64]  # [m]
    end: NDArray[np.int64]  # [m]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def length(self) -> int:
        """How many ns are covered."""
        lengths = self.end - self.start
        return int(lengths.sum())

    @cached_property
    def _before(self) -> Integers:
        """Time that the first k intervals cover, int64 [m + 1]."""
        lengths = self.end - self.start
        return np.concatenate(([0], np.cumsum(lengths)))

    def covered_until(self, time: ArrayLike) -> Integers:
        """How many ns are covered before each time; int64, the shape of `time`."""
        time = np.asarray(time, np.int64)
        if not len(self):
            return np.zeros(time.shape, np.int64)
        begun = np.searchsorted(self.start, time, side="right")
        last = np.maximum(begun - 1, 0)
        # the last interval that has begun may end after the time
        still_to_come = np.maximum(self.end[last] - time, 0)
        beyond = np.where(begun > 0, still_to_come, 0)
        until: Integers = self._before[begun] - beyond
        return until

    def within(self, start: ArrayLike, end: ArrayLike) -> Integers:
        """How many ns are covered inside each window [start, end); 0 where end <= start."""
        before_end = self.covered_until(end)
        before_start = self.covered_until(start)
        inside: Integers = np.maximum(before_end - before_start, 0)
        return inside

    def time_at(self, covered: ArrayLike) -> Integers:
        """The moment until which so many ns are covered: `covered_until` backwards.

        The last one's end if there are fewer.
        """
        covered = np.asarray(covered, np.int64)
        before = np.searchsorted(self._before, covered, side="left")
        at = np.clip(before - 1, 0, len(self) - 1)
        left = np.maximum(covered - self._before[at], 0)
        reached = self.start[at] + left
        time: Integers = np.minimum(reached, self.end[at])
        return time

    def holds(self, time: ArrayLike) -> Flags:
        """Tell of each time whether it lies inside an interval."""
        time = np.asarray(time, np.int64)
        if not len(self):
            return np.zeros(time.shape, bool)
        begun = np.searchsorted(self.start, time, side="right")
        last = np.maximum(begun - 1, 0)
        has_not_ended = time < self.end[last]
        inside: Flags = (begun > 0) & has_not_ended
        return inside


NOTHING = Cover(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: ArrayLike, end: ArrayLike) -> Cover:
    """Unite intervals. They may overlap, stand in any order and be empty (then they count nothing)."""
    start = np.asarray(start, np.int64)
    end = np.asarray(end, np.int64)
    real = end > start
    start = start[real]
    end = end[real]
    if not len(start):
        return NOTHING
    if (np.diff(start) < 0).any():
        order = np.argsort(start, kind="stable")
        start = start[order]
        end = end[order]
    # an interval that begins after all before it have ended begins a new one of the cover
    reach = np.maximum.accumulate(end)
    begins = start[1:] > reach[:-1]
    first = np.concatenate(([True], begins))
    last = np.concatenate((begins, [True]))
    return Cover(start[first], reach[last])


def joined(*covers: Cover) -> Cover:
    """Unite what several covers hold."""
    start = np.concatenate([cover.start for cover in covers])
    end = np.concatenate([cover.end for cover in covers])
    return union(start, end)


def complement(cover: Cover, start: int, end: int) -> Cover:
    """Find what the cover leaves free of a window.

    Args:
        cover: what is taken.
        start: where the window begins, ns.
        end: where it ends.
    """
    starts = np.clip(cover.start, start, end)
    ends = np.clip(cover.end, start, end)
    # each hole lasts from the end of an interval to the start of the next
    hole_starts = np.concatenate(([start], ends))
    hole_ends = np.concatenate((starts, [end]))
    return union(hole_starts, hole_ends)


def intersection(one: Cover, other: Cover) -> Cover:
    """Intersect two covers: what both hold."""
    if not len(one) or not len(other):
        return NOTHING
    start = min(one.start[0], other.start[0])
    end = max(one.end[-1], other.end[-1])
    outside_one = complement(one, start, end)
    outside_other = complement(other, start, end)
    return complement(joined(outside_one, outside_other), start, end)


def difference(one: Cover, other: Cover) -> Cover:
    """Subtract a cover: what `one` holds and `other` does not."""
    if not len(one):
        return NOTHING
    start = int(one.start[0])
    end = int(one.end[-1])
    return intersection(one, complement(other, start, end))


def _grouped(small: Integers) -> Integers:
    """Sort few distinct numbers stably; for 16 bits numpy counts them instead of comparing."""
    keys = small
    if len(small) and 0 <= small.min() and small.max() <= MAX_INT16:
        keys = small.astype(np.int16)
    return np.argsort(keys, kind="stable")


def _nested_order(start: Integers, end: Integers, thread: Integers) -> Integers:
    """Order by thread, then start, the longer one first. A trace's own order is that already within a thread."""
    later = np.diff(start)
    longer = np.diff(end)
    is_tied_right = (later == 0) & (longer <= 0)
    is_in_order = (later > 0) | is_tied_right
    if is_in_order.all():
        return _grouped(thread)
    return np.lexsort((-end, start, thread))


class Nesting:
    """Ranges on threads, as a stack each, to find the innermost around a moment.

    Ranges of a thread should lie inside each other or apart. Where one sticks out of the range that it began in (clocks
    are rounded), it counts as ended with that range. Empty ranges hold nothing.

    All threads stand on one axis, one after the other: a key is a moment's place there, so that one search serves them
    all. At any key, as many ranges are open as have begun and not ended; the innermost of them is the last one that has
    begun at that depth.

    Args:
        rows: [k], what to answer with.
        start: [k], ns, in any order.
        end: [k], ns.
        thread: [k], from 0 on.
    """

    def __init__(
        self,
        rows: Integers,
        start: ArrayLike,
        end: ArrayLike,
        thread: ArrayLike,
    ):
        start = np.asarray(start, np.int64)
        end = np.asarray(end, np.int64)
        thread = np.asarray(thread, np.int64)
        keep = np.flatnonzero(end > start)
        start = start[keep]
        end = end[keep]
        thread = thread[keep]
        order = _nested_order(start, end, thread)
        keep = keep[order]
        start = start[order]
        end = end[order]
        thread = thread[order]
        self.rows = np.asarray(rows, np.int64)[keep]
        self._low = 0
        # length of a thread's part of the axis
        self._axis = 1
        if len(keep):
            self._low = int(start.min())
            self._axis = int(end.max()) - self._low + 2
        self._start = self._key(start, thread)
        self._settle(self._key(end, thread))

    def _key(self, time: Integers, thread: Integers) -> Integers:
        """Compute the place of each moment on the axis of all threads."""
        place = np.clip(time - self._low, 0, self._axis - 1)
        key: Integers = thread * self._axis + place
        return key

    def _settle(self, end: Integers) -> None:
        """Find each range's depth and parent; cut what sticks out, which may take a few rounds."""
        places = np.arange(len(end))
        for _ in range(10):
            self._ends = np.sort(end)
            ended = np.searchsorted(self._ends, self._start, side="right")
            self.depth = places - ended
            # (depth, place) as one sorted number: a search in it finds the last range of a depth before a place
            self._by_depth = _grouped(self.depth)
            self._ladder = self.depth[self._by_depth] * (len(end) + 1) + self._by_depth
            self.parent = self._last_at(self.depth - 1, places)
            if not len(end):
                return
            has_parent = self.parent >= 0
            limit = np.where(has_parent, end[self.parent], end)
            sticks_out = (limit < end) & (limit > self._start)
            if not sticks_out.any():
                return
            end = np.where(sticks_out, limit, end)

    def _last_at(self, depth: Integers, before: Integers) -> Integers:
        """Find the position of the last range of such a depth among the first `before`; -1 for none."""
        if not len(self.rows):
            return np.full(np.shape(depth), -1, np.int64)
        wanted = depth * (len(self.rows) + 1) + before
        rung = np.searchsorted(self._ladder, wanted, side="left")
        last = np.maximum(rung - 1, 0)
        found = self._by_depth[last]
        is_found = (depth >= 0) & (rung > 0)
        return np.where(is_found, found, -1)

    def position_at(self, time: ArrayLike, thread: ArrayLike) -> Integers:
        """Find the position of the innermost range around each moment; -1: none.

        A position is an index into `rows`, `depth` and `parent`.
        """
        time = np.asarray(time, np.int64)
        thread = np.asarray(thread, np.int64)
        key = self._key(time, thread)
        begun = np.searchsorted(self._start, key, side="right")
        ended = np.searchsorted(self._ends, key, side="right")
        innermost = begun - ended - 1
        found = self._last_at(innermost, begun)
        # other moments would be taken for the thread's first or last
        place = time - self._low
        on_axis = (place >= 0) & (place < self._axis - 1)
        return np.where(on_axis, found, -1)

    def row_at(self, time: ArrayLike, thread: ArrayLike) -> Integers:
        """The row of the innermost range around each moment (its start included, its end not); -1: none."""
        return self.row_of(self.position_at(time, thread))

    def row_of(self, position: Integers) -> Integers:
        """The row at each position, such as those of `parent`; -1 where the position is."""
        # index -1 finds the last entry
        return np.append(self.rows, -1)[position]
