"""The dependency graph of measured steps: activities on lanes, and what each one has to wait for.

An activity begins when everything that it waits for has ended, each by its lag, and its own delay has passed; then it
takes its work. With the measured values every activity begins and ends when it did in the trace.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import Flags, Integers
from megatron_lite.analysis.time.host_names import CAUSES


class ActivityKind(enum.IntEnum):
    """Kinds of activities of a graph."""

    OPERATOR = 0  # the host is inside an operator
    PYTHON = 1  # the host is between operators
    LOADER = 2  # the host is in the data loader: it makes a batch, or takes one
    NAMED = 3  # the host does something else that names tell: collecting garbage, saving, compiling
    KERNEL = 4
    COPY = 5  # a copy or a memset of the device
    ARRIVAL = 6  # a rank comes to a collective; takes no time
    MEETING = 7  # all ranks have come; takes no time
    TRANSFER = 8  # a rank's part of a collective from there on; where ranks are not matched all of it
    WORKER = 9  # the loader's workers make a batch


ON_HOST = (ActivityKind.OPERATOR, ActivityKind.PYTHON, ActivityKind.LOADER, ActivityKind.NAMED)
ON_DEVICE = (ActivityKind.KERNEL, ActivityKind.COPY)


class EdgeKind(enum.IntEnum):
    """Reasons why an activity waits for another."""

    THREAD = 0  # order of the program on a thread
    STREAM = 1  # order on a stream, or on a backend's thread
    LAUNCH = 2  # device work is launched
    EVENT = 3  # a stream waits for another's event
    SYNC = 4  # the host waits for the device
    HANDOVER = 5  # a thread works for another, which waits for it
    CALL = 6  # a collective is handed over to a backend's thread
    WAIT = 7  # the host waits for a collective of a backend's thread
    MEETING = 8  # a collective begins when the last rank has come
    BATCH = 9  # a batch is ready when a worker has made it


@dataclass(frozen=True)
class Lane:
    """A sequence of activities: a thread, a stream, a backend's thread, the loader's workers, or where ranks meet."""

    rank: int  # place of the rank among those of the graph; -1: of all
    name: str  # "thread 1", "GPU 0 stream 7"


@dataclass(frozen=True)
class Activities:
    """Activities, n of them, ordered by measured start: what one waits for stands before it."""

    kind: NDArray[np.uint8]  # [n], an ActivityKind
    lane: NDArray[np.int32]  # [n], index into Graph.lanes
    step: NDArray[np.int32]  # [n], number of the step by the rank's own count; -1: none
    phase: NDArray[np.int32]  # [n], index into Graph.phases; -1: none
    name: NDArray[np.int32]  # [n], index into Graph.names; -1: none
    row: Integers  # int64 [n], of the rank's trace: operator, kernel or collective; -1: none
    cause: NDArray[np.int8]  # [n], of what is NAMED, index into CAUSES; -1: none
    start_ns: Integers  # int64 [n], measured, on the clock of all ranks
    end_ns: Integers  # int64 [n]
    work_ns: Integers  # int64 [n], what it takes once it has begun
    delay_ns: Integers  # int64 [n], between the end of what it waited for and its start, without a known reason
    again_ns: Integers  # int64 [n], the part of it that computes forward once more, measured
    bucket_ns: Integers  # int64 [n], the part of it that moves gradients into buckets or back, measured
    num_bytes: Integers  # int64 [n], of a collective's transfer; -1: none, or not known

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True)
class Edges:
    """Edges, m of them, ordered by target."""

    source: NDArray[np.int32]  # [m]
    target: NDArray[np.int32]  # [m]
    kind: NDArray[np.uint8]  # [m], an EdgeKind
    lag_ns: Integers  # int64 [m], from the end of the source to the start of the target, at least

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class Boundary:
    """Where the steps of one rank end: on the stream that computes, or on the main thread without a device."""

    rank: int  # as in Lane
    ends: dict[int, int]  # step -> activity with whose end it ends
    start_ns: int  # of the first steady step, measured
    steady: tuple[int, ...]  # numbers of the steps that count, in order
    on_device: bool


@dataclass(frozen=True)
class Graph:
    """The measured steps of one rank or several as activities and edges."""

    lanes: tuple[Lane, ...]
    phases: tuple[str, ...]
    names: tuple[str, ...]  # of operators and kernels
    activities: Activities
    edges: Edges
    boundaries: tuple[Boundary, ...]  # by rank
    clocks_ns: tuple[int, ...] = ()  # by rank, what was added to the times of its trace
    # edges of each kind that measured times contradict: the source ends after the target starts. They are left out.
    contradicted: Mapping[EdgeKind, int] = field(default_factory=dict)
    seen: Mapping[EdgeKind, int] = field(default_factory=dict)  # edges of each kind, those included
    limits: tuple[str, ...] = ()  # what the graph does not hold, a sentence each
    # by rank, for how long the main thread of a step is ready and has no core; 0 where the trace does not say
    core_wait_ns: tuple[float, ...] = ()
    floor_ns: float = 0.0  # a step takes at least so long, for what is not drawn as activities
    beside_ns: float = 0.0  # the mean step takes so much longer, for what only some steps do, as saving

    @property
    def on_device(self) -> bool:
        """Whether a device computes the steps of any rank."""
        return any(boundary.on_device for boundary in self.boundaries)

    @cached_property
    def rank(self) -> NDArray[np.int32]:
        """The rank of each activity, as in Lane: int32 [n]."""
        of_lane = np.array([lane.rank for lane in self.lanes], np.int32)
        return of_lane[self.activities.lane]

    def find_kind(self, *kinds: ActivityKind) -> Flags:
        """Tell for each activity (bool [n]) whether it is of one of the kinds."""
        found: Flags = np.isin(self.activities.kind, kinds)
        return found

    def find_phase(self, *phases: str) -> Flags:
        """Tell for each activity (bool [n]) whether it is in one of the phases; "" is what is in none."""
        numbers = [number for number, name in enumerate(self.phases) if name in phases]
        if "" in phases:
            numbers.append(-1)
        found: Flags = np.isin(self.activities.phase, numbers)
        return found

    def find_cause(self, cause: str) -> Flags:
        """Tell for each activity (bool [n]) whether names tell that it is of a cause, one of CAUSES."""
        found: Flags = self.activities.cause == CAUSES.index(cause)
        return found

    def find_name(self, *names: str) -> Flags:
        """Tell for each activity (bool [n]) whether it is an operator or kernel of one of these names."""
        numbers = [number for number, name in enumerate(self.names) if name in names]
        found: Flags = np.isin(self.activities.name, numbers)
        return found

    def find_edges(self, *kinds: EdgeKind) -> Integers:
        """Numbers of the edges of these kinds."""
        return np.flatnonzero(np.isin(self.edges.kind, kinds))

    @property
    def contradicted_share(self) -> float:
        """The share of edges that measured times contradict, order of threads and streams left out."""
        kinds = set(self.seen) - {EdgeKind.THREAD, EdgeKind.STREAM}
        seen = sum(self.seen[kind] for kind in kinds)
        wrong = sum(self.contradicted.get(kind, 0) for kind in kinds)
        return wrong / seen if seen else 0.0
