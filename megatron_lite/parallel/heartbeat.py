"""What one rank tells the others of itself: short, in JSON, replaced every second."""

import dataclasses
import json
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass, field

from megatron_lite.marks import split_mark
from megatron_lite.process_state import pid_space

MAX_FRAMES = 40


@dataclass
class Whereabouts:
    """Where in the run this process is; kept by the trainer, read by another thread."""

    step: int = 0  # of this run, from 1
    started_at: int | None = None  # the iteration that this run started from, once it is known
    phase: str | None = None
    since: float = field(default_factory=time.monotonic)

    def enter(self, phase: str | None):
        """A phase of the step begins; None: between phases."""
        self.phase, self.since = phase, time.monotonic()


@dataclass(frozen=True)
class Post:
    """One rank's word."""

    host: str
    pids: str | None  # the space of process ids; containers on one host have one each
    pid: int
    wall_time: float  # seconds since 1970, when it was written
    step: int = 0
    started_at: int | None = None
    phase: str | None = None
    phase_s: float = 0.0  # time in this phase so far
    begun: int = 0  # number of the collective it joined last
    finished: int = 0  # and of the one it finished last
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
            f"iteration {self.started_at + self.step}"
            if self.started_at is not None
            else f"step {self.step} of this run"
        )
        return f"{done}, phase {self.phase}" if self.phase else done

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> "Post":
        """The other way."""
        return cls(**json.loads(text))


def post_of(where: Whereabouts, counts: tuple[int, int], **more) -> Post:
    """This process's."""
    return Post(
        socket.gethostname(),
        pid_space(),
        os.getpid(),
        time.time(),
        where.step,
        where.started_at,
        where.phase,
        time.monotonic() - where.since,
        *counts,
        **more,
    )


def stack_of(thread: int) -> list[str]:
    """Where a thread of this process is, innermost first."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return []
    calls = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=MAX_FRAMES, lookup_lines=False)
    return [f"{split_mark(call.name)[0]} ({call.filename}:{call.lineno})" for call in calls]
