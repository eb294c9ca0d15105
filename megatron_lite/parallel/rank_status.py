"""The status of a rank, which ranks tell each other in the store where they met: position in the run, collectives.

A status is short, in JSON, replaced every second. The store lives in torchrun's agent, or without one in rank 0, and
outlives every other rank. Collectives are read from torch's flight recorder, which talks to nobody; it is on unless
TORCH_FR_BUFFER_SIZE is 0.
"""

import json
import os
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store, _resolve_process_group  # mypy does not find Store in dist

from megatron_lite.formats.failure_record import RankAtFailure, encode_last_words
from megatron_lite.marks import split_mark
from megatron_lite.plain_pickles import PlainUnpickler
from megatron_lite.postmortem.evidence import ALL_RANKS_DESCRIPTION, ALL_RANKS_GROUP
from megatron_lite.process_state import pid_space

if TYPE_CHECKING:
    # torch's type for the name of a group, which not all of its versions have
    from torch.distributed.distributed_c10d import GroupName

MAX_FRAMES = 40
# keys of the store
FAILED_RANKS = "ranks_failed"
VERDICT = "ranks_verdict"
SPEAKER = "ranks_speaker"
SECONDS_BETWEEN_STORE_LOOKS = 0.05
# private, but what torch's own debug server calls; NCCL's are missing from builds without NCCL
COUNTS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
DUMPS = {"nccl": "_dump_nccl_trace", "gloo": "_dump_fr_trace"}
# of an excerpt: the newest calls of each group, with the innermost frames of their stacks
MAX_CALLS_OF_GROUP = 8
MAX_CALLS_OF_EXCERPT = 64
MAX_FRAMES_OF_CALL = 16


class FlightRecorder:
    """The recorder of all groups of this process. backend: gloo or nccl."""

    def __init__(self, backend: str):
        self._backend = backend
        self._read_counts: Callable[[bool, bool], str | bytes] | None = getattr(c10d, COUNTS[backend], None)
        self._dump: Callable[[bool, bool, bool], bytes] | None = getattr(c10d, DUMPS[backend], None)
        # by the recorder's own number of a group
        self._names = {0: ALL_RANKS_GROUP}

    def counts(self) -> dict[str, tuple[int, int]]:
        """Read how far each group is; takes microseconds.

        Gloo may finish a later collective first: its two numbers need not meet. Its numbers count messages, too.

        Returns:
            By group, the numbers of the collective begun last and of the one finished last; empty if nothing is
            recorded.
        """
        if self._read_counts is None:
            return {}
        try:
            status = json.loads(self._read_counts(False, False)).get("pg_status", {})
        except (RuntimeError, ValueError):
            # a report must not fail for want of a detail
            return {}
        found = {}
        for number, group in status.items():
            if int(number) not in self._names:
                # calls tell its name, unless all of them were forgotten
                self._learn_names()
                self._names.setdefault(int(number), f"unknown {number}")
            # some versions write text; NCCL says -1 before the first one
            begun = max(int(group.get("last_enqueued_collective", 0)), 0)
            finished = max(int(group.get("last_completed_collective", 0)), 0)
            found[self._names[int(number)]] = (begun, finished)
        return found

    def has_unfinished(self) -> bool:
        """Tell whether some collective has not finished. Takes tens of milliseconds."""
        entries = self._load().get("entries", [])
        return any(not entry["retired"] and entry["state"] != "completed" for entry in entries)

    def dump(self) -> bytes:
        """All that is recorded, with the lines that called it, pickled as torch does; b"" where there is nothing.

        Takes tens of milliseconds.
        """
        if self._dump is None:
            return b""
        try:
            return self._dump(True, True, False)
        except RuntimeError:
            return b""

    def excerpt(self, stage_wait: "StageWait | None" = None) -> str:
        """The newest calls of each group in the recorder's own form, as JSON, with the ranks of the groups.

        Args:
            stage_wait: What this rank waits for meanwhile.

        Returns:
            The JSON; "" where nothing is recorded.
        """
        values = self._load()
        if not values:
            return ""
        entries = _choose_newest(values.get("entries", []))
        groups = dict(values.get("pg_config", {}))
        for entry in entries:
            name, description = entry["process_group"]
            # gloo leaves them out
            groups[name] = {"name": name, "desc": description, "ranks": str(find_ranks(name))}
        if stage_wait is not None and self._backend == "gloo":
            entries.append(_describe_message(stage_wait, entries))
        return json.dumps(values | {"entries": entries, "pg_config": groups})

    def _learn_names(self) -> None:
        for entry in self._load().get("entries", []):
            self._names[entry["pg_id"]] = entry["process_group"][0]

    def _load(self) -> dict[str, Any]:
        """The dump as plain values."""
        dump = self.dump()
        if not dump:
            return {}
        values = PlainUnpickler(dump).load()
        return values if isinstance(values, dict) else {}


def _choose_newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Choose the newest calls of each group, oldest first, with the innermost frames of each."""
    counts: Counter[str] = Counter()
    chosen: list[dict[str, Any]] = []
    for entry in reversed(entries):
        group = entry["process_group"][0]
        counts[group] += 1
        if counts[group] <= MAX_CALLS_OF_GROUP and len(chosen) < MAX_CALLS_OF_EXCERPT:
            frames = entry.get("frames", [])[:MAX_FRAMES_OF_CALL]
            chosen.append(entry | {"frames": frames})
    return chosen[::-1]


def _describe_message(waiting: "StageWait", entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Describe the message that this rank waits for, as NCCL's recorder does.

    Args:
        waiting: The message.
        entries: All that the recorder has itself.
    """
    rank = dist.get_rank()
    title = f"recv {rank}<-{waiting.rank}" if waiting.is_received else f"send {rank}->{waiting.rank}"
    record = 1 + max((entry["record_id"] for entry in entries), default=-1)
    return {
        "record_id": record,
        "pg_id": 0,
        "process_group": (ALL_RANKS_GROUP, ALL_RANKS_DESCRIPTION),
        "collective_seq_id": 0,
        "p2p_seq_id": record,
        "profiling_name": f"gloo:{title}",
        "state": "started",
        "is_p2p": True,
        "time_created_ns": time.time_ns(),
    }


def sum_counts(counts: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """How many collectives of all groups have begun, and how many have finished. counts: those of FlightRecorder."""
    begun = 0
    finished = 0
    for begun_in_group, finished_in_group in counts.values():
        begun += begun_in_group
        finished += finished_in_group
    return begun, finished


def find_ranks(group: "GroupName") -> list[int]:
    """Find the ranks of a group by torch's name of it; [] where it is not known."""
    try:
        return list(dist.get_process_group_ranks(_resolve_process_group(group)))
    except (RuntimeError, ValueError, LookupError):
        return []


@dataclass(frozen=True)
class StageWait:
    """A tensor between stages of a pipeline, which gloo's recorder does not know."""

    # the other stage's rank
    rank: int
    # "the forward of micro-batch 3 from", or "an earlier tensor to arrive at"
    what: str

    @property
    def is_received(self) -> bool:
        """Whether the other rank sends it."""
        return self.what.endswith(" from")

    def __str__(self) -> str:
        return f"{self.what} rank {self.rank}"


@dataclass
class RunPosition:
    """The place in the run where this process is; kept by the trainer, read by another thread."""

    step: int = 0  # of this run, from 1
    started_at: int | None = None  # the iteration that this run started from, once it is known
    phase: str | None = None
    since: float = field(default_factory=time.monotonic)
    stage_wait: StageWait | None = None  # while this rank waits for another stage of the pipeline

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
    begun, finished = counts.get(ALL_RANKS_GROUP, (0, 0))
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
        groups={group: last for group, (last, _) in counts.items() if group != ALL_RANKS_GROUP},
        waits_for=str(where.stage_wait or ""),
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

    def set_recording(self, excerpt: str) -> None:
        """Tell the others what this rank's flight recorder has. excerpt: that of FlightRecorder."""
        self._store.set(f"recording_{self.rank}", excerpt)

    def get_recordings(self, ranks: Iterable[int]) -> dict[int, str]:
        """The excerpt of each of these ranks that has told one."""
        there = [rank for rank in ranks if self._store.check([f"recording_{rank}"])]
        return {rank: self._store.get(f"recording_{rank}").decode() for rank in there}

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
