"""Results of laying ranks on one timeline: tracks, what stands on them, and how their clocks were brought together.

Times are ns on the clock of all ranks, from the first event of any rank on.
"""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_lite.analysis.intervals import Integers, Numbers


class CounterUnit(enum.Enum):
    """Units of a counter."""

    BYTES = "bytes"
    TOKENS_PER_SECOND = "tokens/s"
    MEGAHERTZ = "MHz"
    NATS = "nats"


@dataclass(frozen=True)
class HostThread:
    """Number of a thread of the host."""

    pid: int
    tid: int


@dataclass(frozen=True)
class TimelineProcess:
    """A rank, or the run as a whole."""

    uuid: int
    pid: int
    name: str
    order: int


@dataclass(frozen=True)
class Track:
    """A line of the picture: a thread of a process, or anything else that happens one after the other."""

    uuid: int
    process: TimelineProcess
    name: str
    order: int  # among the tracks of the process
    thread: HostThread | None = None  # None: it is no thread of the host
    counter: CounterUnit | None = None  # None: it holds slices
    description: str = ""


@dataclass(frozen=True)
class TextArgument:
    """A text that some of n slices carry."""

    name: str
    text: Integers  # [n], index into `texts`; -1: none
    texts: Sequence[str]


@dataclass(frozen=True)
class NumberArgument:
    """A whole number that some of n slices carry."""

    name: str
    values: Integers  # [n]; -1: none


Argument = TextArgument | NumberArgument


@dataclass(frozen=True)
class Slices:
    """Stretches of time on a track, n of them by start, of which the longer come first."""

    track: Track
    start_ns: Integers  # [n]
    end_ns: Integers  # [n]; what ends where it starts is an instant
    name: Integers  # [n], index into `names`
    names: Sequence[str]
    category: Integers  # [n], index into `categories`
    categories: Sequence[str]
    flow: Integers | None = None  # [n], arrows lead from slice to slice with the same number; 0: none
    arguments: tuple[Argument, ...] = ()

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True)
class Counts:
    """Values of a counter, n of them by time."""

    track: Track
    time_ns: Integers  # [n]
    values: Integers | Numbers  # [n]


class ClockSource(enum.Enum):
    """Ways in which a rank's clock came to that of all ranks."""

    OWN = "the file's own clock"
    CORRECTED = "the file's own clock, moved to where collectives end together"
    COLLECTIVES = "no clock in the file: laid where collectives end together"
    ALONE = "nothing to compare with"
    UNKNOWN = "not aligned: neither a clock in the file nor collectives in common"


@dataclass(frozen=True)
class AlignedClock:
    """How the clock of a rank was aligned, and how well."""

    name: str  # "rank 0"
    source: ClockSource
    start_ns: int  # when the rank's trace begins, on the clock of all ranks
    moved_ns: int  # by how much its own clock was corrected
    collectives: int  # matched with other ranks', all of whose members leave together
    off_ns: float  # median of how much later than the median rank it leaves them, after alignment; NaN: not seen
    spread_ns: float  # median distance from that median; NaN: not seen

    def describe(self) -> str:
        """Write how the clock was aligned, and how well, in a sentence."""
        text = self.source.value
        if self.moved_ns:
            text += f", by {self.moved_ns / 1e6:+.6f} ms"
        text += f"; begins at {self.start_ns / 1e6:.6f} ms"
        if np.isnan(self.off_ns):
            return f"{text}; no collective shows how well"
        left = f"{self.off_ns / 1e6:+.6f} ms (spread {self.spread_ns / 1e6:.6f} ms)"
        return f"{text}; it leaves {self.collectives} collectives {left} after the median rank"


@dataclass(frozen=True)
class MergedTimeline:
    """All ranks of a run on one clock. What stands on the tracks is made only as it is asked for."""

    processes: tuple[TimelineProcess, ...]
    contents: Iterator[Slices | Counts]  # to be read once
    clocks: tuple[AlignedClock, ...]
    unix_ns: int | None  # the moment 0, since 1970; None: no file names a clock
    notes: dict[str, str] = field(default_factory=dict)  # what else the file is to say of itself, by name
