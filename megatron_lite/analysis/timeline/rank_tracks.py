"""Tracks of one rank: steps and where they go, phases, threads, streams, collectives, memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.intervals import NOTHING, Cover, Flags, Integers, difference, intersection, union
from megatron_lite.analysis.memory.trace_memory import draw_memory_curve
from megatron_lite.analysis.rank_facts import RankFacts
from megatron_lite.analysis.ranks.calls import SPAN, Calls
from megatron_lite.analysis.time.idle_gaps import find_host_activity
from megatron_lite.analysis.time.range_names import is_backward, known_phase
from megatron_lite.analysis.time.rank_time import find_host_time, find_rows
from megatron_lite.analysis.time.step_windows import find_computing_stream
from megatron_lite.analysis.time.time_results import NO_PHASE, ROW_TITLES
from megatron_lite.analysis.timeline.timeline_results import (
    Argument,
    CounterUnit,
    Counts,
    HostThread,
    NumberArgument,
    Slices,
    TextArgument,
    TimelineProcess,
    Track,
)
from megatron_lite.analysis.timeline.tracks import (
    SingleSlice,
    TrackMaker,
    lay_covers,
    lay_stretches,
    make_text_argument,
    take,
)
from megatron_lite.analysis.trace.columns import DEVICE_KINDS, Kind
from megatron_lite.formats.perfetto_trace import MAX_TID
from megatron_lite.phases import Phase

KIND_NAMES = (
    "operator",
    "annotation",
    "runtime",
    "kernel",
    "memcpy",
    "memset",
    "device annotation",
    "python",
    "synchronization",
    "overhead",
    "other",
)  # by Kind
MAX_SHAPES_TEXT = 200  # characters of an operator's shapes
LAUNCH_FLOWS_OF_RANK = 40  # bits of the numbers of one rank's arrows from launches
FIRST_COLLECTIVE_FLOW = 1 << 62  # those of launches are below
FIRST_MADE_TID = 1 << 30  # of threads whose own numbers are texts, or too large


class Order:
    """Places of a rank's tracks."""

    STEPS = 0
    FINDINGS = 1
    ROWS = 2
    HOST_PHASES = 3
    DEVICE_PHASES = 4
    LOADER = 5
    COLLECTIVES = 6
    COUNTERS = 7
    MAIN_THREAD = 20
    THREADS = 21
    STREAMS = 1000


@dataclass(frozen=True)
class RankTracks:
    """Makes the tracks of one rank."""

    at: int  # place among the ranks
    one: RankFacts
    calls: Calls
    clock_ns: int  # what to add to the trace's times
    process: TimelineProcess
    maker: TrackMaker
    gpu_clock_mhz: float | None  # of its samples, from the process' start on; None: not sampled
    # [c], the number of the collective that each call is the rank's part of, from 1 on; 0: not matched
    collective_ids: Integers
    collective_texts: Sequence[str]  # by that number - 1
    late_ns: Integers  # [c], how much later than the first rank it began; -1: not matched

    def list_contents(self) -> Iterator[Slices | Counts]:
        """Make what stands on the rank's tracks, one track after the other."""
        yield self._lay_steps()
        yield self._lay_rows()
        yield self._lay_host_phases()
        if self.one.time.on_gpu:
            yield self._lay_device_phases()
        yield from self._lay_loader()
        yield from self._lay_collectives()
        yield from self._lay_threads()
        yield from self._lay_device_events()
        yield from self._count_memory()
        yield from self._count_clock()

    # --- steps and phases

    def _lay_steps(self) -> Slices:
        """The steps, on the clock of the device where there is one."""
        stretches = []
        for step in self.one.placing.steps:
            counts = "yes" if step.steady else f"no: {step.why_not}"
            stretch = SingleSlice(
                step.start_ns + self.clock_ns,
                step.end_ns + self.clock_ns,
                step.name,
                {"counts": counts},
            )
            stretches.append(stretch)
        track = self.maker.make_track(self.process, "steps", Order.STEPS)
        return lay_stretches(track, stretches, "step")

    def _lay_rows(self) -> Slices:
        """Where the steady steps go, as the report's rows, which tile them."""
        covers = find_rows(self.one.trace, self.one.placing)
        titled = {ROW_TITLES[row]: cover for row, cover in covers.items() if len(cover)}
        track = self.maker.make_track(
            self.process,
            "where the steps go",
            Order.ROWS,
            description="the rows of the report; they tile the steady steps",
        )
        return lay_covers(track, titled, "row", self.clock_ns)

    def _lay_host_phases(self) -> Slices:
        """Phases of the thread that drives the steps; with what is in none they tile the steps on the host."""
        placing = self.one.placing
        is_step = np.ones(len(placing.steps) + 1, bool)
        # the last entry is for what is in no step
        is_step[-1] = False
        starts = []
        ends = []
        for step in placing.steps:
            on_gpu = self.one.time.on_gpu
            starts.append(step.host_start_ns if on_gpu else step.start_ns)
            ends.append(step.host_end_ns if on_gpu else step.end_ns)
        left = union(starts, ends)
        covers = {}
        for phase, name in enumerate(placing.phases):
            host = find_host_time(self.one.trace, placing, phase, is_step, placing.main_thread)
            covers[name] = intersection(host.cover, left)
            left = difference(left, covers[name])
        covers[NO_PHASE] = left
        cut = {name: cut_at(cover, starts) for name, cover in covers.items()}
        track = self.maker.make_track(
            self.process,
            "phases on the host",
            Order.HOST_PHASES,
            description="the main thread; phases and what is in none tile its steps",
        )
        return lay_covers(track, cut, "phase", self.clock_ns)

    def _lay_device_phases(self) -> Slices:
        """Phases of the stream that computes: from the first of its work to the last before that of another phase."""
        trace = self.one.trace
        events = trace.events
        device, stream = find_computing_stream(trace)
        rows = trace.on_device(trace.device_rows, device)
        rows = rows[events.stream[rows] == stream]
        phase = self.one.placing.phase[rows].astype(np.int64)
        step = self.one.placing.step[rows].astype(np.int64)
        changes_phase = np.diff(phase) != 0
        changes_step = np.diff(step) != 0
        changes = np.flatnonzero(changes_phase | changes_step)
        first = np.concatenate([[0], changes + 1])
        last = np.concatenate([changes, [len(rows) - 1]])
        names = (*self.one.placing.phases, NO_PHASE)
        track = self.maker.make_track(self.process, f"phases on GPU {device}", Order.DEVICE_PHASES)
        return Slices(
            track=track,
            start_ns=events.start_ns[rows[first]] + self.clock_ns,
            end_ns=events.end_ns[rows[last]] + self.clock_ns,
            name=np.where(phase[first] >= 0, phase[first], len(names) - 1),
            names=names,
            category=np.zeros(len(first), np.int64),
            categories=("device phase",),
        )

    def _lay_loader(self) -> Iterator[Slices]:
        """When the host is in the data loader."""
        cover = find_host_activity(self.one.trace, self.one.placing).covers["data_wait"]
        if len(cover):
            track = self.maker.make_track(self.process, "data loader", Order.LOADER)
            yield lay_covers(track, {"host is in the loader": cover}, "loader", self.clock_ns)

    # --- collectives

    def _lay_collectives(self) -> Iterator[Slices]:
        """All that the rank exchanges with others, each with an arrow to the same collective on other ranks."""
        calls = self.calls
        if not len(calls):
            return
        track = self.maker.make_track(self.process, "collectives", Order.COLLECTIVES)
        kinds = make_text_argument("kind", [what.kind for what in calls.whats])
        sizes = []
        for what in calls.whats:
            sizes.append(-1 if what.num_bytes is None else what.num_bytes)
        number = self.collective_ids
        arguments: tuple[Argument, ...] = (
            TextArgument("collective", number - 1, self.collective_texts),
            NumberArgument("bytes", np.array(sizes, np.int64)),
            make_text_argument("phase", calls.phase),
            NumberArgument("begins_ns_after_first_rank", self.late_ns),
        )
        order = np.lexsort((-calls.end_ns, calls.start_ns))
        slices = Slices(
            track=track,
            start_ns=calls.start_ns + self.clock_ns,
            end_ns=calls.end_ns + self.clock_ns,
            name=kinds.text,
            names=kinds.texts,
            category=np.zeros(len(calls), np.int64),
            categories=("collective",),
            flow=np.where(number > 0, number + FIRST_COLLECTIVE_FLOW, 0),
            arguments=arguments,
        )
        yield from self.maker.spread(take(slices, order))

    # --- threads and streams

    def _lay_threads(self) -> Iterator[Slices]:
        """Lay what each thread of the host did."""
        thread = self.one.trace.events.thread
        on_host = self._is_on_host
        for number in np.unique(thread[on_host]).tolist():
            rows = np.flatnonzero(on_host & (thread == number))
            yield from self.maker.spread(self._lay_events(self.thread_tracks[number], rows))

    def _lay_device_events(self) -> Iterator[Slices]:
        """Lay what each stream did; what is no work of a device stands on tracks of its own."""
        for key, track in self.stream_tracks.items():
            rows = np.flatnonzero(self._stream_keys == key)
            yield from self.maker.spread(self._lay_events(track, rows))

    def _lay_events(self, track: Track, rows: Integers) -> Slices:
        """Lay events of the trace on a track. rows: [n], in order."""
        trace = self.one.trace
        events = trace.events
        arguments: list[Argument] = []
        shapes = events.shapes[rows].astype(np.int64)
        if (shapes >= 0).any():
            arguments.append(TextArgument("shapes", shapes, self._shape_texts))
        num_bytes = events.num_bytes[rows]
        if (num_bytes >= 0).any():
            arguments.append(NumberArgument("bytes", num_bytes))
        if not self._is_on_host[rows].all():
            phase = self.one.placing.phase[rows].astype(np.int64)
            arguments.append(TextArgument("phase", phase, self.one.placing.phases))
        return Slices(
            track=track,
            start_ns=events.start_ns[rows] + self.clock_ns,
            end_ns=events.end_ns[rows] + self.clock_ns,
            name=events.name[rows].astype(np.int64),
            names=trace.names,
            category=events.kind[rows].astype(np.int64),
            categories=KIND_NAMES,
            flow=self._launch_flows[rows],
            arguments=tuple(arguments),
        )

    @cached_property
    def _shape_texts(self) -> list[str]:
        """Texts of the trace's shapes."""
        texts = []
        for shapes in self.one.trace.shapes:
            text = str(list(shapes.dims))
            texts.append(text[:MAX_SHAPES_TEXT])
        return texts

    @cached_property
    def _is_on_host(self) -> Flags:
        """Tell for each event of the trace whether a thread of the host made it."""
        events = self.one.trace.events
        on_host: Flags = (events.device < 0) & ~np.isin(events.kind, (*DEVICE_KINDS, Kind.GPU_ANNOTATION))
        return on_host

    @cached_property
    def _launch_flows(self) -> Integers:
        """Numbers of arrows from launches to the first work that each one launched; int64 [events], 0: none."""
        trace = self.one.trace
        flow = np.zeros(len(trace.events), np.int64)
        rows = trace.device_rows
        launched = rows[trace.launch_of[rows] >= 0]
        launches, first = np.unique(trace.launch_of[launched], return_index=True)
        numbers = launches + ((self.at + 1) << LAUNCH_FLOWS_OF_RANK)
        flow[launches] = numbers
        flow[launched[first]] = numbers
        return flow

    @cached_property
    def thread_tracks(self) -> dict[int, Track]:
        """Tracks of the host's threads, by index into Trace.threads."""
        on_host = self._is_on_host
        used = np.unique(self.one.trace.events.thread[on_host]).tolist()
        names = self._name_threads(used)
        main = self.one.placing.main_thread
        tids = choose_numbers([self.one.trace.threads[number][1] for number in used])
        tracks = {}
        for place, (number, tid) in enumerate(zip(used, tids)):
            order = Order.MAIN_THREAD if number == main else Order.THREADS + place
            thread = HostThread(self.process.pid, tid)
            tracks[number] = self.maker.make_track(self.process, names[number], order, thread)
        return tracks

    def _name_threads(self, used: Sequence[int]) -> dict[int, str]:
        """Name threads by what they do."""
        trace = self.one.trace
        thread = trace.events.thread
        names = {}
        backend_rows = self.calls.rows[self._is_on_host[self.calls.rows]]
        backend_of: dict[int, str] = {}
        for row in backend_rows.tolist():
            found = SPAN.match(trace.name_of(row))
            backend_of.setdefault(int(thread[row]), found[1] if found else "")
        of_autograd = set(thread[is_backward(trace) & self._is_on_host].tolist())
        loads = trace.find_named(lambda name: known_phase(name) is Phase.DATA, Kind.ANNOTATION)
        of_loader = set(thread[loads].tolist())
        for number in used:
            written = str(trace.threads[number][1])
            # the picture shows a thread's number beside its name
            name = "thread" if written.isdecimal() else written
            if number == self.one.placing.main_thread:
                name = "main thread"
            elif backend_of.get(number):
                name = f"collectives of {backend_of[number]}"
            elif number in of_autograd:
                name = "autograd"
            elif number in of_loader:
                name = "data loader"
            names[number] = name
        return names

    @cached_property
    def _stream_keys(self) -> Integers:
        """The stream of each event of a device as one number, odd for what is no work; int64 [events], -1: of the
        host."""
        events = self.one.trace.events
        is_no_work = ~np.isin(events.kind, DEVICE_KINDS)
        device = events.device.astype(np.int64) + 1
        stream = events.stream.astype(np.int64) + 1
        keys = (device << 34) + (stream << 1) + np.where(is_no_work, 1, 0)
        return np.where(self._is_on_host, -1, keys)

    @cached_property
    def stream_tracks(self) -> dict[int, Track]:
        """Tracks of the devices' streams, by stream key."""
        tracks = {}
        for place, key in enumerate(np.unique(self._stream_keys[~self._is_on_host]).tolist()):
            device = (key >> 34) - 1
            stream = ((key >> 1) & ((1 << 33) - 1)) - 1
            name = f"GPU {device} stream {stream}"
            if key & 1:
                name += ": ranges and synchronizations"
            tracks[key] = self.maker.make_track(self.process, name, Order.STREAMS + place)
        return tracks

    def find_track(self, row: int) -> Track:
        """Find the track on which an event of the trace stands."""
        if self._is_on_host[row]:
            return self.thread_tracks[int(self.one.trace.events.thread[row])]
        return self.stream_tracks[int(self._stream_keys[row])]

    # --- counters

    def _count_memory(self) -> Iterator[Counts]:
        """Memory of each device, as the profiler counted it."""
        memory = self.one.trace.memory
        for device in np.unique(memory.device).tolist():
            curve = draw_memory_curve(self.one.trace, device)
            where = "the host" if device < 0 else f"GPU {device}"
            time_ns = memory.time_ns[curve.rows] + self.clock_ns
            since = "" if curve.total_is_given else ", as far as the trace saw it"
            yield self._count(f"memory allocated on {where}{since}", CounterUnit.BYTES, time_ns, curve.allocated)
            reserved = memory.total_reserved[curve.rows]
            if (reserved > 0).any():
                yield self._count(f"memory reserved on {where}", CounterUnit.BYTES, time_ns, np.maximum(reserved, 0))

    def _count_clock(self) -> Iterator[Counts]:
        """The mean clock of the GPU's multiprocessors, as a level from the first recorded step to the last."""
        steps = self.one.placing.steps
        if self.gpu_clock_mhz is None or not steps:
            return
        time_ns = np.array([steps[0].start_ns, steps[-1].end_ns]) + self.clock_ns
        values = np.full(2, self.gpu_clock_mhz)
        yield self._count("GPU clock, mean of the run", CounterUnit.MEGAHERTZ, time_ns, values)

    def _count(self, name: str, unit: CounterUnit, time_ns: Integers, values: Integers) -> Counts:
        """Make a counter of the rank.

        Args:
            name: of its track.
            unit: of its values.
            time_ns: [m], on the clock of all ranks.
            values: [m].
        """
        track = self.maker.make_track(self.process, name, Order.COUNTERS, counter=unit)
        return Counts(track, time_ns, values)


def choose_numbers(written: Sequence[str]) -> list[int]:
    """Choose a number for each thread or process: its own where it has one that no other has."""
    chosen: list[int] = []
    for place, text in enumerate(written):
        number = int(text) if str(text).isdecimal() else 0
        if not 0 < number <= MAX_TID or number in chosen:
            number = FIRST_MADE_TID + place
        chosen.append(number)
    return chosen


def cut_at(cover: Cover, moments: Sequence[int]) -> Cover:
    """Cut the intervals of a cover at some moments: they then touch each other there."""
    inner = np.array(moments, np.int64)
    inner = inner[cover.holds(inner)]
    if not len(inner):
        return cover if len(cover) else NOTHING
    start = np.unique(np.concatenate([cover.start, inner]))
    end = np.unique(np.concatenate([cover.end, inner[~np.isin(inner, cover.start)]]))
    return Cover(start, end)
