"""Beginnings and ends of slices, which are packets of their own in a Perfetto trace -> spans with a length.

An end names no slice. Perfetto gives it to the slice of its track that began last. torch.profiler writes all beginnings
of a group of slices and then all their ends, in the same order: by time alone, slices that touch each other would be
mixed up, and so such a group is paired by position.
"""

from array import array
from collections import defaultdict

import numpy as np

from megatron_lite.analysis.intervals import Integers
from megatron_lite.analysis.trace.kineto_json import Event, FloatEvent


class SliceRun:
    """Beginnings and ends of one sequence of packets, from a moment at which no slice is open to the next one."""

    def __init__(self) -> None:
        self._tracks = array("q")
        self._times_ns = array("q")
        self._slices: list[FloatEvent | None] = []  # None: an end
        self.num_open = 0

    def __len__(self) -> int:
        return len(self._slices)

    def begin(self, track: int, time_ns: int, event: FloatEvent) -> None:
        """Append the beginning of a slice.

        Args:
            track: Number of the slice's track.
            time_ns: Time of the beginning.
            event: The slice, whose length is still unknown.
        """
        self._append(track, time_ns, event)
        self.num_open += 1

    def end(self, track: int, time_ns: int) -> None:
        """Append the end of a slice."""
        self._append(track, time_ns, None)
        self.num_open -= 1

    def _append(self, track: int, time_ns: int, event: FloatEvent | None) -> None:
        self._tracks.append(track)
        self._times_ns.append(time_ns)
        self._slices.append(event)

    def pair(self) -> list[Event]:
        """Make spans of the run. What has no counterpart becomes an entry "B" or "E"."""
        tracks = np.array(self._tracks, np.int64)
        times_ns = np.array(self._times_ns, np.int64)
        if _is_group(tracks, times_ns, self._slices):
            return _pair_by_position(times_ns, self._slices)
        return _pair_by_time(tracks, times_ns, self._slices)


def _is_group(tracks: Integers, times_ns: Integers, slices: list[FloatEvent | None]) -> bool:
    """Whether all beginnings precede all ends in the file, the ends in their order, though not so in time."""
    half = len(slices) // 2
    if half < 2 or len(slices) % 2 or None in slices[:half] or any(slices[half:]):
        return False
    goes_back = (np.diff(times_ns) < 0).any() or times_ns[half] == times_ns[half - 1]
    is_same_track = (tracks[:half] == tracks[half:]).all()
    ends_later = (times_ns[:half] <= times_ns[half:]).all()
    return bool(goes_back and is_same_track and ends_later)


def _pair_by_position(times_ns: Integers, slices: list[FloatEvent | None]) -> list[Event]:
    """The spans of a group: its n-th end belongs to its n-th beginning."""
    half = len(slices) // 2
    lengths_ns = (times_ns[half:] - times_ns[:half]).tolist()
    spans: list[Event] = []
    for begun, length_ns in zip(slices, lengths_ns):
        if begun is not None:
            begun.dur = length_ns / 1000
            spans.append(begun)
    return spans


def _pair_by_time(tracks: Integers, times_ns: Integers, slices: list[FloatEvent | None]) -> list[Event]:
    """The spans of a run: an end belongs to the last open beginning of its track, in the order of time."""
    open_slices: dict[int, list[tuple[int, FloatEvent]]] = defaultdict(list)
    paired: list[Event] = []
    for place in np.argsort(times_ns, kind="stable").tolist():
        track = int(tracks[place])
        time_ns = int(times_ns[place])
        begun = slices[place]
        if begun is not None:
            open_slices[track].append((time_ns, begun))
        elif open_slices[track]:
            began_ns, event = open_slices[track].pop()
            event.dur = (time_ns - began_ns) / 1000
            paired.append(event)
        else:
            paired.append(FloatEvent(ph="E", tid=track, ts=0.0))
    for left in open_slices.values():
        paired += [_leave_open(event) for _, event in left]
    return paired


def _leave_open(event: FloatEvent) -> Event:
    """A beginning without an end."""
    event.ph = "B"
    return event
