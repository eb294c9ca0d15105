"""What a collective is, by the names that PyTorch, NCCL and gloo give it; how many bytes count for its bandwidth."""

import re

from megatron_lite.analysis.trace.columns import Collective, Shapes

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


def kind_of(name: str) -> str:
    """all_reduce, all_gather, ...; "other" for what no pattern knows."""
    plain = re.sub(r"[^a-z0-9]", "", name[:400].lower())
    return next((kind for kind, pattern in _KINDS if re.search(pattern, plain)), OTHER)


def algorithm_of(kernel: str) -> str:
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
