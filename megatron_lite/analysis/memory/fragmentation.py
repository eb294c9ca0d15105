"""Reserved against allocated, and what expandable segments would have reserved: by replaying the record."""

import numpy as np

from megatron_lite.analysis.memory.allocation_lifetimes import Lives
from megatron_lite.analysis.memory.memory_results import Fragmentation
from megatron_lite.analysis.memory.record import SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, Record
from megatron_lite.estimate.caching_allocator import Allocation, Layout

MAX_ERROR = 0.05  # of what was reserved: a replay of the allocator as it was must come as near, or nothing is said


def reserved_bytes(record: Record) -> np.ndarray:
    """int64 [n + 1]: bytes of segments before the first event, then after each; backwards from those at the end."""
    grows = np.isin(record.action, (SEGMENT_ALLOC, SEGMENT_MAP))
    shrinks = np.isin(record.action, (SEGMENT_FREE, SEGMENT_UNMAP))
    change = np.where(grows, record.size, 0) - np.where(shrinks, record.size, 0)
    later = np.concatenate([np.cumsum(change[::-1])[::-1], [0]])
    return np.maximum(int(record.segment_bytes.sum()) - later, 0)


def fragmentation_of(
    record: Record, lives: Lives, allocated: np.ndarray, reserved: np.ndarray
) -> tuple[Fragmentation, str]:
    """(figures, why the record could not be replayed or ''). allocated, reserved: int64 [n + 1]."""
    fullest = np.flatnonzero(reserved == reserved.max())
    at = int(fullest[np.argmax(allocated[fullest])])
    free = record.blocks.size[~record.blocks.live]
    as_it_was, expandable, why = None, None, ""
    was_expandable = _was_expandable(record)
    if reserved[at] > 0 and not record.settings.get("simulated"):
        as_it_was = replayed_peak(record, lives, was_expandable)
        if abs(as_it_was - reserved[at]) <= MAX_ERROR * reserved[at]:
            expandable = replayed_peak(record, lives, True)
        else:
            why = (
                f"a replay of the allocator reserves {as_it_was / reserved[at]:.0%} of what was reserved: what happened before "
                "the record matters, and whether expandable segments would help is unknown"
            )
    elif reserved[at] > 0:
        expandable, as_it_was = replayed_peak(record, lives, True), int(reserved[at])
    return Fragmentation(
        reserved_bytes=int(reserved[at]),
        allocated_bytes=int(allocated[at]),
        largest_free_block=int(free.max(initial=0)),
        expandable=was_expandable,
        replay_reserved_bytes=expandable,
        replay_as_it_was_bytes=as_it_was,
    ), why


def _was_expandable(record: Record) -> bool:
    return record.settings.get("expandable_segments") is True or bool(np.any(record.action == SEGMENT_MAP))


def replayed_peak(record: Record, lives: Lives, expandable: bool) -> int:
    """Most bytes reserved when an empty allocator first takes what was there, then sees the record's events."""
    layout, peak = Layout(expandable), 0
    pieces = [Allocation(size, "", [], stream) for size, stream in zip(lives.requested.tolist(), lives.stream.tolist())]
    old = np.flatnonzero(lives.begin < 0)
    for row in old[np.argsort(lives.address[old], kind="stable")].tolist():
        layout.place(pieces[row])
    peak = layout.reserved
    for kind, row in _events(record, lives):
        if kind == 1:
            layout.place(pieces[row])
            peak = max(peak, layout.reserved)
        elif kind == 0:
            layout.release(pieces[row])
        else:
            layout.give_back()
    return peak


def _events(record: Record, lives: Lives):
    """(0 free | 1 allocation | 2 the allocator gives back, row of the life) in order."""
    n = len(record)
    begins, ends = np.flatnonzero(lives.begin >= 0), np.flatnonzero(lives.end < n)
    given = np.flatnonzero(np.isin(record.action, (SEGMENT_FREE, SEGMENT_UNMAP)))
    given = given[np.diff(given, prepend=-9) > 1]  # once for each run of them
    when = np.concatenate([lives.begin[begins], lives.end[ends], given])
    kind = np.repeat([1, 0, 2], [len(begins), len(ends), len(given)])
    row = np.concatenate([begins, ends, np.zeros(len(given), np.int64)])
    order = np.argsort(when, kind="stable")
    return zip(kind[order].tolist(), row[order].tolist())
