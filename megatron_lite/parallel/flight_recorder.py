"""What torch's flight recorder knows of this rank's collectives. Reading it talks to nobody.

Gloo's operations are in the recorder of c10d, NCCL's in one of its own; both are on unless TORCH_FR_BUFFER_SIZE is 0.
"""

import json
import math
from dataclasses import dataclass

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _resolve_process_group

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


DEFAULT = "0"  # the group of all ranks
STAGES = "stages"  # in its place: what stages of a pipeline hand each other, which gloo's recorder does not know


@dataclass(frozen=True)
class Operation:
    """One collective. `number` counts from 1 in its group, and is the same on all of the group's ranks.

    Or a tensor that another stage of the pipeline sends or takes: `name` says what, `ranks` is that other rank.
    """

    number: int
    name: str  # all_reduce, broadcast, ...
    elements: int = 0
    dtype: str = ""
    group: str = DEFAULT
    ranks: tuple[int, ...] = ()  # of a group that is not of all

    @property
    def awaited(self) -> tuple[str, int, tuple[int, ...]]:
        """What tells it from others, and whom it waits for."""
        return self.group, self.number, self.ranks

    def __str__(self) -> str:
        if self.group == STAGES:
            return f"{self.name} rank {self.ranks[0]}"
        among = f" of ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        if self.dtype not in DTYPES or not self.elements:
            return f"{self.name} #{self.number}{among}"
        dtype, width = DTYPES[self.dtype]
        return f"{self.name} #{self.number} ({size(self.elements * width)} {dtype}){among}"


class FlightRecorder:
    """The recorder of all groups of this process."""

    def __init__(self, backend: str):
        # private, but what torch's own debug server uses; NCCL's is missing from builds without NCCL
        self._dump = getattr(c10d, "_dump_nccl_trace_json" if backend == "nccl" else "_dump_fr_trace_json", None)
        self._names = {0: DEFAULT}  # by the recorder's own number of a group

    def counts(self) -> dict[str, tuple[int, int]]:
        """By group, numbers of the collective begun last and of the one finished last; none if nothing is recorded.

        Microseconds. Gloo may finish a later one first: its two numbers need not meet.
        """
        found = {}
        for group, status in self._read(False).get("pg_status", {}).items():
            if int(group) not in self._names:
                self._operations()  # they tell its name
            # NCCL says -1 before the first one
            numbers = tuple(max(int(status.get(f"last_{what}_collective", 0)), 0) for what in ("enqueued", "completed"))
            found[self._names.get(int(group), f"unknown {group}")] = numbers
        return found

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
            group = self._names[entry["pg_id"]] = entry["process_group"][0]
            if not entry["is_p2p"]:
                elements = sum(math.prod(shape) for shape in entry["input_sizes"])
                name, dtype = entry["profiling_name"].rpartition(":")[2], (entry["input_dtypes"] or [""])[0]
                operation = Operation(entry["collective_seq_id"], name, elements, dtype, group, find_ranks(group))
                found.append((operation, entry["retired"] or entry["state"] == "completed"))
        return found

    def _read(self, entries: bool) -> dict:
        try:
            return json.loads(self._dump(entries, False)) if self._dump is not None else {}
        except (RuntimeError, ValueError):  # a report must not fail for want of a detail
            return {}


def describe_hand_over(rank: int, what: str) -> Operation:
    """'the forward of micro-batch 3 from' rank 1, for which another rank waits."""
    return Operation(1, what, group=STAGES, ranks=(rank,))


def find_ranks(group: str) -> tuple[int, ...]:
    """Of a group that is not of all ranks; () where it is, or is not known."""
    try:
        ranks = tuple(dist.get_process_group_ranks(_resolve_process_group(group)))
        return ranks if len(ranks) < dist.get_world_size() else ()
    except (RuntimeError, ValueError, LookupError):
        return ()
