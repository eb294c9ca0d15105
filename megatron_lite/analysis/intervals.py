"""Sets of time intervals as sorted, disjoint int64 pairs, and the nesting of ranges on threads. All vectorised.

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
        """ns that are covered."""
        return int((self.end - self.start).sum())

    @cached_property
    def _before(self) -> Integers:
        """int64 [m + 1]: what the first k intervals cover."""
        return np.concatenate(([0], np.cumsum(self.end - self.start)))

    def covered_until(self, time: ArrayLike) -> Integers:
        """ns that are covered before each time; int64, the shape of `time`."""
        time = np.asarray(time, np.int64)
        if not len(self):
            return np.zeros(time.shape, np.int64)
        begun = np.searchsorted(self.start, time, side="right")
        last = np.maximum(begun - 1, 0)
        beyond = np.where(begun > 0, np.maximum(self.end[last] - time, 0), 0)
        until: Integers = self._before[begun] - beyond
        return until

    def within(self, start: ArrayLike, end: ArrayLike) -> Integers:
        """ns that are covered inside each window [start, end); 0 where end <= start."""
        start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
        inside: Integers = np.maximum(self.covered_until(end) - self.covered_until(start), 0)
        return inside

    def time_at(self, covered: ArrayLike) -> Integers:
        """The moment until which so many ns are covered: `covered_until` backwards.

        The last one's end if there are fewer.
        """
        covered = np.asarray(covered, np.int64)
        at = np.clip(np.searchsorted(self._before, covered, side="left") - 1, 0, len(self) - 1)
        time: Integers = np.minimum(self.start[at] + np.maximum(covered - self._before[at], 0), self.end[at])
        return time

    def holds(self, time: ArrayLike) -> Flags:
        """bool: is each time inside?"""
        time = np.asarray(time, np.int64)
        if not len(self):
            return np.zeros(time.shape, bool)
        at = np.searchsorted(self.start, time, side="right") - 1
        inside: Flags = (at >= 0) & (time < self.end[np.maximum(at, 0)])
        return inside


NOTHING = Cover(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: ArrayLike, end: ArrayLike) -> Cover:
    """What any of the intervals covers. They may overlap, stand in any order and be empty (then they count nothing)."""
    start, end = np.asarray(start, np.int64), np.asarray(end, np.int64)
    real = end > start
    start, end = start[real], end[real]
    if not len(start):
        return NOTHING
    if (np.diff(start) < 0).any():
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Cover(start[first], reach[last])


def joined(*covers: Cover) -> Cover:
    """What any of the covers holds."""
    return union(np.concatenate([c.start for c in covers]), np.concatenate([c.end for c in covers]))


def complement(cover: Cover, start: int, end: int) -> Cover:
    """What of [start, end) the cover leaves free."""
    starts, ends = np.clip(cover.start, start, end), np.clip(cover.end, start, end)
    return union(np.concatenate(([start], ends)), np.concatenate((starts, [end])))


def intersection(one: Cover, other: Cover) -> Cover:
    """What both hold."""
    if not len(one) or not len(other):
        return NOTHING
    start, end = min(one.start[0], other.start[0]), max(one.end[-1], other.end[-1])
    return complement(joined(complement(one, start, end), complement(other, start, end)), start, end)


def difference(one: Cover, other: Cover) -> Cover:
    """What `one` holds and `other` does not."""
    if not len(one):
        return NOTHING
    return intersection(one, complement(other, int(one.start[0]), int(one.end[-1])))


def _grouped(small: Integers) -> Integers:
    """Stable order of few distinct numbers; for 16 bits numpy counts them instead of comparing."""
    fits = len(small) > 0 and 0 <= small.min() and small.max() < 1 << 15
    return np.argsort(small.astype(np.int16) if fits else small, kind="stable")


def _nested_order(start: Integers, end: Integers, thread: Integers) -> Integers:
    """By thread, then start, the longer one first. A trace's own order is that already within a thread."""
    step = np.diff(start)
    if ((step > 0) | ((step == 0) & (np.diff(end) <= 0))).all():
        return _grouped(thread)
    return np.lexsort((-end, start, thread))


class Nesting:
    """Ranges on threads, as a stack each: which is the innermost around a moment?

    Ranges of a thread should lie inside each other or apart. Where one sticks out of the range that it began in (clocks
    are rounded), it counts as ended with that range. Empty ranges hold nothing.
    """

    def __init__(self, rows: Integers, start: ArrayLike, end: ArrayLike, thread: ArrayLike):
        """`rows` [k]: what to answer with. start, end (ns) and thread (>= 0): [k] each, in any order."""
        start, end, thread = (np.asarray(x, np.int64) for x in (start, end, thread))
        keep = np.flatnonzero(end > start)
        keep = keep[_nested_order(start[keep], end[keep], thread[keep])]
        self._low = int(start[keep].min()) if len(keep) else 0
        # threads one after the other on one axis: so one search serves them all
        self._axis = int(end[keep].max()) - self._low + 2 if len(keep) else 1
        self.rows = np.asarray(rows, np.int64)[keep]
        self._thread = thread[keep]
        self._start = self._key(start[keep], thread[keep])
        self._settle(self._key(end[keep], thread[keep]))

    def _key(self, time: Integers, thread: Integers) -> Integers:
        key: Integers = thread * self._axis + np.clip(time - self._low, 0, self._axis - 1)
        return key

    def _settle(self, end: Integers) -> None:
        """Finds each range's depth and parent; cuts what sticks out, which may take a few rounds."""
        for _ in range(10):
            self._ends = np.sort(end)
            self.depth = np.arange(len(end)) - np.searchsorted(self._ends, self._start, side="right")
            self._by_depth = _grouped(self.depth)
            self._ladder = self.depth[self._by_depth] * (len(end) + 1) + self._by_depth
            self.parent = self._last_at(self.depth - 1, np.arange(len(end)))
            limit = np.where(self.parent >= 0, end[self.parent], end) if len(end) else end
            out = (limit < end) & (limit > self._start)
            if not out.any():
                return
            end = np.where(out, limit, end)

    def _last_at(self, depth: Integers, before: Integers) -> Integers:
        """Position of the last range of such a depth among the first `before`; -1 for none."""
        if not len(self.rows):
            return np.full(np.shape(depth), -1, np.int64)
        at = np.searchsorted(self._ladder, depth * (len(self.rows) + 1) + before, side="left") - 1
        found = self._by_depth[np.maximum(at, 0)]
        return np.where((depth >= 0) & (at >= 0), found, -1)

    def position_at(self, time: ArrayLike, thread: ArrayLike) -> Integers:
        """Position (an index into `rows`, `depth`, `parent`) of the innermost range around each moment; -1: none."""
        time, thread = np.asarray(time, np.int64), np.asarray(thread, np.int64)
        key = self._key(time, thread)
        begun = np.searchsorted(self._start, key, side="right")
        depth = begun - np.searchsorted(self._ends, key, side="right") - 1
        found = self._last_at(depth, begun)
        inside = (time >= self._low) & (time - self._low < self._axis - 1) & (found >= 0)
        return np.where(inside, found, -1)

    def row_at(self, time: ArrayLike, thread: ArrayLike) -> Integers:
        """The row of the innermost range around each moment (its start included, its end not); -1: none."""
        return self.row_of(self.position_at(time, thread))

    def row_of(self, position: Integers) -> Integers:
        """The row at each position, such as those of `parent`; -1 where the position is."""
        return np.append(self.rows, -1)[position]
