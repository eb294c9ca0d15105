"""What ranks tell each other of themselves, in the store where they met: short, in JSON, replaced every second.

The store lives in torchrun's agent, or without one in rank 0, and outlives every other rank.
"""

import dataclasses
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from megatron_lite.marks import split_mark
from megatron_lite.parallel.flight_recorder import DEFAULT, Operation
from megatron_lite.process_state import pid_space

MAX_FRAMES = 40
FAILED, VERDICT, SPEAKER = "ranks_failed", "ranks_verdict", "ranks_speaker"
SECONDS_BETWEEN_LOOKS = 0.05


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
    groups: dict[str, int] = field(
        default_factory=dict
    )  # by name of a group of some ranks, of the one it joined last there
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
        self._store.set(VERDICT, line)

    def wait_for_cause(self, within_s: float) -> str | None:
        """The speaker's line, when it comes in time."""
        end = time.monotonic() + within_s
        while not self._store.check([VERDICT]):
            if time.monotonic() >= end:
                return None
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return self._store.get(VERDICT).decode()
