"""Lanes for slices that overlap: on one lane a slice lies inside another one or beside it."""

import numpy as np

from megatron_lite.analysis.intervals import Integers

ROUNDING_NS = 1_000  # by which writers round times: what sticks out of the slice around it by less is cut


def is_nested(start_ns: Integers, end_ns: Integers) -> bool:
    """Tell whether each slice lies inside another one or beside it.

    Args:
        start_ns: [n], starts, in order; of equal ones the longer slice comes first.
        end_ns: [n], ends.
    """
    is_long = end_ns > start_ns
    starts = start_ns[is_long]
    ends = end_ns[is_long]
    in_order = np.sort(ends)
    # the first slice of which another one sticks out has more slices open at its end than at its start
    ended_at_start = np.searchsorted(in_order, starts, side="right")
    around_start = np.arange(len(starts)) - ended_at_start
    begun_at_end = np.searchsorted(starts, ends, side="left")
    ended_at_end = np.searchsorted(in_order, ends, side="right")
    around_end = begun_at_end - ended_at_end
    is_alike = around_end <= around_start
    return bool(is_alike.all())


def choose_lanes(start_ns: Integers, end_ns: Integers) -> tuple[Integers, Integers]:
    """Choose the first lane on which each slice overlaps no other.

    Args:
        start_ns: [n], starts, in order; of equal ones the longer slice comes first.
        end_ns: [n], ends.

    Returns:
        int64 [n] each: the lane of each slice, from 0 on, and its end, at most ROUNDING_NS earlier than it was.
    """
    lanes = np.zeros(len(start_ns), np.int64)
    if is_nested(start_ns, end_ns):
        return lanes, end_ns
    ends = end_ns.tolist()
    open_ends: list[list[int]] = []
    for place, start in enumerate(start_ns.tolist()):
        lane = _find_lane(open_ends, start, ends[place])
        stack = open_ends[lane]
        if stack:
            ends[place] = min(ends[place], stack[-1])
        stack.append(ends[place])
        lanes[place] = lane
    return lanes, np.array(ends, np.int64)


def _find_lane(open_ends: list[list[int]], start: int, end: int) -> int:
    """Find the first lane whose innermost open slice holds this one, or that is free.

    Args:
        open_ends: by lane, ends of the slices that are open, the innermost one last; grows by a lane where none fits.
        start: of the slice, ns.
        end: of the slice, ns.
    """
    for lane, stack in enumerate(open_ends):
        while stack and stack[-1] <= start:
            stack.pop()
        if not stack or end - stack[-1] <= ROUNDING_NS:
            return lane
    open_ends.append([])
    return len(open_ends) - 1
