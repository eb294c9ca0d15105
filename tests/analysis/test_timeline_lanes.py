"""Slices on lanes: nested or apart on each, and none is lost."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.analysis.timeline.lanes import ROUNDING_NS, choose_lanes, is_nested

SLICES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=12)


def order(slices):
    """Starts and ends in us, as the rows of a trace stand."""
    ordered = sorted(((start, start + length) for start, length in slices), key=lambda one: (one[0], -one[1]))
    start, end = np.array(ordered, np.int64).reshape(-1, 2).T * 10 * ROUNDING_NS
    return start, end


def cross(start, end):
    """Whether two slices overlap of which none holds the other, by the definition."""
    pairs = itertools.combinations(zip(start.tolist(), end.tolist()), 2)
    return any(a < c < b < d or c < a < d < b for (a, b), (c, d) in pairs if b > a and d > c)


@given(SLICES)
@settings(derandomize=True, max_examples=200, deadline=None)
def test_overlaps_are_seen_and_spread(slices):
    start, end = order(slices)
    assert is_nested(start, end) is not cross(start, end)
    lanes, ends = choose_lanes(start, end)
    assert (ends == end).all(), "only what sticks out by a rounding is cut"
    for lane in np.unique(lanes):
        assert not cross(start[lanes == lane], end[lanes == lane])
    if is_nested(start, end):
        assert not lanes.any()


def test_what_sticks_out_by_a_rounding_is_cut():
    start, end = np.array([0, 100]), np.array([500, 500 + ROUNDING_NS])
    lanes, ends = choose_lanes(start, end)
    assert lanes.tolist() == [0, 0] and ends.tolist() == [500, 500]
    lanes, ends = choose_lanes(start, end + [0, 1])
    assert lanes.tolist() == [0, 1] and ends.tolist() == [500, 501 + ROUNDING_NS]
