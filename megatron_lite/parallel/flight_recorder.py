"""What torch's flight recorder knows of this rank's collectives. Reading it talks to nobody.

Gloo's operations are in the recorder of c10d, NCCL's in one of its own; both are on unless TORCH_FR_BUFFER_SIZE is 0.
"""

import json
import math
from dataclasses import dataclass

from torch._C import _distributed_c10d as c10d

from megatron_lite.units import size

DTYPES = {  # torch's name and bytes of an element
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Byte": ("uint8", 1),
    "Char": ("int8", 1),
    "Bool": ("bool", 1),
}


@dataclass(frozen=True)
class Operation:
    """One collective. `number` counts from 1 and is the same on all ranks."""

    number: int
    name: str  # all_reduce, broadcast, ...
    elements: int = 0
    dtype: str = ""

    def __str__(self) -> str:
        if self.dtype not in DTYPES or not self.elements:
            return f"{self.name} #{self.number}"
        dtype, width = DTYPES[self.dtype]
        return f"{self.name} #{self.number} ({size(self.elements * width)} {dtype})"


class FlightRecorder:
    """The recorder of the default group."""

    def __init__(self, backend: str):
        # private, but what torch's own debug server uses; NCCL's is missing from builds without NCCL
        self._dump = getattr(c10d, "_dump_nccl_trace_json" if backend == "nccl" else "_dump_fr_trace_json", None)

    def counts(self) -> tuple[int, int]:
        """Numbers of the collective begun last and of the one finished last; (0, 0) if nothing is recorded.

        Microseconds. Gloo may finish a later one first: its two numbers need not meet.
        """
        status = self._read(False).get("pg_status", {}).get("0", {})
        # NCCL says -1 before the first one
        return tuple(max(int(status.get(f"last_{what}_collective", 0)), 0) for what in ("enqueued", "completed"))

    def unfinished(self) -> Operation | None:
        """The oldest collective that is not finished. Tens of milliseconds: for a run that stands still."""
        return next((operation for operation, finished in self._operations() if not finished), None)

    def newest(self) -> Operation | None:
        """The collective begun last, finished or not. As slow."""
        operations = self._operations()
        return operations[-1][0] if operations else None

    def _operations(self) -> list[tuple[Operation, bool]]:
        """Every recorded collective, oldest first, and whether it is finished."""
        found = []
        for entry in self._read(True).get("entries", []):
            if entry["pg_id"] == 0 and not entry["is_p2p"]:
                elements = sum(math.prod(shape) for shape in entry["input_sizes"])
                name = entry["profiling_name"].rpartition(":")[2]
                operation = Operation(entry["collective_seq_id"], name, elements, (entry["input_dtypes"] or [""])[0])
                found.append((operation, entry["retired"] or entry["state"] == "completed"))
        return found

    def _read(self, entries: bool) -> dict:
        try:
            return json.loads(self._dump(entries, False)) if self._dump is not None else {}
        except (RuntimeError, ValueError):  # a report must not fail for want of a detail
            return {}
