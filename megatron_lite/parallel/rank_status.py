"""What ranks know of themselves and tell each other: position in the run, collectives, and a status in the store where
they met.

A status is short, in JSON, replaced every second. The store lives in torchrun's agent, or without one in rank 0, and
outlives every other rank. Collectives are read from torch's flight recorder, which talks to nobody; it is on unless
TORCH_FR_BUFFER_SIZE is 0.
"""

import dataclasses
import json
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _resolve_process_group

from megatron_lite.marks import split_mark
from megatron_lite.process_state import pid_space
from megatron_lite.units import size

MAX_FRAMES = 40
FAILED, VERDICT, SPEAKER = "ranks_failed", "ranks_verdict", "ranks_speaker"
SECONDS_BETWEEN_LOOKS = 0.05
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
        # as the recorder calls types: torch.FloatTensor
        tensors = getattr(torch, f"{self.dtype}Tensor", None) if self.dtype else None
        if tensors is None or not self.elements:
            return f"{self.name} #{self.number}{among}"
        dtype = str(tensors.dtype).removeprefix("torch.")
        return f"{self.name} #{self.number} ({size(self.elements * tensors.dtype.itemsize)} {dtype}){among}"


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


@dataclass
class RunPosition:
    """Where in the run this process is; kept by the trainer, read by another thread."""

    step: int = 0  # of this run, from 1
    started_at: int | None = None  # the iteration that this run started from, once it is known
    phase: str | None = None
    since: float = field(default_factory=time.monotonic)
    hand_over: Operation | None = None  # between stages of a pipeline, for which this rank waits

    def enter(self, phase: str | None):
        """A phase of the step begins; None: between phases."""
        self.phase, self.since = phase, time.monotonic()


@dataclass(frozen=True)
class RankStatus:
    """One rank's word."""

    host: str
    pids: str | None  # the space of process ids; containers on one host have one each
    pid: int
    wall_time: float  # seconds since 1970, when it was written
    step: int = 0
    started_at: int | None = None
    phase: str | None = None
    phase_s: float = 0.0  # time in this phase so far
    begun: int = 0  # number of the collective of all ranks that it joined last
    finished: int = 0  # and of the one it finished last
    # by name of a group of some ranks, number of the one that it joined last there
    groups: dict[str, int] = field(default_factory=dict)
    # when asked: group, number and ranks of the oldest one that is not finished
    waiting: tuple[str, int, Sequence[int]] | None = None
    answers: bool = False  # written when asked, not of its own accord
    left: str | None = None  # how it ended, if it could still say so
    blameless: bool = False  # it left because another rank had, because it was told to, or at the end
    stack: list[str] = field(default_factory=list)  # of its main thread, innermost first: "f (file.py:12)"

    @property
    def place(self) -> str:
        """'iteration 52, phase data'."""
        if not self.step:
            return "the start, before the first step"
        done = (
            f"step {self.step} of this run" if self.started_at is None else f"iteration {self.started_at + self.step}"
        )
        return f"{done}, phase {self.phase}" if self.phase else done


def describe_rank(where: RunPosition, counts: dict[str, tuple[int, int]], **more) -> RankStatus:
    """This process's status; counts: of its flight recorder."""
    since = time.monotonic() - where.since
    place = (socket.gethostname(), pid_space(), os.getpid(), time.time())
    groups = {group: begun for group, (begun, _) in counts.items() if group != DEFAULT}
    of_all = counts.get(DEFAULT, (0, 0))
    return RankStatus(*place, where.step, where.started_at, where.phase, since, *of_all, groups, **more)


def read_stack(thread: int) -> list[str]:
    """Where a thread of this process is, innermost first."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return []
    calls = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MAX_FRAMES, lookup_lines=False)
    return [f"{split_mark(call.name)[0]} ({call.filename}:{call.lineno})" for call in calls]


class RankStore:
    """Reads and writes take a round trip to the store each. Errors are dist.DistError or RuntimeError."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        self._store, self.rank, self.size = store, rank, size

    def set_status(self, status: RankStatus):
        """Replace this rank's post."""
        self._store.set(f"rank_{self.rank}", json.dumps(dataclasses.asdict(status)))

    def get_statuses(self, ranks) -> dict[int, RankStatus]:
        """The newest of those that have written one."""
        there = [rank for rank in ranks if self._store.check([f"rank_{rank}"])]
        return {rank: RankStatus(**json.loads(self._store.get(f"rank_{rank}"))) for rank in there}

    def claim_speaker(self) -> bool:
        """May this rank speak for all? Only the first that asks; the question asks all ranks to answer."""
        first = self._store.add(SPEAKER, 1) == 1
        if first:
            self._store.set(FAILED, "")
        return first

    def has_failed(self) -> bool:
        """Did some rank give up? Then every rank should answer."""
        return self._store.check([FAILED])

    def publish_cause(self, line: str):
        """What the speaker has found out; empty for nothing."""
        self._store.set(VERDICT, json.dumps(line))  # the store refuses half a character, as paths may hold

    def wait_for_cause(self, within_s: float) -> str | None:
        """The speaker's line, when it comes in time."""
        end = time.monotonic() + within_s
        while not self._store.check([VERDICT]):
            if time.monotonic() >= end:
                return None
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return json.loads(self._store.get(VERDICT))
