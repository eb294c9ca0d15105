"""The place in the training loop where a process is: kept by the thread that trains, read by another one."""

import statistics
import time
from collections import deque

STEPS_OF_USUAL = 31  # whose median is the usual duration
MIN_STEPS_OF_USUAL = 3
FIRST_ORDINARY_STEP = 2  # the first compiles, and fills caches


class StepPosition:
    """Step, phase, and how long both have lasted. Times are of time.monotonic()."""

    def __init__(self) -> None:
        self.step = 0
        self.phase: str | None = None
        self.phase_since = time.monotonic()
        self.step_since = self.phase_since
        self._durations_s: deque[float] = deque(maxlen=STEPS_OF_USUAL)

    def enter(self, phase: str) -> None:
        """Note that a phase of the step begins; "": that the loop is between phases."""
        self.phase = phase or None
        self.phase_since = time.monotonic()

    def begin_step(self, step: int) -> None:
        """Note that a step begins, and the one before has ended. step: counted from 1."""
        now = time.monotonic()
        if self.step >= FIRST_ORDINARY_STEP:
            self._durations_s.append(now - self.step_since)
        self.step = step
        self.step_since = now
        self.phase_since = now

    def compute_usual_s(self) -> float | None:
        """Median duration of the last steps in seconds; None before there are some."""
        # the other thread appends meanwhile
        durations_s = self._durations_s.copy()
        return statistics.median(durations_s) if len(durations_s) >= MIN_STEPS_OF_USUAL else None
