"""The trace of a process as columns: a row per event, the same whoever wrote the file.

Writers are PyTorch of any year and Nsight Systems.

Times are whole nanoseconds since the trace's first event; -1 stands for "not given" in every column of ids.
"""

import enum
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.core_use import CoreUse
from megatron_lite.analysis.intervals import Cover, Flags, Integers, Nesting, Numbers, union
from megatron_lite.errors import UserError
from megatron_lite.formats.hardware_record import HardwareFigures
from megatron_lite.formats.run_record import MAX_RANKS

Key = TypeVar("Key", bound=Hashable)


class TraceError(UserError):
    """The file is no trace, or holds nothing to analyze. One line: the file, what it is, the remedy."""


class Numbered(dict[Key, int]):
    """Numbers of values, in the order of first appearance."""

    def __missing__(self, value: Key) -> int:
        self[value] = number = len(self)
        return number


class Kind(enum.IntEnum):
    """Kinds of events. Device work: KERNEL, MEMCPY, MEMSET.

    Old and new category names of a file map to the same kind.
    """

    OP = 0  # an operator on the host: aten::mm, autograd::engine::evaluate_function: ...
    ANNOTATION = 1  # a range that code named: ProfilerStep#5, forward, nccl:all_reduce, enumerate(DataLoader)#...
    RUNTIME = 2  # a call of the CUDA runtime or driver: cudaLaunchKernel, cudaStreamSynchronize
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5
    GPU_ANNOTATION = 6  # what the profiler derives from ANNOTATION for the device; known to be wrong for backward
    PYTHON = 7  # a Python frame
    SYNC = 8  # cuda_sync: what a stream or the host waited for
    OVERHEAD = 9  # the profiler's own
    OTHER = 10


DEVICE_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
HOST_KINDS = (Kind.OP, Kind.ANNOTATION, Kind.RUNTIME, Kind.PYTHON)
# The name of a KERNEL that stands for a whole CUDA graph, of whose kernels the writer says nothing.
WHOLE_GRAPH = re.compile(r"CUDA graph -?\d+$")


@dataclass(frozen=True)
class Shapes:
    """Arguments of an operator as the profiler saw them (record_shapes). Equal ones are one object."""

    dims: tuple[Any, ...]  # one tuple of ints per argument, () for what is no tensor; lists of tensors are nested
    dtypes: tuple[str, ...]  # "c10::BFloat16", "float", "Scalar", "" ...
    output_mask: tuple[bool, ...] = ()  # which results a backward operator computes; () if not known


@dataclass(frozen=True)
class Collective:
    """Facts that a communication event tells of itself; None for what its writer left out."""

    name: str | None  # "allreduce", "_allgather_base"
    group: str | None  # process group name
    group_size: int | None
    in_elements: int | None
    out_elements: int | None
    dtype: str | None  # "Float", "BFloat16"
    sequence: int | None
    peer: int | None = None  # the other rank of a send or a receive


@dataclass(frozen=True)
class ProcessGroup:
    """Ranks that communicate with each other."""

    name: str
    description: str = ""  # "mesh_tp", "DATA_PARALLEL_GROUP", ...
    ranks: tuple[int, ...] = ()  # () if unknown


@dataclass(frozen=True)
class Events:
    """Events of a trace, n ordered by start.

    Where starts are equal the longer one is first, so that a parent stands before its children.
    """

    name: NDArray[np.int32]  # [n], index into Trace.names
    kind: NDArray[np.uint8]  # [n], a Kind
    start_ns: NDArray[np.int64]  # [n]
    end_ns: NDArray[np.int64]  # [n], >= start_ns
    thread: NDArray[np.int32]  # [n], index into Trace.threads; a device event's is its stream's row, of no use
    device: NDArray[np.int16]  # [n], GPU of device work; -1 for host events
    stream: NDArray[np.int32]  # [n], CUDA stream of device work; -1 for host events
    correlation: NDArray[np.int64]  # [n], joins a RUNTIME call with the device work that it launched
    num_bytes: NDArray[np.int64]  # [n], of copies and memsets
    shapes: NDArray[np.int32]  # [n], index into Trace.shapes
    collective: NDArray[np.int32]  # [n], index into Trace.collectives
    sequence: NDArray[np.int64]  # [n], autograd's sequence number of OP: forward op and its backward have the same
    forward_thread: NDArray[np.int64]  # [n], > 0 marks an op of the backward pass ("Fwd thread id")

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True)
class MemoryEvents:
    """The profiler's "[memory]" instants (profile_memory), ordered by time."""

    time_ns: NDArray[np.int64]  # [m]
    num_bytes: NDArray[np.int64]  # [m], negative for a free
    total_allocated: NDArray[np.int64]  # [m], after it; -1: not given
    total_reserved: NDArray[np.int64]  # [m]
    device: NDArray[np.int16]  # [m], -1: host

    def __len__(self) -> int:
        return len(self.time_ns)


def make_no_memory_events() -> MemoryEvents:
    """The memory events of a trace without any."""
    none = np.empty(0, np.int64)
    return MemoryEvents(none, none, none, none, none.astype(np.int16))


@dataclass(frozen=True)
class CounterSamples:
    """Samples of counters in devices, m in the file's order. A sample stands for the time until the next one."""

    names: tuple[str, ...] = ()  # as written: "SM Active (%)", "dram__throughput.avg.pct_of_peak_sustained_elapsed"
    name: Integers = field(default_factory=lambda: np.empty(0, np.int64))  # [m], index into names
    device: Integers = field(default_factory=lambda: np.empty(0, np.int64))  # [m]
    time_ns: Integers = field(default_factory=lambda: np.empty(0, np.int64))  # [m], when it began
    value: Numbers = field(default_factory=lambda: np.empty(0, np.float64))  # [m], in the unit that the name gives

    def __len__(self) -> int:
        return len(self.time_ns)


@dataclass(frozen=True)
class Trace:
    """Events of a process, and what its file says about the machine."""

    source: str  # the file's name, for people
    writer: str  # "pytorch" or "nsys"
    rank: int | None
    world_size: int | None
    devices: tuple[str, ...]  # GPU names by index; () without one
    base_ns: int | None  # the first event's time on a clock shared by ranks, where the file has one
    with_stack: bool
    with_shapes: bool
    names: tuple[str, ...]
    threads: tuple[tuple[str, str], ...]  # (pid, tid) as written
    shapes: tuple[Shapes, ...]
    collectives: tuple[Collective, ...]
    events: Events
    memory: MemoryEvents
    notes: tuple[str, ...] = ()  # named gaps: what this file lacks or where it is damaged, a sentence each
    damage: tuple[str, ...] = ()  # those of the notes that tell of missing events
    unread: tuple[str, ...] = ()  # work of a device that the file holds and no reader reads, a sentence each
    diagnostics: tuple[str, ...] = ()  # what the writer itself says of this record: its warnings, most severe first
    cut: bool = False  # the file, or what was read of it, ends before the record does
    without_gpu: bool = False  # the header says that there was none; False: nothing is said, or there was one
    device_ids: tuple[int, ...] = ()  # numbers of `devices` by their header; () for 0, 1, ...
    groups: tuple[ProcessGroup, ...] = ()  # all that the process is in; () if the file does not say
    # header values worth showing: distributed backend, NCCL version, ...
    facts: dict[str, Any] = field(default_factory=dict)
    hardware: HardwareFigures | None = None  # samples of the rank's clocks and errors; None: the file has none
    counters: CounterSamples = field(default_factory=CounterSamples)  # of CUPTI's PM sampling, where it was recorded
    cores: CoreUse | None = None  # what the process got of the cores in the recorded steps; None: the file does not say

    @property
    def least_world_size(self) -> int | None:
        """The number of ranks, or what it is at least where the file does not say: by its collectives' groups."""
        if self.world_size is not None or not self.collectives:
            return self.world_size
        sizes = [one.group_size or 0 for one in self.collectives]
        least = max(max(sizes), (self.rank or 0) + 1)
        return least if 1 < least <= MAX_RANKS else None

    def name_of(self, event: int) -> str:
        return self.names[int(self.events.name[event])]

    def name_device(self, device: int) -> str | None:
        """The name of the device with that number in the events; None where the header does not say.

        Events may count the machine's devices and the header those that the process sees, as under ROCm. Then it is
        known only if all devices of the header have the same name.
        """
        ids = self.device_ids or tuple(range(len(self.devices)))
        numbered = zip(ids, self.devices)
        own = {name for number, name in numbered if number == device}
        names = own or set(self.devices)
        if len(names) != 1:
            return None
        (name,) = names
        return name or None

    @cached_property
    def rows(self) -> dict[Kind, Integers]:
        """Rows of each kind, in order of start."""
        return {kind: np.flatnonzero(self.events.kind == kind) for kind in Kind}

    def on_thread(self, rows: Integers, thread: int) -> Integers:
        """Choose those of the events `rows` that are on the thread, in their order."""
        is_on_thread = self.events.thread[rows] == thread
        chosen: Integers = rows[is_on_thread]
        return chosen

    def on_device(self, rows: Integers, device: int) -> Integers:
        """Choose those of the events `rows` that are work of the device, in their order."""
        is_on_device = self.events.device[rows] == device
        chosen: Integers = rows[is_on_device]
        return chosen

    def lengths_ns(self, rows: Integers) -> Integers:
        """Measure how long each of the events `rows` lasts: int64 [k], ns."""
        return self.events.end_ns[rows] - self.events.start_ns[rows]

    def position_in(self, nest: Nesting, rows: Integers) -> Integers:
        """Find the position in `nest` of the innermost range around the start of each event: int64 [k]; -1: none."""
        start = self.events.start_ns[rows]
        thread = self.events.thread[rows]
        return nest.position_at(start, thread)

    def within(self, cover: Cover, rows: Integers) -> Integers:
        """Measure for how many ns the cover lasts inside each of the events `rows`: int64 [k]."""
        start = self.events.start_ns[rows]
        end = self.events.end_ns[rows]
        return cover.within(start, end)

    @cached_property
    def device_rows(self) -> Integers:
        """Rows of kernels, copies and memsets, in order of start."""
        return np.flatnonzero(np.isin(self.events.kind, DEVICE_KINDS))

    @cached_property
    def launch_of(self) -> Integers:
        """Find for each event the row of the RUNTIME call with its correlation.

        It is -1 for none, and for what is no device work.
        """
        correlation = self.events.correlation
        launch = np.full(len(self.events), -1, np.int64)
        calls = self.rows[Kind.RUNTIME]
        calls = calls[correlation[calls] >= 0]
        if not len(calls):
            return launch
        calls = calls[np.argsort(correlation[calls], kind="stable")]
        ids = correlation[calls]
        wanted = correlation[self.device_rows]
        # the place of each wanted id among the sorted ones, if it is there at all
        at = np.searchsorted(ids, wanted)
        at = np.minimum(at, len(ids) - 1)
        is_found = (ids[at] == wanted) & (wanted >= 0)
        launch[self.device_rows] = np.where(is_found, calls[at], -1)
        return launch

    @cached_property
    def names_of(self) -> dict[Kind, Integers]:
        """Numbers of the distinct names of each kind's events."""
        found: dict[Kind, Integers] = {}
        for kind, rows in self.rows.items():
            times = np.bincount(self.events.name[rows], minlength=len(self.names))
            found[kind] = np.flatnonzero(times)
        return found

    def passing(self, test: Callable[[str], object], *kinds: Kind) -> Flags:
        """Tell for each name (bool) whether events of these kinds have it, and it passes `test(name)`.

        Names of other kinds are not asked: traces with stacks have many more names of Python functions than of all
        else.
        """
        passes = np.zeros(len(self.names), bool)
        for kind in kinds:
            numbers = self.names_of[kind]
            answers = (bool(test(self.names[number])) for number in numbers)
            passes[numbers] = np.fromiter(answers, bool, len(numbers))
        return passes

    def find_named(self, test: Callable[[str], object], kind: Kind) -> Integers:
        """Rows of the events of the kind whose names pass `test(name)`, in order of start."""
        rows = self.rows[kind]
        passes = self.passing(test, kind)
        return rows[passes[self.events.name[rows]]]

    def matching(self, test: Callable[[str], object]) -> Flags:
        """Tell for each event (bool) whether its name passes `test(name)`. Each distinct name is asked once."""
        answers = (bool(test(name)) for name in self.names)
        passes = np.fromiter(answers, bool, len(self.names))
        return passes[self.events.name]

    def cover(self, rows: Integers | Flags) -> Cover:
        """When any event of `rows` (numbers, or a bool per event) lasts."""
        start = self.events.start_ns[rows]
        end = self.events.end_ns[rows]
        return union(start, end)

    def nest(self, rows: Integers) -> Nesting:
        """The events `rows` as stacks of ranges, one per thread."""
        events = self.events
        return Nesting(
            rows,
            start=events.start_ns[rows],
            end=events.end_ns[rows],
            thread=events.thread[rows],
        )


def build_events(columns: dict[str, NDArray[Any]]) -> tuple[Events, list[str]]:
    """Build events of their columns. Empties `columns`, so that nothing is held twice for long.

    Device work is clipped where it overlaps the next on its stream: a writer that does not measure its end gives it a
    length that is too long (AMD-AGI/TraceLens#669).

    Args:
        columns: those of Events, in the order of the file.

    Returns:
        The events, ordered by start, and notes of what was mended.
    """
    order = _order_by_start(columns["start_ns"], columns["end_ns"])
    ordered = {name: columns.pop(name)[order] for name in list(columns)}
    events = Events(**ordered)
    clipped = _clip_device_work(events)
    if not clipped:
        return events, []
    note = f"GPU operations that ran into the next one of their stream: {clipped:,}, counted up to its start"
    return events, [note]


def _order_by_start(start: Integers, end: Integers) -> Integers:
    """Order by start, the longer one first where starts are equal; in the file's order where ends are equal too."""
    order = np.argsort(start, kind="stable")
    equal = np.flatnonzero(np.diff(start[order]) == 0)
    if len(equal):
        # only those with the same start as another are sorted by two keys, which takes longer
        tied = np.unique(np.concatenate([equal, equal + 1]))
        rows = order[tied]
        by_length = np.lexsort((-end[rows], start[rows]))
        order[tied] = rows[by_length]
    return order


def _clip_device_work(events: Events) -> int:
    """End each piece of device work where the next one on its stream begins, and count those that ended later."""
    rows = np.flatnonzero(np.isin(events.kind, DEVICE_KINDS))
    # a thread here is a stream's row in the file: of each process' own where traces of several were merged
    stream = (events.stream[rows], events.device[rows], events.thread[rows])
    rows = rows[np.lexsort((rows, *stream))]
    earlier = rows[:-1]
    later = rows[1:]
    is_same_stream = np.ones(len(later), bool)
    for column in (events.stream, events.device, events.thread):
        is_same_stream &= column[earlier] == column[later]
    overlaps = events.end_ns[earlier] > events.start_ns[later]
    is_too_long = is_same_stream & overlaps
    events.end_ns[earlier[is_too_long]] = events.start_ns[later[is_too_long]]
    return int(is_too_long.sum())
