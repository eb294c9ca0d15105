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
        """int64 [m + 1]: what the first k intervals cover."""
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
        time: Integers = np.minimum(self.start[at] + left, self.end[at])
        return time

    def holds(self, time: ArrayLike) -> Flags:
        """bool: whether each time lies inside an interval."""
        time = np.asarray(time, np.int64)
        if not len(self):
            return np.zeros(time.shape, bool)
        at = np.searchsorted(self.start, time, side="right") - 1
        has_begun = at >= 0
        inside: Flags = has_begun & (time < self.end[np.maximum(at, 0)])
        return inside


NOTHING = Cover(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: ArrayLike, end: ArrayLike) -> Cover:
    """What any of the intervals covers. They may overlap, stand in any order and be empty (then they count nothing)."""
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
    """What any of the covers holds."""
    start = np.concatenate([cover.start for cover in covers])
    end = np.concatenate([cover.end for cover in covers])
    return union(start, end)


def complement(cover: Cover, start: int, end: int) -> Cover:
    """What of [start, end) the cover leaves free."""
    starts = np.clip(cover.start, start, end)
    ends = np.clip(cover.end, start, end)
    # each hole lasts from the end of an interval to the start of the next
    hole_starts = np.concatenate(([start], ends))
    hole_ends = np.concatenate((starts, [end]))
    return union(hole_starts, hole_ends)


def intersection(one: Cover, other: Cover) -> Cover:
    """What both covers hold."""
    if not len(one) or not len(other):
        return NOTHING
    start = min(one.start[0], other.start[0])
    end = max(one.end[-1], other.end[-1])
    outside_one = complement(one, start, end)
    outside_other = complement(other, start, end)
    return complement(joined(outside_one, outside_other), start, end)


def difference(one: Cover, other: Cover) -> Cover:
    """What `one` holds and `other` does not."""
    if not len(one):
        return NOTHING
    start = int(one.start[0])
    end = int(one.end[-1])
    return intersection(one, complement(other, start, end))


def _grouped(small: Integers) -> Integers:
    """Stable order of few distinct numbers; for 16 bits numpy counts them instead of comparing."""
    fits = len(small) > 0 and 0 <= small.min() and small.max() < 1 << 15
    keys = small.astype(np.int16) if fits else small
    return np.argsort(keys, kind="stable")


def _nested_order(start: Integers, end: Integers, thread: Integers) -> Integers:
    """Order by thread, then start, the longer one first. A trace's own order is that already within a thread."""
    step = np.diff(start)
    is_tied_right = (step == 0) & (np.diff(end) <= 0)
    if ((step > 0) | is_tied_right).all():
        return _grouped(thread)
    return np.lexsort((-end, start, thread))


class Nesting:
    """Ranges on threads, as a stack each: which is the innermost around a moment?

    Ranges of a thread should lie inside each other or apart. Where one sticks out of the range that it began in (clocks
    are rounded), it counts as ended with that range. Empty ranges hold nothing.

    All threads stand on one axis, one after the other: a key is a moment's place there, so that one search serves them
    all. At any key, as many ranges are open as have begun and not ended; the innermost of them is the last one that has
    begun at that depth.
    """

    def __init__(
        self,
        rows: Integers,  # [k], what to answer with
        start: ArrayLike,  # [k], ns, in any order
        end: ArrayLike,  # [k], ns
        thread: ArrayLike,  # [k], >= 0
    ):
        start = np.asarray(start, np.int64)
        end = np.asarray(end, np.int64)
        thread = np.asarray(thread, np.int64)
        keep = np.flatnonzero(end > start)
        order = _nested_order(start[keep], end[keep], thread[keep])
        keep = keep[order]
        start = start[keep]
        end = end[keep]
        thread = thread[keep]
        self.rows = np.asarray(rows, np.int64)[keep]
        self._low = int(start.min()) if len(keep) else 0
        # length of a thread's part of the axis
        self._axis = int(end.max()) - self._low + 2 if len(keep) else 1
        self._start = self._key(start, thread)
        self._settle(self._key(end, thread))

    def _key(self, time: Integers, thread: Integers) -> Integers:
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
            limit = np.where(self.parent >= 0, end[self.parent], end)
            sticks_out = (limit < end) & (limit > self._start)
            if not sticks_out.any():
                return
            end = np.where(sticks_out, limit, end)

    def _last_at(self, depth: Integers, before: Integers) -> Integers:
        """Position of the last range of such a depth among the first `before`; -1 for none."""
        if not len(self.rows):
            return np.full(np.shape(depth), -1, np.int64)
        wanted = depth * (len(self.rows) + 1) + before
        at = np.searchsorted(self._ladder, wanted, side="left") - 1
        found = self._by_depth[np.maximum(at, 0)]
        is_found = (depth >= 0) & (at >= 0)
        return np.where(is_found, found, -1)

    def position_at(self, time: ArrayLike, thread: ArrayLike) -> Integers:
        """Position (an index into `rows`, `depth`, `parent`) of the innermost range around each moment; -1: none."""
        time = np.asarray(time, np.int64)
        thread = np.asarray(thread, np.int64)
        key = self._key(time, thread)
        begun = np.searchsorted(self._start, key, side="right")
        ended = np.searchsorted(self._ends, key, side="right")
        found = self._last_at(begun - ended - 1, begun)
        # other moments would be taken for the thread's first or last
        on_axis = (time >= self._low) & (time - self._low < self._axis - 1)
        return np.where(on_axis & (found >= 0), found, -1)

    def row_at(self, time: ArrayLike, thread: ArrayLike) -> Integers:
        """The row of the innermost range around each moment (its start included, its end not); -1: none."""
        return self.row_of(self.position_at(time, thread))

    def row_of(self, position: Integers) -> Integers:
        """The row at each position, such as those of `parent`; -1 where the position is."""
        # index -1 finds the last entry
        return np.append(self.rows, -1)[position]
