"""The collectives of one rank's trace, in order: NCCL's kernels on a GPU, gloo's spans on the host without one."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import NOTHING, Cover, Flags, Integers, Nesting, difference
from megatron_lite.analysis.kernels.kernel_words import is_communication, is_wait
from megatron_lite.analysis.ranks.handed_over import pair_with_operators
from megatron_lite.analysis.ranks.process_groups import CALLER, find_group, guess_dimension
from megatron_lite.analysis.ranks.rank_results import OTHER
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Collective, Kind, ProcessGroup, Shapes, Trace

# --- what a collective is, by the names that PyTorch, NCCL and gloo give it; how many bytes count for its bandwidth

# Squashed to letters and digits: "nccl:_all_gather_base", "ncclDevKernel_AllGather_RING_LL", "allgather_into_tensor".
# In order.
_KINDS = (
    # of tokens among experts: DeepEP and its kin
    ("dispatch", r"dispatch"),
    ("combine", r"combine"),
    ("all_reduce", r"allreduce|crossdevicereduce(?!scatter)|userbuffers\w*suminplace"),
    ("all_gather", r"allgather"),
    ("reduce_scatter", r"reducescatter"),
    ("all_to_all", r"alltoall|all2all"),
    ("broadcast", r"broadcast|bcast"),
    ("barrier", r"barrier"),
    ("send_recv", r"sendrecv"),
    ("send", r"send"),
    ("recv", r"recv"),
    ("gather", r"gather"),
    ("scatter", r"scatter"),
    ("reduce", r"reduce"),
)
POINT_TO_POINT = ("send_recv", "send", "recv")
# all ranks leave them at the same moment, since each needs something of every other
END_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
MAX_BYTES = 2**50  # a petabyte in one message: a damaged file
_ALGORITHM = re.compile(
    r"(?<![a-z])(ring|tree|collnet_?direct|collnet_?chain|collnet|nvls_?tree|nvls|pat)(?![a-z])", re.IGNORECASE
)
_PROTOCOL = re.compile(r"(?<![a-z])(ll128|ll|simple)(?![a-z0-9])", re.IGNORECASE)
_WIDTHS = (
    (8, r"double|long|int64|uint64|float64|complexfloat|complex64"),
    (2, r"half|bfloat16|float16|short|int16|bf16|fp16"),
    (1, r"float8|fp8|byte|char|bool|int8|e4m3|e5m2"),
    (4, r"float|int"),
)


def find_collective_kind(name: str) -> str:
    """all_reduce, all_gather, ...; "other" for what no pattern knows."""
    plain = re.sub(r"[^a-z0-9]", "", name[:400].lower())
    return next((kind for kind, pattern in _KINDS if re.search(pattern, plain)), OTHER)


def find_algorithm(kernel: str) -> str:
    """'ring, LL128' from ncclKernel_AllReduce_RING_LL128_Sum_float; "" for names that do not say,
    and of other libraries."""
    if not re.search("[nr]ccl", kernel[:400], re.IGNORECASE):
        return ""
    name = kernel.partition("(")[0][:400]
    algorithm, protocol = _ALGORITHM.search(name), _PROTOCOL.search(name)
    words = [algorithm[1].lower() if algorithm else "", protocol[1].upper() if protocol else ""]
    return ", ".join("simple" if word == "SIMPLE" else word for word in words if word)


def dtype_bytes(dtype: str) -> int | None:
    """Width of one element, of names as in "Float", "c10::BFloat16", "long int"; None if unknown."""
    plain = re.sub(r"[^a-z0-9]", "", dtype[:60].lower())
    return next((width for width, pattern in _WIDTHS if re.search(pattern, plain)), None)


def message_bytes(
    kind: str, what: Collective | None, shapes: Shapes | None, ranks: int | None
) -> tuple[int | None, str]:
    """(bytes, dtype) of one collective as NCCL's tests count them: the larger side of a gather or scatter, the buffer
    of the others. None where the trace does not say. `shapes`: of the annotation around the launch, in older traces."""
    elements, dtype = None, ""
    if what:
        given, taken, dtype = what.in_elements, what.out_elements, what.dtype or ""
        if kind in ("all_gather", "reduce_scatter"):
            whole, part = (taken, given) if kind == "all_gather" else (given, taken)
            elements = whole or (part * ranks if part is not None and ranks else None)
        else:
            elements = given if given is not None else taken
    elif shapes:
        tensors = (
            pair
            for pair in zip(shapes.dims, shapes.dtypes)
            if pair[0] and all(isinstance(size, int) for size in pair[0])
        )
        dims, dtype = next(tensors, ((), ""))
        if dims:
            elements = math.prod(dims)
            if kind == "all_gather":
                elements = elements * ranks if ranks else None
    width = dtype_bytes(dtype)
    num_bytes = elements * width if elements is not None and width else -1
    return (num_bytes if 0 <= num_bytes < MAX_BYTES else None), dtype


def bus_bytes(kind: str, num_bytes: int, ranks: int) -> float:
    """Bytes that each link must carry: nccl-tests' doc/PERFORMANCE.md. Divided by the time it is the bus bandwidth."""
    if kind == "all_reduce":
        return num_bytes * 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return num_bytes * (ranks - 1) / ranks
    return float(num_bytes)


# --- the collectives of a trace

MAX_SEQUENCE = 2**40
HANDED_OVER = re.compile(r"c10d::(?!wait|send|recv)\w+")  # sends and receives have their spans in their own thread
SPAN = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl|rccl):")
_PEER = re.compile(r"(?:send|recv) \d+(?:->|<-)(\d+)")  # "nccl:send 0->1", positions in the group


@dataclass(frozen=True)
class What:
    """What a collective is, apart from when it ran."""

    kind: str
    algorithm: str
    num_bytes: int | None
    dtype: str
    group: ProcessGroup
    group_size: int | None
    # of what is exchanged with single ranks: (send or recv, the other rank), several where one kernel does them at once
    transfers: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Calls:
    """c collectives of one rank by start, on the trace's own clock."""

    rank: int | None
    rows: Integers  # [c], the trace's events
    whats: tuple[What, ...]  # [c]; equal ones are one object
    start_ns: NDArray[np.int64]  # [c]
    end_ns: NDArray[np.int64]  # [c]
    step: NDArray[np.int32]  # [c], index into the placing's steps; -1: none
    phase: tuple[str, ...]  # [c]
    sequence: NDArray[np.int64]  # [c], -1: not given
    compute: Cover  # what may hide them
    called_ns: NDArray[np.int64]  # [c], when the host called it
    is_in_order: bool  # called_ns is the order of the program: of every call the host's is known

    def __len__(self) -> int:
        return len(self.start_ns)

    @cached_property
    def exposed_ns(self) -> Integers:
        """int64 [c]: of each, what no compute runs beside."""
        exposed: Integers = self.end_ns - self.start_ns - self.compute.within(self.start_ns, self.end_ns)
        return exposed


def collect_calls(trace: Trace, placing: Placing, world_size: int | None) -> Calls:
    """All that communicates in the trace.

    `world_size`: how many take part where the trace does not say and kind needs it.
    """
    found = _find_kernels(trace) if len(trace.rows[Kind.KERNEL]) else _find_spans(trace)
    phases = tuple(placing.phases[at] if at >= 0 else "" for at in placing.phase[found.called])
    places = _find_places(trace, found.called, phases)
    return Calls(
        rank=trace.rank,
        rows=found.rows,
        whats=_describe_calls(trace, found.rows, found.around, found.records, world_size, places),
        start_ns=trace.events.start_ns[found.rows],
        end_ns=trace.events.end_ns[found.rows],
        step=placing.step[found.called],
        phase=phases,
        sequence=_read_sequences(trace)[found.records],
        compute=found.compute,
        called_ns=found.called_ns,
        is_in_order=found.is_in_order,
    )


@dataclass(frozen=True)
class _Found:
    """c collectives of a trace before they are described."""

    rows: Integers  # [c], the trace's events
    called: Integers  # [c], rows of the events that tell step and phase
    called_ns: NDArray[np.int64]  # [c], when the host called them
    is_in_order: bool  # called_ns is the order of the program
    compute: Cover  # what may hide them
    around: Integers  # [c], rows of the backend's ranges around their launches; -1: none
    records: Integers  # [c], indices into the trace's collectives; -1: none


def _find_kernels(trace: Trace) -> _Found:
    """The kernels that communicate."""
    events = trace.events
    kernels = trace.rows[Kind.KERNEL]
    communicates = trace.matching(is_communication)[kernels]
    rows = kernels[communicates]
    others = kernels[~communicates]
    launches = trace.launch_of[rows]
    around, records = _find_descriptions(trace, rows)
    return _Found(
        rows=rows,
        called=rows,
        called_ns=events.start_ns[np.where(launches >= 0, launches, rows)],
        is_in_order=bool((launches >= 0).all()),
        compute=trace.cover(others) if len(rows) else NOTHING,
        around=around,
        records=records,
    )


def _find_spans(trace: Trace) -> _Found:
    """The spans of backends on the host, in a trace without a GPU."""
    events = trace.events
    annotations = trace.rows[Kind.ANNOTATION]
    rows = annotations[trace.matching(SPAN.match)[annotations]]
    # spans of a backend's own threads were handed over by operators
    operators = trace.rows[Kind.OP]
    handing_over = operators[trace.matching(HANDED_OVER.match)[operators]]
    handed_over = ~np.isin(events.thread[rows], events.thread[handing_over])
    called = rows.copy()
    paired, is_in_order = pair_with_operators(trace, rows[handed_over], handing_over)
    if paired is not None:
        called[handed_over] = paired
    return _Found(
        rows=rows,
        called=called,
        called_ns=events.start_ns[called],
        is_in_order=is_in_order,
        compute=_cover_operators(trace, events.thread[rows[handed_over]]) if len(rows) else NOTHING,
        # a span says itself what it is, and others that are under way lie around it
        around=np.full(len(rows), -1),
        records=events.collective[rows],
    )


def _cover_operators(trace: Trace, threads: Integers) -> Cover:
    """When operators compute. threads: those of a backend, whose operators belong to collectives."""
    operators = trace.rows[Kind.OP]

    def find(test: Callable[[str], object]) -> Flags:
        return trace.matching(test)[operators]

    communicates = find(is_communication) | find(lambda name: name.startswith(("c10d::", "record_param_comms")))
    computes = ~communicates & ~np.isin(trace.events.thread[operators], threads)
    # whatever called what waits does nothing meanwhile
    return difference(trace.cover(operators[computes]), trace.cover(operators[find(is_wait)]))


def _read_sequences(trace: Trace) -> NDArray[np.int64]:
    """The sequence number of each of the trace's collectives; -1: none.

    The last entry is for -1, what has no record.
    """
    given = [-1 if one.sequence is None else one.sequence for one in trace.collectives] + [-1]
    return np.array([one if 0 <= one < MAX_SEQUENCE else -1 for one in given], np.int64)


def collective_bytes(trace: Trace, rows: Integers, world_size: int | None) -> Integers:
    """float64 [k]: of each of these collectives; NaN where the trace does not say."""
    nowhere = [("", "")] * len(rows)
    whats = _describe_calls(trace, rows, *_find_descriptions(trace, rows), world_size, nowhere)
    return np.array([np.nan if what.num_bytes is None else what.num_bytes for what in whats], float)


def _find_descriptions(trace: Trace, rows: Integers) -> tuple[Integers, Integers]:
    """For every collective the row of the backend's range around its launch, and the index of the Collective that tells
    of it: its own, else that of the operator around the launch; -1 for none."""
    events, launch = trace.events, trace.launch_of[rows]
    at = np.where(launch >= 0, launch, rows)

    def find_around(spans: Integers) -> Integers:
        nesting = Nesting(spans, events.start_ns[spans], events.end_ns[spans], events.thread[spans])
        return np.asarray(nesting.row_at(events.start_ns[at], events.thread[at]))

    annotations = trace.rows[Kind.ANNOTATION]
    around = find_around(annotations[trace.matching(SPAN.match)[annotations]])
    operator = find_around(np.flatnonzero((events.kind == Kind.OP) & (events.collective >= 0)))
    of_operator = np.where(operator >= 0, events.collective[np.maximum(operator, 0)], -1)
    return around, np.where(events.collective[rows] >= 0, events.collective[rows], of_operator)


def _find_places(trace: Trace, called: Integers, phases: Sequence[str]) -> list[tuple[str, str]]:
    """(name of the span of a layer around it, phase) of each call: what tells groups apart where no record does."""
    if len(trace.groups) < 2:
        return [("", "")] * len(called)
    events = trace.events
    spans = np.flatnonzero(trace.matching(CALLER.search) & np.isin(events.kind, (Kind.OP, Kind.ANNOTATION)))
    nesting = Nesting(spans, events.start_ns[spans], events.end_ns[spans], events.thread[spans])
    found = nesting.row_at(events.start_ns[called], events.thread[called]).tolist()
    return [(trace.names[events.name[at]] if at >= 0 else "", phase) for at, phase in zip(found, phases)]


class _Traits(NamedTuple):
    """What the trace says of a call. Calls with the same traits are described once."""

    name: int  # number of the event's name
    span: int  # number of the name of the backend's range around the launch; -1: none
    shapes: int  # index into the trace's shapes; -1: none
    told: tuple[Collective, ...]  # what records say, several where one kernel does several at once
    place: tuple[str, str]  # _find_places


def _describe_calls(
    trace: Trace,
    rows: Integers,
    around: Integers,
    records: Integers,
    world_size: int | None,
    places: list[tuple[str, str]],
) -> tuple[What, ...]:
    """Describe what each of the collectives `rows` is.

    Args:
        trace: the trace.
        rows: [c], the collectives.
        around: [c], rows of the backend's ranges around their launches; -1: none.
        records: [c], indices into the trace's collectives; -1: none.
        world_size: how many ranks take part where nothing else says it.
        places: [c], where each was called (_find_places).
    """
    events = trace.events
    spans = np.where(around >= 0, events.name[around], -1)
    own_shapes = events.shapes[rows]
    shapes_around = np.where(around >= 0, events.shapes[around], -1)
    shapes = np.where(own_shapes >= 0, own_shapes, shapes_around)
    groups = {group.name: group for group in trace.groups}
    batches = _find_batches(trace, rows, records)
    columns = (events.name[rows].tolist(), spans.tolist(), shapes.tolist(), records.tolist(), batches, places)
    known: dict[_Traits, What] = {}
    whats = []
    for name, span, shape, record, batch, place in zip(*columns):
        told = tuple(replace(trace.collectives[one], sequence=None) for one in batch or (record,) if one >= 0)
        traits = _Traits(name, span, shape, told, place)
        if traits not in known:
            known[traits] = _describe_call(trace, traits, groups, world_size)
        whats.append(known[traits])
    return tuple(whats)


def _describe_call(trace: Trace, traits: _Traits, groups: dict[str, ProcessGroup], world_size: int | None) -> What:
    """Describe one call. groups: the trace's by name."""
    record = traits.told[0] if traits.told else None
    kind = _name_kind(trace, traits)
    group = _find_group_of_call(trace, traits, kind, groups)
    group_size = record.group_size if record and (record.group_size or 0) > 0 else len(group.ranks) or None
    shapes = trace.shapes[traits.shapes] if traits.shapes >= 0 else None
    num_bytes, dtype = message_bytes(kind, record, shapes, group_size or world_size)
    transfers: tuple[tuple[str, int], ...] = ()
    if kind in POINT_TO_POINT:
        position = _PEER.search(trace.names[traits.span]) if traits.span >= 0 else None
        transfers = _find_transfers(kind, traits.told, group, trace.rank, int(position[1]) if position else None)
    if len(traits.told) > 1:
        kind = "send_recv"
        num_bytes = _larger_direction(traits.told)
    return What(
        kind=kind,
        algorithm=find_algorithm(trace.names[traits.name]),
        num_bytes=num_bytes,
        dtype=dtype,
        group=group,
        group_size=group_size,
        transfers=transfers,
    )


def _name_kind(trace: Trace, traits: _Traits) -> str:
    """The kind by the most telling name: the record's, then the range's, then the event's own."""
    names = [record.name for record in traits.told[:1] if record.name]
    names += [trace.names[number] for number in (traits.span, traits.name) if number >= 0]
    return next((kind for kind in map(find_collective_kind, names) if kind != OTHER), OTHER)


def _find_group_of_call(trace: Trace, traits: _Traits, kind: str, groups: dict[str, ProcessGroup]) -> ProcessGroup:
    """The group that the record names, else the one that fits the place of the call."""
    name = traits.told[0].group if traits.told else None
    if name is not None:
        return groups.get(name) or ProcessGroup(name)
    return find_group(trace.groups, guess_dimension(kind, *traits.place))


def _find_batches(trace: Trace, rows: Integers, records: Integers) -> list[tuple[int, ...]]:
    """For each kernel without a record of its own the Collectives that it does at once: what its thread has recorded of
    sends and receives since the launch before it."""
    events = trace.events
    batches: list[tuple[int, ...]] = [()] * len(rows)
    named = np.array([one.name in ("send", "recv") for one in trace.collectives] + [False], bool)
    told = np.flatnonzero((events.kind == Kind.OP) & named[events.collective])
    launch = trace.launch_of[rows]
    if not len(told) or not (launch >= 0).any():
        return batches
    for thread in np.unique(events.thread[launch[launch >= 0]]).tolist():
        here = np.flatnonzero((launch >= 0) & (events.thread[np.maximum(launch, 0)] == thread))
        here = here[np.argsort(events.start_ns[launch[here]], kind="stable")]
        of_thread = told[events.thread[told] == thread]
        ends = np.searchsorted(events.start_ns[of_thread], events.start_ns[launch[here]])
        for at, first, last in zip(here.tolist(), [0, *ends[:-1].tolist()], ends.tolist()):
            if records[at] < 0:
                batches[at] = tuple(events.collective[of_thread[first:last]].tolist())
    return batches


def _larger_direction(told: tuple[Collective, ...]) -> int | None:
    """Bytes sent or received, whichever are more: links carry both at once. None where a record has no size."""
    sizes: dict[str, int] = {}
    for one in told:
        size, _ = message_bytes("", one, None, None)
        if size is None:
            return None
        sizes[one.name or ""] = sizes.get(one.name or "", 0) + size
    return max(sizes.values())


def _find_transfers(
    kind: str, told: tuple[Collective, ...], group: ProcessGroup, rank: int | None, position: int | None
) -> tuple[tuple[str, int], ...]:
    """(send or recv, the other rank) of each, by its record, else by the other's position in the group or as the
    group's only other rank; () if unknown."""
    named = tuple((one.name or kind, one.peer) for one in told if one.peer is not None)
    if named or kind == "send_recv":
        return named
    if position is not None and position < len(group.ranks):
        return ((kind, group.ranks[position]),)
    others = [one for one in group.ranks if one != rank]
    return ((kind, others[0]),) if rank in group.ranks and len(others) == 1 else ()
