"""Interval sets and nesting against what a loop over every nanosecond or every range says."""

import numpy as np
import pytest

from megatron_lite.analysis.intervals import Cover, Nesting, complement, difference, intersection, joined, union

AXIS = 120


def held(start, end) -> np.ndarray:
    """bool per ns of the axis, one by one."""
    axis = np.zeros(AXIS, bool)
    for a, b in zip(start, end, strict=True):
        axis[a:b] = True
    return axis


def some_intervals(random, most=12):
    start = random.integers(0, AXIS - 20, random.integers(0, most))
    return start, start + random.integers(0, 20, len(start))


def well_formed(cover: Cover) -> bool:
    return bool((cover.end > cover.start).all() and (cover.start[1:] > cover.end[:-1]).all())


@pytest.fixture(params=range(60))
def random(request):
    return np.random.default_rng(request.param)


def test_sets_are_what_counting_says(random):
    one, other = some_intervals(random), some_intervals(random)
    a, b, x, y = union(*one), union(*other), held(*one), held(*other)
    low, high = sorted(random.integers(0, AXIS, 2))
    window = held([low], [high])
    for cover, wanted in (
        (a, x),
        (joined(a, b), x | y),
        (intersection(a, b), x & y),
        (difference(a, b), x & ~y),
        (complement(a, low, high), window & ~x),
    ):
        assert well_formed(cover)
        assert (held(cover.start, cover.end) == wanted).all()
        assert cover.length == wanted.sum()


def test_lengths_and_moments_are_what_counting_says(random):
    intervals = some_intervals(random)
    cover, axis, moments = union(*intervals), held(*intervals), np.arange(AXIS)
    assert (cover.holds(moments) == axis).all()
    assert (cover.covered_until(moments) == np.concatenate(([0], np.cumsum(axis)[:-1]))).all()
    assert (cover.within(moments, moments + 30) == [axis[t : t + 30].sum() for t in moments]).all()
    if len(cover):
        amounts = np.arange(1, cover.length + 1)
        assert (cover.covered_until(cover.time_at(amounts)) == amounts).all()


def test_intervals_that_touch_and_ranges_that_nest_stick_out_or_are_empty():
    assert len(union([0, 5, 20], [5, 9, 20])) == 1
    nothing = union([4], [4])
    assert (len(nothing), nothing.length) == (0, 0)
    assert len(intersection(nothing, union([0], [9]))) == 0
    nest = Nesting(np.array([10, 11, 12, 13]), [0, 0, 5, 0], [9, 4, 9, 3], [0, 0, 0, 1])
    assert nest.rows.tolist() == [10, 11, 12, 13]
    assert nest.row_of(nest.parent).tolist() == [-1, 10, 10, -1]
    assert (nest.depth == 0).tolist() == [True, False, False, True]
    nest = Nesting(np.arange(3), [0, 5, 12], [10, 15, 14], [0, 0, 0])
    assert nest.row_at([3, 6, 9, 11, 13], [0] * 5).tolist() == [0, 1, 1, -1, 2]
    assert Nesting(np.arange(2), [3, 5], [3, 5], [0, 0]).row_at([3, 5], [0, 0]).tolist() == [-1, -1]


def nested_ranges(random, low, high, depth=0):
    """(start, end) of ranges that lie inside each other or apart; siblings may touch, equal starts are common."""
    at, found = low, []
    while at < high and depth < 5:
        start = int(random.integers(at, high + 1))
        end = int(random.integers(start, high + 1))
        if end > start:
            found.append((start, end))
            found += nested_ranges(random, start, end, depth + 1) if random.random() < 0.7 else []
        at = max(end, at + 1)
    return found


def test_the_innermost_range_is_found_on_each_thread(random):
    per_thread = [nested_ranges(random, 0, 60) for _ in range(3)]
    ranges = [(start, end, thread) for thread, found in enumerate(per_thread) for start, end in found]
    ranges = [ranges[k] for k in random.permutation(len(ranges))]
    start, end, thread = np.array(ranges or np.empty((0, 3)), np.int64).T
    nest = Nesting(np.arange(len(ranges)), start, end, thread)
    moments = np.arange(-1, 63)
    for where in range(4):
        for moment, found in zip(moments, nest.row_at(moments, np.full(len(moments), where)), strict=True):
            there = np.flatnonzero((thread == where) & (start <= moment) & (moment < end))
            around = [(start[k], -end[k]) for k in there]
            assert (found >= 0) == bool(around)
            assert not around or (start[found], -end[found]) == max(around)
