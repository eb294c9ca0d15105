"""The collectives of one rank's trace, in order: NCCL's kernels on a GPU, gloo's spans on the host without one."""

import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lite.analysis.intervals import NOTHING, Cover, Nesting, union
from megatron_lite.analysis.kernels.roles import is_communication
from megatron_lite.analysis.time.time_results import Placing
from megatron_lite.analysis.trace.columns import Collective, Kind, Shapes, Trace

# --- what a collective is, by the names that PyTorch, NCCL and gloo give it; how many bytes count for its bandwidth


# Squashed to letters and digits: "nccl:_all_gather_base", "ncclDevKernel_AllGather_RING_LL", "allgather_into_tensor". In order.
_KINDS = (
    ("all_reduce", r"allreduce|crossdevicereduce"),
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
OTHER = "other"
POINT_TO_POINT = ("send_recv", "send", "recv")
# all ranks leave them at the same moment, since each needs something of every other
END_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
LARGEST_BYTES = 2**50  # a petabyte in one message: a damaged file
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
    """'ring, LL128' from ncclKernel_AllReduce_RING_LL128_Sum_float; "" for names that do not say."""
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
    """(bytes, dtype) of one collective as NCCL's tests count them: the larger side of a gather or scatter, the buffer of
    the others. None where the trace does not say. `shapes`: of the annotation around the launch, in older traces."""
    elements, dtype = _elements(kind, what, ranks) if what else _shaped(kind, shapes, ranks)
    width = dtype_bytes(dtype)
    known = elements is not None and width and 0 <= elements * width < LARGEST_BYTES
    return (elements * width if known else None), dtype


def _elements(kind: str, what: Collective, ranks: int | None) -> tuple[int | None, str]:
    given, taken = what.in_elements, what.out_elements
    if kind == "all_gather":
        elements = taken if taken else given * ranks if given is not None and ranks else None
    elif kind == "reduce_scatter":
        elements = given if given else taken * ranks if taken is not None and ranks else None
    else:
        elements = given if given is not None else taken
    return elements, what.dtype or ""


def _shaped(kind: str, shapes: Shapes | None, ranks: int | None) -> tuple[int | None, str]:
    tensors = [(dims, dtype) for dims, dtype in zip(shapes.dims, shapes.dtypes) if _is_tensor(dims)] if shapes else []
    if not tensors:
        return None, ""
    dims, dtype = tensors[0]
    elements = 1
    for size in dims:
        elements *= size
    if kind == "all_gather":
        return (elements * ranks if ranks else None), dtype
    return elements, dtype


def _is_tensor(dims) -> bool:
    return bool(dims) and all(isinstance(size, int) for size in dims)


def bus_bytes(kind: str, num_bytes: int, ranks: int) -> float:
    """Bytes that each link must carry: nccl-tests' doc/PERFORMANCE.md. Divided by the time it is the bus bandwidth."""
    if kind == "all_reduce":
        return num_bytes * 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return num_bytes * (ranks - 1) / ranks
    return float(num_bytes)


# --- the collectives of one rank's trace, in order: NCCL's kernels on a GPU, gloo's spans on the host without one


LARGEST_SEQUENCE = 2**40
HANDED_OVER = re.compile(r"c10d::(?!wait)\w+")
SPAN = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl|rccl):")


@dataclass(frozen=True)
class What:
    """What a collective is, apart from when it ran."""

    kind: str
    algorithm: str
    num_bytes: int | None
    dtype: str
    group: str  # "" if the trace does not say
    group_size: int | None


@dataclass(frozen=True)
class Calls:
    """c collectives of one rank by start, on the trace's own clock."""

    whats: tuple[What, ...]  # [c]; equal ones are one object
    start_ns: np.ndarray  # int64 [c]
    end_ns: np.ndarray  # int64 [c]
    step: np.ndarray  # int32 [c], index into the placing's steps; -1: none
    phase: tuple[str, ...]  # [c]
    sequence: np.ndarray  # int64 [c], -1: not given
    compute: Cover  # what may hide them

    def __len__(self) -> int:
        return len(self.start_ns)

    @cached_property
    def exposed_ns(self) -> np.ndarray:
        """int64 [c]: of each, what no compute runs beside."""
        return self.end_ns - self.start_ns - self.compute.within(self.start_ns, self.end_ns)


def collect_calls(trace: Trace, placing: Placing, world_size: int | None) -> Calls:
    """All that communicates in the trace. `world_size`: how many take part where the trace does not say and kind needs it."""
    events = trace.events
    on_gpu = len(trace.rows[Kind.KERNEL]) > 0
    of_communication = trace.matching(is_communication)
    rows = trace.rows[Kind.KERNEL] if on_gpu else trace.rows[Kind.ANNOTATION]
    rows = rows[(of_communication if on_gpu else trace.matching(SPAN.match))[rows]]
    called = rows if on_gpu else _called(trace, rows)
    around, told = _told(trace, called)
    whats = _whats(trace, rows, around, told, world_size)
    return Calls(
        whats=whats,
        start_ns=events.start_ns[rows],
        end_ns=events.end_ns[rows],
        step=placing.step[called],
        phase=tuple(placing.phases[at] if at >= 0 else "" for at in placing.phase[called]),
        sequence=_sequences(trace)[told],
        compute=_compute(trace, of_communication, on_gpu, rows),
    )


def collective_bytes(trace: Trace, rows: np.ndarray, world_size: int | None) -> np.ndarray:
    """float64 [k]: of each of these collectives; NaN where the trace does not say."""
    whats = _whats(trace, rows, *_told(trace, rows), world_size)
    return np.array([np.nan if what.num_bytes is None else what.num_bytes for what in whats], float)


def _called(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """The operators that handed spans of a backend's own threads over: as many, in the same order. Else the spans."""
    operators = trace.rows[Kind.OP]
    operators = operators[trace.matching(HANDED_OVER.match)[operators]]
    operators = operators[~np.isin(trace.events.thread[operators], trace.events.thread[rows])]
    return operators if len(operators) == len(rows) else rows


def _told(trace: Trace, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every collective the row of backend's range around its launch, and the index of the Collective that tells of it."""
    events, launch = trace.events, trace.launch_of[rows]
    at = np.where(launch >= 0, launch, rows)
    moment, thread = events.start_ns[at], events.thread[at]
    spans = trace.rows[Kind.ANNOTATION]
    spans = spans[trace.matching(SPAN.match)[spans]]
    around = Nesting(spans, events.start_ns[spans], events.end_ns[spans], events.thread[spans]).row_at(moment, thread)
    records = np.flatnonzero((events.kind == Kind.OP) & (events.collective >= 0))
    record = Nesting(records, events.start_ns[records], events.end_ns[records], events.thread[records]).row_at(
        moment, thread
    )
    from_op = np.where(record >= 0, events.collective[np.maximum(record, 0)], -1)
    own = events.collective[rows]
    return around, np.where(own >= 0, own, from_op)


def _sequences(trace: Trace) -> np.ndarray:
    """int64 by index of collective, -1 where it has none; the last entry is for -1."""
    given = [one.sequence for one in trace.collectives]
    return np.array([-1 if one is None or not 0 <= one < LARGEST_SEQUENCE else one for one in given] + [-1], np.int64)


def _whats(
    trace: Trace, rows: np.ndarray, around: np.ndarray, told: np.ndarray, world_size: int | None
) -> tuple[What, ...]:
    """Each distinct combination of names, shapes and sizes is worked out once."""
    events, known, whats = trace.events, {}, []
    names, spans = events.name[rows].tolist(), np.where(around >= 0, events.name[around], -1).tolist()
    shapes = np.where(
        events.shapes[rows] >= 0, events.shapes[rows], np.where(around >= 0, events.shapes[around], -1)
    ).tolist()
    for name, span, shape, record in zip(names, spans, shapes, told.tolist()):
        one = trace.collectives[record] if record >= 0 else None
        key = (
            name,
            span,
            shape,
            one and (one.name, one.group, one.group_size, one.in_elements, one.out_elements, one.dtype),
        )
        if key not in known:
            known[key] = _what(trace, name, span, one, trace.shapes[shape] if shape >= 0 else None, world_size)
        whats.append(known[key])
    return tuple(whats)


def _what(
    trace: Trace, name: int, span: int, told: Collective | None, shapes: Shapes | None, world_size: int | None
) -> What:
    """name, span: of the event and of the range around its launch, -1 without one. The most telling name decides."""
    names = [told.name] if told and told.name else []
    names += [trace.names[at] for at in (span, name) if at >= 0]
    kind = next((kind for kind in map(find_collective_kind, names) if kind != OTHER), OTHER)
    group_size = told.group_size if told and (told.group_size or 0) > 0 else None
    num_bytes, dtype = message_bytes(kind, told, shapes, group_size or world_size)
    return What(
        kind, find_algorithm(trace.names[name]), num_bytes, dtype, (told.group if told else None) or "", group_size
    )


def _compute(trace: Trace, of_communication: np.ndarray, on_gpu: bool, rows: np.ndarray) -> Cover:
    """Kernels that do not communicate; without a GPU the operators of threads that do not."""
    events = trace.events
    if not len(rows):
        return NOTHING
    others = trace.rows[Kind.KERNEL if on_gpu else Kind.OP]
    others = others[~of_communication[others]]
    if not on_gpu:
        waits = trace.matching(lambda name: name.startswith(("c10d::", "record_param_comms")))
        others = others[~waits[others] & ~np.isin(events.thread[others], events.thread[rows])]
    return union(events.start_ns[others], events.end_ns[others])
