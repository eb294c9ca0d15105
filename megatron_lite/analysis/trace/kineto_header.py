"""What stands beside the events of a Kineto file: ranks, devices, clocks; every value may be missing or of any type."""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megatron_lite.analysis.trace.columns import Kind, Shapes

# --- category names of Kineto files of all years and devices -> Kind


# names: kineto libkineto/src/ActivityType.cpp, and those of its first releases (2021), which were capitalised
KIND_OF_CATEGORY = {
    "cpu_op": Kind.OP, "Operator": Kind.OP, "operator": Kind.OP,
    "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.RUNTIME, "cuda_driver": Kind.RUNTIME, "Runtime": Kind.RUNTIME, "runtime": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME, "hip_driver": Kind.RUNTIME, "xpu_runtime": Kind.RUNTIME, "xpu_driver": Kind.RUNTIME,
    "mtia_runtime": Kind.RUNTIME, "glow_runtime": Kind.RUNTIME, "privateuse1_runtime": Kind.RUNTIME,
    "privateuse1_driver": Kind.RUNTIME,
    "kernel": Kind.KERNEL, "Kernel": Kind.KERNEL, "concurrent_kernel": Kind.KERNEL, "hpu_op": Kind.KERNEL,
    "mtia_ccp_events": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY, "Memcpy": Kind.MEMCPY, "memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET, "Memset": Kind.MEMSET, "memset": Kind.MEMSET,
    "gpu_user_annotation": Kind.GPU_ANNOTATION,
    "python_function": Kind.PYTHON, "PythonFunction": Kind.PYTHON, "Python": Kind.PYTHON,
    "cuda_sync": Kind.SYNC,
    "overhead": Kind.OVERHEAD,
}  # fmt: skip
# Waiting that some devices record as work of a stream: MTIA's event_wait, Ascend's EVENT_WAIT and NOTIFY_WAIT.
DEVICE_WAIT = re.compile(r"(event|notify|stream)_?wait|wait_?event", re.IGNORECASE)
KIND_OF_PROCESS = {
    "CPU functions": Kind.OP,
    "CUDA functions": Kind.KERNEL,
}  # before Kineto (2020) there were no categories
OPERATORS_OF_2021 = "Operator"  # this category holds annotations too
_NAMED_BY_CODE = re.compile(
    r"ProfilerStep#|enumerate\(DataLoader\)|Optimizer\.(step|zero_grad)#|(nccl|gloo|mpi|ucc):|DistributedDataParallel\.|## "
)


def is_annotation_of_2021(name: str) -> bool:
    """Was this entry of the category "Operator" a range that code named?"""
    return bool(_NAMED_BY_CODE.match(name))


# --- what stands beside the events of a Kineto file: ranks, devices, clocks; every value may be missing or of any type


_RANK_IN_NAME = re.compile(r"rank[_-]?\[?(\d{1,6})|\[(\d{1,6})\]", re.IGNORECASE)
_FACTS = ("schemaVersion", "trace_id", "host_name", "cuda_runtime_version", "cuda_driver_version")
_FACTS_OF_RANKS = ("backend", "nccl_version", "pg_count")
_MAX_TEXT = 200  # characters of a header's value that are worth showing


class Header:
    """The values that the analysis uses."""

    def __init__(self, header: dict, path: Path):
        ranks = header.get("distributedInfo")
        ranks = ranks if isinstance(ranks, dict) else {}
        rank = _count(ranks.get("rank"))
        self._header = header
        self.rank = rank_in_name(path.name) if rank is None else rank
        self.world_size = _count(ranks.get("world_size")) or None
        self.devices = _devices(header.get("deviceProperties"))
        self.without_gpu = header.get("deviceProperties") == []
        self.facts = _texts(header, _FACTS) | _texts(ranks, _FACTS_OF_RANKS)
        self._base_ns = _count(header.get("baseTimeNanoseconds"))

    @property
    def has_clock(self) -> bool:
        """Does the file say what its times count from?"""
        return self._base_ns is not None

    def clock_ns(self, time_ns: int) -> int:
        """Nanoseconds since 1970 of a time of the file."""
        return (self._base_ns or 0) + time_ns

    def says(self, switch: str) -> bool:
        """Was this option of the profiler on?"""
        return bool(self._header.get(switch))


def rank_in_name(name: str) -> int | None:
    """3 of host_rank3.17.pt.trace.json and of trace[3].json."""
    found = _RANK_IN_NAME.search(name)
    return int(found[1] or found[2]) if found else None


def _count(value) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < 2**63 else None


def _devices(rows) -> tuple[str, ...]:
    """Names by index."""
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return tuple(str(row.get("name", ""))[:_MAX_TEXT] for row in rows)


def _texts(values: dict, wanted: tuple[str, ...]) -> dict:
    kept = {name: values[name] for name in wanted if isinstance(values.get(name), (str, int, float))}
    return {name: value[:_MAX_TEXT] if isinstance(value, str) else value for name, value in kept.items()}


def last_number(text) -> int:
    """7 of 7, "7" and "stream 7"; -1 for none."""
    found = re.search(r"(\d{1,18})$", str(text))
    return int(found[1]) if found else -1


def read_shapes(pairs: Iterable[tuple[bytes, bytes]]) -> tuple[Shapes, ...]:
    """Shapes of their JSON texts (dims, dtypes)."""
    texts = list(pairs)
    dtypes = {text: tuple(str(one) for one in _list(text)) for text in {dtypes for _, dtypes in texts}}
    return tuple(Shapes(_tuples(_list(dims)), dtypes[text]) for dims, text in texts)


def _list(text: bytes) -> list:
    try:
        value = msgspec.json.decode(text) if text else []
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    return value if isinstance(value, list) else []


def _tuples(value: list) -> tuple:
    return tuple([_tuples(one) if isinstance(one, list) else one for one in value])
