"""Names of Nsight Systems as the profiler of PyTorch would write them, so that one analysis serves both."""

import ast
import re
from typing import NamedTuple

from megatron_lite.analysis.trace.columns import Kind, Shapes

# torch.autograd.profiler.emit_nvtx: "aten::mm, seq = 12, sizes = [[2, 3], [3, 4]], op_id = 7, input_op_ids = [...]"
_EMITTED = re.compile(r"(?P<name>.+?)(?:, seq = (?P<seq>\d{1,18}))?(?:, op_id = \d+)?(?:, sizes = (?P<sizes>\[.*?\]))?"
                      r"(?:, op_id = \d+)?(?:, input_op_ids = .*)?\Z", re.DOTALL)  # fmt: skip
_OPERATOR = re.compile(r"(aten|torch|autograd|c10d|prims|triton|inductor|_?[A-Za-z]\w*)::\w|.*Backward\d*\Z")
_VERSION = re.compile(r"(_ptsz|_ptds)?_v\d+(_ptsz|_ptds)?\Z")
_COPIES = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
           11: "HtoD", 12: "DtoH", 13: "DtoD"}  # fmt: skip  # ENUM_CUDA_MEMCPY_OPER; from 11 on: unified memory
_MEMORIES = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device", 6: "Managed"}
_SYNCS = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}  # ENUM_CUPTI_SYNC_TYPE


class NvtxName(NamedTuple):
    """A range's text taken apart."""

    name: str
    kind: Kind
    sequence: int  # autograd's; -1: not given
    shapes: Shapes | None


def nvtx_name(text: str) -> NvtxName:
    """OP for the ranges that PyTorch emits for operators, ANNOTATION for those that code named."""
    found = _EMITTED.match(text)
    emitted = found is not None and len(found["name"]) < len(text)
    name = found["name"] if emitted else text
    kind = Kind.OP if emitted or _OPERATOR.match(name) else Kind.ANNOTATION
    dims = _dims(found["sizes"]) if emitted and found["sizes"] else None
    shapes = Shapes(dims, ("",) * len(dims)) if dims else None
    return NvtxName(name, kind, int(found["seq"]) if emitted and found["seq"] else -1, shapes)


def _dims(text: str) -> tuple | None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return _tuples(value) if isinstance(value, list) else None


def _tuples(value):
    return tuple(_tuples(one) if isinstance(one, list) else one for one in value)


def runtime_name(name: str) -> str:
    """cudaLaunchKernel of cudaLaunchKernel_v7000."""
    return _VERSION.sub("", name)


def memcpy_name(copy: int, source: int, target: int) -> str:
    """Memcpy HtoD (Pageable -> Device)."""
    where = f"{_MEMORIES.get(source, 'Unknown')} -> {_MEMORIES.get(target, 'Unknown')}"
    return f"Memcpy {_COPIES.get(copy, 'Unknown')} ({where})"


def sync_name(kind: int) -> str:
    """Stream Sync, Event Sync, ..."""
    return _SYNCS.get(kind, "Sync")
