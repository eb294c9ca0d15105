"""Makes tracks, and slices on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from megatron_lite.analysis.intervals import Cover, Flags, Integers
from megatron_lite.analysis.timeline.lanes import choose_lanes
from megatron_lite.analysis.timeline.timeline_results import (
    Argument,
    CounterUnit,
    HostThread,
    NumberArgument,
    Slices,
    TextArgument,
    TimelineProcess,
    Track,
)


@dataclass
class TrackMaker:
    """Gives every process and track a number of its own."""

    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def make_process(self, pid: int, name: str, order: int) -> TimelineProcess:
        """Make a process.

        Args:
            pid: its number; no other process has it.
            name: as the picture shows it.
            order: its place among the processes.
        """
        return TimelineProcess(next(self._numbers), pid, name, order)

    def make_track(
        self,
        process: TimelineProcess,
        name: str,
        order: int,
        thread: HostThread | None = None,
        counter: CounterUnit | None = None,
        description: str = "",
    ) -> Track:
        """Make a track of a process.

        Args:
            process: to which it belongs.
            name: as the picture shows it.
            order: its place among the tracks of the process.
            thread: the thread of the host that it is; None: none.
            counter: the unit of a counter; None: it holds slices.
            description: what a reader should know of it; "" for nothing.
        """
        return Track(next(self._numbers), process, name, order, thread, counter, description)

    def spread(self, slices: Slices) -> Iterator[Slices]:
        """Spread slices that overlap over further tracks of one name, so that on each they nest."""
        lanes, end_ns = choose_lanes(slices.start_ns, slices.end_ns)
        slices = replace(slices, end_ns=end_ns)
        last = int(lanes.max(initial=0))
        if not last:
            yield slices
            return
        for lane in range(last + 1):
            track = slices.track
            if lane:
                track = self.make_track(
                    track.process,
                    f"{track.name}, at the same time",
                    track.order,
                    description=track.description,
                )
            yield take(replace(slices, track=track), lanes == lane)


def take(slices: Slices, chosen: Flags | Integers) -> Slices:
    """Take some of the slices, or bring them in another order. chosen: [n] flags, or their places."""
    return replace(
        slices,
        start_ns=slices.start_ns[chosen],
        end_ns=slices.end_ns[chosen],
        name=slices.name[chosen],
        category=slices.category[chosen],
        flow=None if slices.flow is None else slices.flow[chosen],
        arguments=tuple(_take_argument(argument, chosen) for argument in slices.arguments),
    )


def _take_argument(argument: Argument, chosen: Flags | Integers) -> Argument:
    """Take the argument of some of the slices."""
    if isinstance(argument, TextArgument):
        return replace(argument, text=argument.text[chosen])
    return replace(argument, values=argument.values[chosen])


@dataclass(frozen=True)
class SingleSlice:
    """A slice before it is laid on a track."""

    start_ns: int
    end_ns: int
    name: str
    arguments: dict[str, str | int] = field(default_factory=dict)  # a number is at least 0
    flow: int = 0


def lay_stretches(track: Track, stretches: Sequence[SingleSlice], category: str) -> Slices:
    """Lay stretches of one category on a track.

    Args:
        track: on which they stand.
        stretches: in any order.
        category: of all of them.
    """
    ordered = sorted(stretches, key=lambda one: (one.start_ns, -one.end_ns))
    names = list(dict.fromkeys(one.name for one in ordered))
    place_of_name = {name: place for place, name in enumerate(names)}
    keys = dict.fromkeys(key for one in ordered for key in one.arguments)
    return Slices(
        track=track,
        start_ns=np.array([one.start_ns for one in ordered], np.int64),
        end_ns=np.array([one.end_ns for one in ordered], np.int64),
        name=np.array([place_of_name[one.name] for one in ordered], np.int64),
        names=names,
        category=np.zeros(len(ordered), np.int64),
        categories=(category,),
        flow=np.array([one.flow for one in ordered], np.int64),
        arguments=tuple(_gather_argument(key, [one.arguments.get(key) for one in ordered]) for key in keys),
    )


def _gather_argument(name: str, values: Sequence[str | int | None]) -> Argument:
    """Make the argument of that name of all slices. values: None where a slice has none."""
    if any(isinstance(value, int) for value in values):
        numbers = [value if isinstance(value, int) else -1 for value in values]
        return NumberArgument(name, np.array(numbers, np.int64))
    return make_text_argument(name, [value if isinstance(value, str) else "" for value in values])


def make_text_argument(name: str, values: Sequence[str]) -> TextArgument:
    """Make an argument of the texts of n slices; "" for none."""
    texts = list(dict.fromkeys(value for value in values if value))
    place_of_text = {text: place for place, text in enumerate(texts)}
    places = [place_of_text.get(value, -1) for value in values]
    return TextArgument(name, np.array(places, np.int64), texts)


def lay_covers(track: Track, covers: dict[str, Cover], category: str, clock_ns: int) -> Slices:
    """Lay covers, which do not overlap each other, on a track.

    Args:
        track: on which they stand.
        covers: when each of them lasts, by name, on the trace's clock.
        category: of all of them.
        clock_ns: what to add to the trace's times.
    """
    names = list(covers)
    nothing: Integers = np.empty(0, np.int64)
    start_ns = np.concatenate([nothing, *(cover.start for cover in covers.values())])
    end_ns = np.concatenate([nothing, *(cover.end for cover in covers.values())])
    lengths = [len(cover) for cover in covers.values()]
    name = np.repeat(np.arange(len(names)), lengths)
    order = np.argsort(start_ns, kind="stable")
    return Slices(
        track=track,
        start_ns=start_ns[order] + clock_ns,
        end_ns=end_ns[order] + clock_ns,
        name=name[order],
        names=names,
        category=np.zeros(len(order), np.int64),
        categories=(category,),
    )
