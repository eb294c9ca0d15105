"""What torch's flight recorder knows of this rank's collectives. Reading it talks to nobody.

Gloo's operations are in the recorder of c10d, NCCL's in one of its own; both are on unless TORCH_FR_BUFFER_SIZE is 0.
"""

import json
import math
from dataclasses import dataclass

import torch
from torch._C import _distributed_c10d as c10d

from megatron_lite.units import size

DTYPES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Bool": torch.bool,
}


@dataclass(frozen=True)
class Operation:
    """One collective. `number` counts from 1 and is the same on all ranks."""

    number: int
    name: str  # all_reduce, broadcast, ...
    elements: int = 0
    dtype: str = ""

    def __str__(self) -> str:
        known = DTYPES.get(self.dtype)
        if known is None or not self.elements:
            return f"{self.name} #{self.number}"
        amount = f"{size(self.elements * known.itemsize)} {str(known).removeprefix('torch.')}"
        return f"{self.name} #{self.number} ({amount})"


class FlightRecorder:
    """Of the default group."""

    def __init__(self, backend: str):
        # private, but what torch's own debug server uses; NCCL's is missing from builds without NCCL
        self._dump = getattr(c10d, "_dump_nccl_trace_json" if backend == "nccl" else "_dump_fr_trace_json", None)

    def counts(self) -> tuple[int, int]:
        """Numbers of the collective begun last and of the one finished last; (0, 0) if nothing is recorded.

        Microseconds. Gloo may finish a later one first: its two numbers need not meet.
        """
        status = self._read(False).get("pg_status", {}).get("0", {})
        # NCCL says -1 before the first one
        begun, finished = (int(status.get(f"last_{what}_collective", 0)) for what in ("enqueued", "completed"))
        return max(begun, 0), max(finished, 0)

    def unfinished(self) -> Operation | None:
        """The oldest collective that is not finished. Tens of milliseconds: for a run that stands still."""
        waiting = [e for e in self._entries() if not e["retired"] and e["state"] != "completed"]
        return _operation(waiting[0]) if waiting else None

    def newest(self) -> Operation | None:
        """The collective begun last, finished or not. As slow."""
        entries = self._entries()
        return _operation(entries[-1]) if entries else None

    def _entries(self) -> list[dict]:
        return [e for e in self._read(True).get("entries", []) if e["pg_id"] == 0 and not e["is_p2p"]]

    def _read(self, entries: bool) -> dict:
        try:
            return json.loads(self._dump(entries, False)) if self._dump is not None else {}
        except (RuntimeError, ValueError):  # a report must not fail for want of a detail
            return {}


def _operation(entry: dict) -> Operation:
    elements = sum(math.prod(shape) for shape in entry["input_sizes"])
    dtype = entry["input_dtypes"][0] if entry["input_dtypes"] else ""
    return Operation(entry["collective_seq_id"], entry["profiling_name"].rpartition(":")[2], elements, dtype)
