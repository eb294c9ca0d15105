"""Sets of any intervals behave as the sets of their moments."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.analysis.intervals import Cover, complement, difference, intersection, joined, union

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True, database=None)
MOMENTS = 40
TIMES = st.integers(0, MOMENTS)
INTERVALS = st.lists(st.tuples(TIMES, TIMES), max_size=8)


def cover(intervals: list[tuple[int, int]]) -> Cover:
    return union([start for start, _ in intervals], [end for _, end in intervals])


def moments(one: Cover) -> set[int]:
    return {time for start, end in zip(one.start.tolist(), one.end.tolist()) for time in range(start, end)}


@EXAMPLES
@given(INTERVALS)
def test_a_union_holds_each_covered_moment_once(intervals):
    made = cover(intervals)
    assert moments(made) == {time for start, end in intervals for time in range(start, end)}
    assert made.length == len(moments(made))
    assert (made.start[1:] > made.end[:-1]).all()


@EXAMPLES
@given(INTERVALS, INTERVALS)
def test_union_and_overlap_sum_to_both(some, others):
    one, other = cover(some), cover(others)
    both = intersection(one, other)
    assert moments(both) == moments(one) & moments(other)
    assert moments(difference(one, other)) == moments(one) - moments(other)
    assert joined(one, other).length + both.length == one.length + other.length
    assert difference(one, other).length + both.length == one.length


@EXAMPLES
@given(INTERVALS, TIMES, TIMES)
def test_a_window_is_what_is_covered_and_what_is_free(intervals, start, end):
    made = cover(intervals)
    free = complement(made, start, end)
    assert int(made.within(start, end)) + free.length == max(end - start, 0)
    assert [time in moments(made) for time in range(MOMENTS)] == made.holds(range(MOMENTS)).tolist()


@EXAMPLES
@given(INTERVALS.filter(lambda intervals: any(end > start for start, end in intervals)))
def test_the_moment_at_which_so_much_is_covered_covers_so_much(intervals):
    made = cover(intervals)
    amounts = range(1, made.length + 1)
    assert made.covered_until(made.time_at(amounts)).tolist() == list(amounts)
