"""The status of a rank, which ranks tell each other in the store where they met: position in the run, collectives.

A status is short, in JSON, replaced every second. The store lives in torchrun's agent, or without one in rank 0, and
outlives every other rank. Collectives are read from torch's flight recorder, which talks to nobody; it is on unless
TORCH_FR_BUFFER_SIZE is 0.
"""

import json
import math
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

import msgspec
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store, _resolve_process_group  # mypy does not find Store in dist

from megatron_lite.formats.failure_record import RankAtFailure, encode_last_words
from megatron_lite.marks import split_mark
from megatron_lite.process_state import pid_space
from megatron_lite.units import size

if TYPE_CHECKING:
    # torch's type for the name of a group, which not all of its versions have
    from torch.distributed.distributed_c10d import GroupName

MAX_FRAMES = 40
# keys of the store
FAILED_RANKS = "ranks_failed"
VERDICT = "ranks_verdict"
SPEAKER = "ranks_speaker"
SECONDS_BETWEEN_STORE_LOOKS = 0.05
DEFAULT = "0"  # the group of all ranks
STAGE_TRANSFERS = (
    "stages"  # in its place: what stages of a pipeline hand each other, which gloo's recorder does not know
)


@dataclass(frozen=True)
class Operation:
    """A collective, or a tensor that another stage of the pipeline sends or takes.

    A collective's `number` counts from 1 in its group, and is the same on all of the group's ranks. Of a tensor between
    stages `name` says what it is, and `ranks` is the other rank.
    """

    number: int
    name: str  # all_reduce, broadcast, ...
    elements: int = 0
    dtype: str = ""
    group: str = DEFAULT
    ranks: tuple[int, ...] = ()  # of a group that is not of all

    @property
    def awaited(self) -> tuple[str, int, tuple[int, ...]]:
        """The group, the number and the ranks that tell the operation from others, and whom it waits for."""
        return self.group, self.number, self.ranks

    def __str__(self) -> str:
        if self.group == STAGE_TRANSFERS:
            return f"{self.name} rank {self.ranks[0]}"
        among = f" of ranks {', '.join(map(str, self.ranks))}" if self.ranks else ""
        # as the recorder calls types: torch.FloatTensor
        tensors = getattr(torch, f"{self.dtype}Tensor", None) if self.dtype else None
        if tensors is None or not self.elements:
            return f"{self.name} #{self.number}{among}"
        dtype: torch.dtype = tensors.dtype
        of_tensor = f"{size(self.elements * dtype.itemsize)} {str(dtype).removeprefix('torch.')}"
        return f"{self.name} #{self.number} ({of_tensor}){among}"


class _RecordedEntry(TypedDict):
    """The fields of a collective in the flight recorder's dump that are read here."""

    pg_id: int
    process_group: list["GroupName"]  # name and description
    is_p2p: bool
    collective_seq_id: int
    profiling_name: str  # such as gloo:all_reduce
    input_sizes: list[list[int]]
    input_dtypes: list[str]  # such as Float
    retired: bool
    state: str  # scheduled, started or completed


class _RecordedGroup(TypedDict, total=False):
    """The flight recorder's numbers of a group's collectives, which some versions write as text."""

    last_enqueued_collective: int | str
    last_completed_collective: int | str


class _Recording(TypedDict, total=False):
    """The flight recorder's dump; groups by their numbers."""

    pg_status: dict[str, _RecordedGroup]
    entries: list[_RecordedEntry]


class FlightRecorder:
    """The recorder of all groups of this process. backend: gloo or nccl."""

    def __init__(self, backend: str):
        # private, but what torch's own debug server uses; NCCL's is missing from builds without NCCL
        name = "_dump_nccl_trace_json" if backend == "nccl" else "_dump_fr_trace_json"
        self._dump: Callable[[bool, bool], str | bytes] | None = getattr(c10d, name, None)
        # by the recorder's own number of a group
        self._names = {0: DEFAULT}

    def counts(self) -> dict[str, tuple[int, int]]:
        """Read how far each group is; takes microseconds.

        Gloo may finish a later collective first: its two numbers need not meet.

        Returns:
            By group, the numbers of the collective begun last and of the one finished last; empty if nothing is
            recorded.
        """
        found = {}
        for group, status in self._read(False).get("pg_status", {}).items():
            if int(group) not in self._names:
                # they tell its name, unless all of them were forgotten
                self._operations()
                self._names.setdefault(int(group), f"unknown {group}")
            # NCCL says -1 before the first one
            begun = max(int(status.get("last_enqueued_collective", 0)), 0)
            finished = max(int(status.get("last_completed_collective", 0)), 0)
            found[self._names[int(group)]] = (begun, finished)
        return found

    def unfinished(self) -> Operation | None:
        """The oldest collective that is not finished. Takes tens of milliseconds: for a run that stands still."""
        return next((operation for operation, finished in self._operations() if not finished), None)

    def newest(self) -> Operation | None:
        """The collective begun last, finished or not. Takes as long as `unfinished`."""
        operations = self._operations()
        if not operations:
            return None
        operation, _ = operations[-1]
        return operation

    def _operations(self) -> list[tuple[Operation, bool]]:
        """Every recorded collective, oldest first, and whether it is finished."""
        found = []
        for entry in self._read(True).get("entries", []):
            group = entry["process_group"][0]
            self._names[entry["pg_id"]] = group
            if entry["is_p2p"]:
                continue
            operation = Operation(
                number=entry["collective_seq_id"],
                name=entry["profiling_name"].rpartition(":")[2],
                elements=sum(math.prod(shape) for shape in entry["input_sizes"]),
                dtype=(entry["input_dtypes"] or [""])[0],
                group=group,
                ranks=find_ranks(group),
            )
            is_finished = entry["retired"] or entry["state"] == "completed"
            found.append((operation, is_finished))
        return found

    def _read(self, entries: bool) -> _Recording:
        """Read the recorder's dump, empty where there is none. entries: with every collective."""
        if self._dump is None:
            return {}
        try:
            recording: _Recording = json.loads(self._dump(entries, False))
        except (RuntimeError, ValueError):  # a report must not fail for want of a detail
            return {}
        return recording


def sum_counts(counts: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """How many collectives of all groups have begun, and how many have finished. counts: those of FlightRecorder."""
    begun = 0
    finished = 0
    for begun_in_group, finished_in_group in counts.values():
        begun += begun_in_group
        finished += finished_in_group
    return begun, finished


def describe_hand_over(rank: int, what: str) -> Operation:
    """Describe what another rank waits for. rank, what: such as 1 and 'the forward of micro-batch 3 from'."""
    return Operation(1, what, group=STAGE_TRANSFERS, ranks=(rank,))


def find_ranks(group: "GroupName") -> tuple[int, ...]:
    """Find the ranks of a group by torch's name of it; () where it is of all ranks, or is not known."""
    try:
        ranks = tuple(dist.get_process_group_ranks(_resolve_process_group(group)))
        return ranks if len(ranks) < dist.get_world_size() else ()
    except (RuntimeError, ValueError, LookupError):
        return ()


@dataclass
class RunPosition:
    """The place in the run where this process is; kept by the trainer, read by another thread."""

    step: int = 0  # of this run, from 1
    started_at: int | None = None  # the iteration that this run started from, once it is known
    phase: str | None = None
    since: float = field(default_factory=time.monotonic)
    hand_over: Operation | None = None  # between stages of a pipeline, for which this rank waits

    def enter(self, phase: str | None) -> None:
        """Note that a phase of the step begins; None: that the trainer is between phases."""
        self.phase = phase
        self.since = time.monotonic()


def describe_position(status: RankAtFailure) -> str:
    """Write the position in the run that a status tells, as in 'iteration 52, phase data'."""
    if not status.step:
        return "the start, before the first step"
    done = f"step {status.step} of this run"
    if status.started_at is not None:
        done = f"iteration {status.started_at + status.step}"
    return f"{done}, phase {status.phase}" if status.phase else done


def describe_rank(where: RunPosition, counts: dict[str, tuple[int, int]]) -> RankAtFailure:
    """Describe this process as far as it can be done without asking.

    Args:
        where: Place of the rank in the run.
        counts: The counts of its flight recorder.
    """
    begun, finished = counts.get(DEFAULT, (0, 0))
    return RankAtFailure(
        host=socket.gethostname(),
        pids=pid_space(),
        pid=os.getpid(),
        wall_time=time.time(),
        step=where.step,
        started_at=where.started_at,
        phase=where.phase,
        phase_s=time.monotonic() - where.since,
        begun=begun,
        finished=finished,
        groups={group: last for group, (last, _) in counts.items() if group != DEFAULT},
    )


def read_stack(thread: int) -> tuple[str, ...]:
    """The calls in which a thread of this process is, innermost first. thread: its identifier."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return ()
    calls = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MAX_FRAMES, lookup_lines=False)
    return tuple(f"{split_mark(call.name)[0]} ({call.filename}:{call.lineno})" for call in calls)


class RankStore:
    """The store in which ranks tell each other how they are.

    Reads and writes take a round trip to the store each. Errors are dist.DistError or RuntimeError.
    """

    def __init__(self, store: Store, rank: int, size: int):
        """
        Args:
            store: The connection, which only one thread uses.
            rank: This rank.
            size: All ranks.
        """
        self._store = store
        self.rank = rank
        self.size = size

    def set_status(self, status: RankAtFailure) -> None:
        """Replace this rank's post."""
        self._store.set(f"rank_{self.rank}", encode_last_words(status))

    def get_statuses(self, ranks: Iterable[int]) -> dict[int, RankAtFailure]:
        """The newest status of each of these ranks that has written one."""
        there = [rank for rank in ranks if self._store.check([f"rank_{rank}"])]
        found = {}
        for rank in there:
            # not msgspec's decoder, which refuses half a character, as paths may hold
            found[rank] = msgspec.convert(json.loads(self._store.get(f"rank_{rank}")), RankAtFailure)
        return found

    def claim_speaker(self) -> bool:
        """Ask to speak for all ranks, and ask them all to answer. Returns whether this rank may: only the first may."""
        first = self._store.add(SPEAKER, 1) == 1
        if first:
            self._store.set(FAILED_RANKS, "")
        return first

    def has_failed(self) -> bool:
        """Tell whether some rank gave up. Then every rank should answer."""
        return self._store.check([FAILED_RANKS])

    def publish_cause(self, line: str) -> None:
        """Tell all ranks what the speaker has found out; empty for nothing."""
        self._store.set(VERDICT, json.dumps(line))  # the store refuses half a character, as paths may hold

    def wait_for_cause(self, within_s: float) -> str | None:
        """Wait for the speaker's line; None if it does not come in time."""
        end = time.monotonic() + within_s
        while not self._store.check([VERDICT]):
            if time.monotonic() >= end:
                return None
            time.sleep(SECONDS_BETWEEN_STORE_LOOKS)
        line: str = json.loads(self._store.get(VERDICT))
        return line
