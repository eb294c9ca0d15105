"""Collectives of one rank's trace, in order: NCCL's kernels on a GPU, gloo's spans on the host without one."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.analysis.intervals import NOTHING, Cover, Flags, Integers, Numbers, difference
from megatron_lite.analysis.kernels.kernel_words import is_communication, is_wait
from megatron_lite.analysis.ranks.handed_over import pair_with_operators
from megatron_lite.analysis.ranks.process_groups import CALLER, find_group, guess_dimension
from megatron_lite.analysis.ranks.rank_results import OTHER_KIND
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
MAX_MESSAGE_BYTES = 2**50  # a petabyte in one message: a damaged file
MAX_NAME = 400  # characters of a name that are looked at: C++ names of kernels are longer, and say nothing more
MAX_DTYPE = 60  # characters of a type's name that are looked at
_ALGORITHM = re.compile(
    r"(?<![a-z])(ring|tree|collnet_?direct|collnet_?chain|collnet|nvls_?tree|nvls|pat)(?![a-z])", re.IGNORECASE
)
_PROTOCOL = re.compile(r"(?<![a-z])(ll128|ll|simple)(?![a-z0-9])", re.IGNORECASE)
_WIDTHS = (  # bytes of an element; the first pattern that is found counts
    (8, r"double|long|int64|uint64|float64|complexfloat|complex64"),
    (2, r"half|bfloat16|float16|short|int16|bf16|fp16"),
    (1, r"float8|fp8|byte|char|bool|int8|e4m3|e5m2"),
    (4, r"float|int"),
)


def find_collective_kind(name: str) -> str:
    """Name the kind of a collective: "all_reduce", "all_gather", ...; "other" for what no pattern knows."""
    plain = _squash(name[:MAX_NAME])
    for kind, pattern in _KINDS:
        if re.search(pattern, plain):
            return kind
    return OTHER_KIND


def _squash(name: str) -> str:
    """Reduce a name to its letters and digits, in lower case."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_algorithm(kernel: str) -> str:
    """Read the algorithm and protocol from a kernel's name.

    "ring, LL128" of ncclKernel_AllReduce_RING_LL128_Sum_float; "" for names that do not say, and of libraries other
    than NCCL and RCCL.
    """
    if not re.search("[nr]ccl", kernel[:MAX_NAME], re.IGNORECASE):
        return ""
    name = kernel.partition("(")[0][:MAX_NAME]
    words = []
    algorithm = _ALGORITHM.search(name)
    if algorithm:
        words.append(algorithm[1].lower())
    protocol = _PROTOCOL.search(name)
    if protocol:
        word = protocol[1].upper()
        words.append("simple" if word == "SIMPLE" else word)
    return ", ".join(words)


def dtype_bytes(dtype: str) -> int | None:
    """Bytes of one element, of names as in "Float", "c10::BFloat16", "long int"; None if unknown."""
    plain = _squash(dtype[:MAX_DTYPE])
    for width, pattern in _WIDTHS:
        if re.search(pattern, plain):
            return width
    return None


def message_bytes(
    kind: str, what: Collective | None, shapes: Shapes | None, ranks: int | None
) -> tuple[int | None, str]:
    """Measure one collective as NCCL's tests do: the larger side of a gather or scatter, the buffer of the others.

    Args:
        kind: what the collective is.
        what: the trace's record of it; None without one.
        shapes: of the annotation around the launch, which older traces have instead.
        ranks: how many take part.

    Returns:
        Its bytes, None where the trace does not say, and the type of its elements.
    """
    elements = None
    dtype = ""
    if what:
        dtype = what.dtype or ""
        elements = _count_recorded_elements(kind, what, ranks)
    elif shapes:
        dims, dtype = _find_first_tensor(shapes)
        elements = _count_elements(kind, dims, ranks)
    width = dtype_bytes(dtype)
    if elements is None or not width:
        return None, dtype
    num_bytes = elements * width
    is_possible = 0 <= num_bytes < MAX_MESSAGE_BYTES
    return num_bytes if is_possible else None, dtype


def _count_recorded_elements(kind: str, what: Collective, ranks: int | None) -> int | None:
    """Count the elements of a collective that the trace records.

    Args:
        kind: what it is.
        what: the record.
        ranks: how many take part; None for unknown.

    Returns:
        The number; None where the record does not say.
    """
    if kind == "all_gather":
        return what.out_elements or _multiply(what.in_elements, ranks)
    if kind == "reduce_scatter":
        return what.in_elements or _multiply(what.out_elements, ranks)
    return what.out_elements if what.in_elements is None else what.in_elements


def _multiply(part: int | None, ranks: int | None) -> int | None:
    """Count the elements of a whole of which each rank has a part; None where one of the numbers is not known."""
    if part is None or not ranks:
        return None
    return part * ranks


def _find_first_tensor(shapes: Shapes) -> tuple[Sequence[int] | None, str]:
    """Find the dimensions and the type of the first tensor, of one with dimensions before one without; (None, "") where
    there is no tensor."""
    for dims, dtype in zip(shapes.dims, shapes.dtypes):
        if dims and all(isinstance(size, int) for size in dims):
            return dims, dtype
    is_tensor = [not dims and bool(dtype_bytes(dtype)) for dims, dtype in zip(shapes.dims, shapes.dtypes)]
    if True not in is_tensor:
        return None, ""
    first = is_tensor.index(True)
    return (), shapes.dtypes[first]


def _count_elements(kind: str, dims: Sequence[int] | None, ranks: int | None) -> int | None:
    """Count the elements of a collective on a tensor with these dimensions; None where that is not known."""
    if dims is None:
        return None
    elements = math.prod(dims)
    if kind == "all_gather":
        return _multiply(elements, ranks)
    return elements


def bus_bytes(kind: str, num_bytes: int, ranks: int) -> float:
    """Bytes that each link must carry, by nccl-tests' doc/PERFORMANCE.md.

    Divided by the time of the transfer they are the bus bandwidth.

    Args:
        kind: what the collective is.
        num_bytes: its size, as message_bytes counts it.
        ranks: how many take part.
    """
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


Transfers = tuple[tuple[str, int], ...]  # send or recv, and the other rank


@dataclass(frozen=True)
class What:
    """A collective's traits, apart from when it ran."""

    kind: str
    algorithm: str
    num_bytes: int | None
    dtype: str
    group: ProcessGroup
    group_size: int | None
    # of what is exchanged with single ranks, several where one kernel does them at once
    transfers: Transfers = ()


@dataclass(frozen=True)
class Calls:
    """All c collectives of one rank by start, on the trace's own clock."""

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
        """The time of each call that no compute runs beside, int64 [c]."""
        hidden_ns = self.compute.within(self.start_ns, self.end_ns)
        exposed: Integers = self.end_ns - self.start_ns - hidden_ns
        return exposed


def collect_calls(trace: Trace, placing: Placing, world_size: int | None) -> Calls:
    """Collect all that communicates in a trace.

    Args:
        trace: the trace of one rank.
        placing: the step and phase of each of its events.
        world_size: how many ranks take part where the trace does not say, and the kind needs it; None if unknown.
    """
    has_kernels = len(trace.rows[Kind.KERNEL]) > 0
    found = _find_kernels(trace) if has_kernels else _find_spans(trace)
    # an index of -1, of no phase, finds the last name
    names = (*placing.phases, "")
    phase = placing.phase[found.called]
    phases = tuple(names[at] for at in phase.tolist())
    places = _find_places(trace, found.called, phases)
    whats = _describe_calls(trace, found.rows, found.around, found.records, world_size, places)
    return Calls(
        rank=trace.rank,
        rows=found.rows,
        whats=whats,
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
    """All c collectives of a trace before they are described."""

    rows: Integers  # [c], the trace's events
    called: Integers  # [c], rows of the events that tell step and phase
    called_ns: NDArray[np.int64]  # [c], when the host called them
    is_in_order: bool  # called_ns is the order of the program
    compute: Cover  # what may hide them
    around: Integers  # [c], rows of the backend's ranges around their launches; -1: none
    records: Integers  # [c], indices into the trace's collectives; -1: none


def _find_kernels(trace: Trace) -> _Found:
    """Find the kernels that communicate."""
    events = trace.events
    kernels = trace.rows[Kind.KERNEL]
    communicates = trace.matching(is_communication)[kernels]
    rows = kernels[communicates]
    others = kernels[~communicates]
    launches = trace.launch_of[rows]
    is_launched = launches >= 0
    around, records = _find_descriptions(trace, rows)
    return _Found(
        rows=rows,
        called=rows,
        called_ns=events.start_ns[np.where(is_launched, launches, rows)],
        is_in_order=bool(is_launched.all()),
        compute=trace.cover(others) if len(rows) else NOTHING,
        around=around,
        records=records,
    )


def _find_spans(trace: Trace) -> _Found:
    """Find the spans of backends on the host, in a trace without a GPU."""
    events = trace.events
    annotations = trace.rows[Kind.ANNOTATION]
    rows = annotations[trace.matching(SPAN.match)[annotations]]
    # spans of a backend's own threads were handed over by operators
    operators = trace.rows[Kind.OP]
    handing_over = operators[trace.matching(HANDED_OVER.match)[operators]]
    callers = events.thread[handing_over]
    handed_over = ~np.isin(events.thread[rows], callers)
    called = rows.copy()
    paired, is_in_order = pair_with_operators(trace, rows[handed_over], handing_over)
    if paired is not None:
        called[handed_over] = paired
    compute = NOTHING
    if len(rows):
        compute = _cover_operators(trace, events.thread[rows[handed_over]])
    return _Found(
        rows=rows,
        called=called,
        called_ns=events.start_ns[called],
        is_in_order=is_in_order,
        compute=compute,
        # a span says itself what it is, and others that are under way lie around it
        around=np.full(len(rows), -1),
        records=events.collective[rows],
    )


def _cover_operators(trace: Trace, threads: Integers) -> Cover:
    """Find when operators compute.

    Args:
        trace: a trace without a GPU.
        threads: those of a backend, whose operators belong to collectives.
    """
    operators = trace.rows[Kind.OP]

    def find(test: Callable[[str], object]) -> Flags:
        return trace.matching(test)[operators]

    communicates = find(is_communication) | find(_hands_over)
    of_backend = np.isin(trace.events.thread[operators], threads)
    computes = ~(communicates | of_backend)
    # whatever called what waits does nothing meanwhile
    waits = find(is_wait)
    return difference(trace.cover(operators[computes]), trace.cover(operators[waits]))


def _hands_over(name: str) -> bool:
    """Whether an operator of this name hands a collective over to a backend."""
    return name.startswith(("c10d::", "record_param_comms"))


def _read_sequences(trace: Trace) -> NDArray[np.int64]:
    """Read the sequence number of each of the trace's collectives, -1 for none.

    The last entry is for -1, what has no record.
    """
    numbers = []
    for one in trace.collectives:
        is_given = one.sequence is not None and 0 <= one.sequence < MAX_SEQUENCE
        numbers.append(one.sequence if is_given else -1)
    return np.array([*numbers, -1], np.int64)


def collective_bytes(trace: Trace, rows: Integers, world_size: int | None) -> Numbers:
    """Measure the size of collectives.

    Args:
        trace: the trace.
        rows: [k], the collectives.
        world_size: how many ranks take part where the trace does not say; None if unknown.

    Returns:
        float64 [k], bytes; NaN where the trace does not say.
    """
    around, records = _find_descriptions(trace, rows)
    nowhere = [("", "")] * len(rows)
    whats = _describe_calls(trace, rows, around, records, world_size, nowhere)
    # None becomes NaN
    return np.array([what.num_bytes for what in whats], float)


def _find_descriptions(trace: Trace, rows: Integers) -> tuple[Integers, Integers]:
    """Find what tells of each collective.

    Returns:
        The row of the backend's range around its launch; and the index of the Collective that records it, its own, else
        that of the operator around the launch. -1 for none.
    """
    events = trace.events
    launch = trace.launch_of[rows]
    called = np.where(launch >= 0, launch, rows)
    called_ns = events.start_ns[called]
    thread = events.thread[called]

    def find_around(spans: Integers) -> Integers:
        nesting = trace.nest(spans)
        return np.asarray(nesting.row_at(called_ns, thread))

    annotations = trace.rows[Kind.ANNOTATION]
    ranges = annotations[trace.matching(SPAN.match)[annotations]]
    is_operator = events.kind == Kind.OP
    recorded = np.flatnonzero(is_operator & (events.collective >= 0))
    operator = find_around(recorded)
    of_operator = np.where(operator >= 0, events.collective[operator], -1)
    own = events.collective[rows]
    records = np.where(own >= 0, own, of_operator)
    return find_around(ranges), records


def _find_places(trace: Trace, called: Integers, phases: Sequence[str]) -> list[tuple[str, str]]:
    """Find where each call was made, which tells groups apart where no record does.

    Args:
        trace: the trace.
        called: [c], rows of the events that called.
        phases: [c], their phases.

    Returns:
        By call the name of the span of a layer around it, "" for none, and the phase.
    """
    if len(trace.groups) < 2:
        return [("", "")] * len(called)
    events = trace.events
    is_on_host = np.isin(events.kind, (Kind.OP, Kind.ANNOTATION))
    spans = np.flatnonzero(trace.matching(CALLER.search) & is_on_host)
    found = trace.nest(spans).row_at(events.start_ns[called], events.thread[called])
    places = []
    for at, phase in zip(found.tolist(), phases):
        caller = trace.names[events.name[at]] if at >= 0 else ""
        places.append((caller, phase))
    return places


class _Traits(NamedTuple):
    """The trace's own words on a call. Calls with the same traits are described once."""

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
    has_range = around >= 0
    spans = np.where(has_range, events.name[around], -1)
    own_shapes = events.shapes[rows]
    shapes_around = np.where(has_range, events.shapes[around], -1)
    shapes = np.where(own_shapes >= 0, own_shapes, shapes_around)
    groups = {group.name: group for group in trace.groups}
    batches = _find_batches(trace, rows, records)
    columns = (
        events.name[rows].tolist(),
        spans.tolist(),
        shapes.tolist(),
        records.tolist(),
        batches,
        places,
    )
    known: dict[_Traits, What] = {}
    whats = []
    for name, span, shape, record, batch, place in zip(*columns):
        recorded = batch or (record,)
        # a number that differs from call to call is no trait
        told = [replace(trace.collectives[one], sequence=None) for one in recorded if one >= 0]
        traits = _Traits(name, span, shape, tuple(told), place)
        if traits not in known:
            known[traits] = _describe_call(trace, traits, groups, world_size)
        whats.append(known[traits])
    return tuple(whats)


def _describe_call(trace: Trace, traits: _Traits, groups: dict[str, ProcessGroup], world_size: int | None) -> What:
    """Describe one call.

    Args:
        trace: the trace.
        traits: what it says of the call.
        groups: its process groups by name.
        world_size: how many ranks take part where nothing else says it.
    """
    kind = _name_kind(trace, traits)
    group = _find_group_of_call(trace, traits, kind, groups)
    group_size = _find_group_size(traits, group)
    shapes = trace.shapes[traits.shapes] if traits.shapes >= 0 else None
    record = traits.told[0] if traits.told else None
    num_bytes, dtype = message_bytes(kind, record, shapes, group_size or world_size)
    transfers: Transfers = ()
    if kind in POINT_TO_POINT:
        position = _find_position(trace, traits)
        transfers = _find_transfers(kind, traits.told, group, trace.rank, position)
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


def _find_group_size(traits: _Traits, group: ProcessGroup) -> int | None:
    """The number of ranks in a call's group, by its record, else by the group's members; None if unknown."""
    recorded = traits.told[0].group_size if traits.told else None
    if recorded is not None and recorded > 0:
        return recorded
    return len(group.ranks) or None


def _find_position(trace: Trace, traits: _Traits) -> int | None:
    """The other rank's position in the group, by the name of the backend's range; None where it does not say."""
    if traits.span < 0:
        return None
    found = _PEER.search(trace.names[traits.span])
    return int(found[1]) if found else None


def _name_kind(trace: Trace, traits: _Traits) -> str:
    """Name the kind by the most telling name: the record's, then the range's, then the event's own."""
    names = []
    if traits.told:
        names.append(traits.told[0].name or "")
    if traits.span >= 0:
        names.append(trace.names[traits.span])
    names.append(trace.names[traits.name])
    for name in names:
        kind = find_collective_kind(name)
        if kind != OTHER_KIND:
            return kind
    return OTHER_KIND


def _find_group_of_call(trace: Trace, traits: _Traits, kind: str, groups: dict[str, ProcessGroup]) -> ProcessGroup:
    """Find the group that the record names, else the one that fits the place of the call."""
    name = traits.told[0].group if traits.told else None
    if name is not None:
        return groups.get(name) or ProcessGroup(name)
    dimension = guess_dimension(kind, *traits.place)
    return find_group(trace.groups, dimension)


def _find_batches(trace: Trace, rows: Integers, records: Integers) -> list[tuple[int, ...]]:
    """Find what each kernel without a record of its own does at once.

    It is what its thread has recorded of sends and receives since the launch before it.

    Args:
        trace: the trace.
        rows: [c], the kernels.
        records: [c], indices into the trace's collectives; -1: none.

    Returns:
        By kernel, indices into the trace's collectives; () for one with its own record.
    """
    events = trace.events
    batches: list[tuple[int, ...]] = [()] * len(rows)
    # the last entry is for -1, what has no record
    is_transfer = [one.name in ("send", "recv") for one in trace.collectives]
    records_transfer = np.array([*is_transfer, False], bool)[events.collective]
    told = np.flatnonzero((events.kind == Kind.OP) & records_transfer)
    launch = trace.launch_of[rows]
    is_launched = launch >= 0
    if not len(told) or not is_launched.any():
        return batches
    launch_thread = np.where(is_launched, events.thread[launch], -1)
    for thread in np.unique(launch_thread[is_launched]).tolist():
        here = np.flatnonzero(launch_thread == thread)
        launched_ns = events.start_ns[launch[here]]
        order = np.argsort(launched_ns, kind="stable")
        of_thread = told[events.thread[told] == thread]
        ends = np.searchsorted(events.start_ns[of_thread], launched_ns[order])
        first = 0
        for at, end in zip(here[order].tolist(), ends.tolist()):
            if records[at] < 0:
                since_last = of_thread[first:end]
                batches[at] = tuple(events.collective[since_last].tolist())
            first = end
    return batches


def _larger_direction(told: tuple[Collective, ...]) -> int | None:
    """Bytes sent or received, whichever are more: links carry both at once. None where a record has no size."""
    sizes: dict[str, int] = {}
    for one in told:
        size, _ = message_bytes("", one, None, None)
        if size is None:
            return None
        direction = one.name or ""
        sizes[direction] = sizes.get(direction, 0) + size
    return max(sizes.values())


def _find_transfers(
    kind: str, told: tuple[Collective, ...], group: ProcessGroup, rank: int | None, position: int | None
) -> Transfers:
    """Find with whom a call exchanges data: by its records, else by the other's position, or as the only other rank.

    Args:
        kind: what the call is.
        told: its records.
        group: its process group.
        rank: the rank that calls; None if unknown.
        position: the other rank's in the group; None if unknown.

    Returns:
        "send" or "recv" and the other rank, of each transfer; () if unknown.
    """
    named = []
    for one in told:
        if one.peer is not None:
            named.append((one.name or kind, one.peer))
    if named or kind == "send_recv":
        return tuple(named)
    if position is not None and position < len(group.ranks):
        return ((kind, group.ranks[position]),)
    if rank not in group.ranks:
        return ()
    others = [one for one in group.ranks if one != rank]
    if len(others) != 1:
        return ()
    return ((kind, others[0]),)
