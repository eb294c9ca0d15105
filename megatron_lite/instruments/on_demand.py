"""Profiles a run that is already going on, when the user makes the file RUN/profile.now."""

import contextlib
import os
import time
from pathlib import Path

from megatron_lite.config.plan import Plan
from megatron_lite.instruments.base import Instrument, Tell, Window
from megatron_lite.run_folder import write_atomically
from megatron_lite.shared_files import read_bounded

REQUEST = "profile.now"  # made by the user: empty, or with the number of steps
ANSWER = "profile.next"  # written for other ranks by the one that took the request: "FIRST STOP"
SECONDS_BETWEEN_REQUEST_LOOKS = 0.2  # a folder on a network may take milliseconds to answer
MAX_STEPS_APART = 5  # hosts: every rank reads back results that are two steps old, which need all ranks
MAX_REQUEST_BYTES = 100  # read of either: other people may write to the folder
MAX_REQUESTED_STEPS = 1000  # a step of a large model is tens of megabytes of trace, held in memory until the end


class OnDemand(Instrument):
    """Moves the window when the file REQUEST appears in `run_dir`.

    Ranks run no collective for this. The leading rank takes the request and writes the first profiled step to the file
    ANSWER, far enough ahead for all ranks to read it in time; a rank that reads it late joins late.

    Args:
        window: The profiled steps.
        plan: The run's, on this rank.
        run_dir: Where the user asks.
        tell: Called with each line for the console.
    """

    def __init__(self, window: Window, plan: Plan, run_dir: Path, tell: Tell) -> None:
        profile = plan.args.profile
        world = plan.world
        self.window = window
        self._tell = tell
        self._planned = window.steps
        self._request = run_dir / REQUEST
        self._answer = run_dir / ANSWER
        self._length = max(profile.profile_step_end - max(profile.profile_step_start, 1), 1)
        self._leads = world.rank == min(plan.profile_ranks, default=-1)
        self._alone = plan.profile_ranks | {world.size - 1} == {world.rank}  # no other rank follows
        # what is done in the window; None: nothing can be. nsys holds the GPU's counters, and does not record it
        # either: it was told before the run when to collect, and that is over or taken after one window.
        self._records: str | None = "profiling"
        if world.under_nsys and plan.device == "cuda":
            only_memory = "nsys holds the GPU's counters, so only memory is recorded in"
            self._records = only_memory if profile.record_memory_history else None
        self._seen: tuple[int, int] | None = None  # the last answer that was followed
        self._stays = False  # the request was taken but cannot be removed
        self._looked_at = time.monotonic()
        self._looked_in_step = 0

    def open(self) -> None:
        if self._leads:  # left by an earlier run
            self._answer.unlink(missing_ok=True)

    def begin(self, step: int) -> None:
        window = self.window
        if window.on_demand and step >= window.steps.stop + window.margin:
            window.steps = self._planned if self._planned.start > step else range(0)
            window.on_demand = False
            if self._leads:
                self._answer.unlink(missing_ok=True)
        now = time.monotonic()
        if now - self._looked_at < SECONDS_BETWEEN_REQUEST_LOOKS:
            return
        if not window.on_demand:
            if self._leads:
                self._lead(step, (step - self._looked_in_step) / max(now - self._looked_at, 1e-3))
            else:
                self._follow(step)
        self._looked_at = now
        self._looked_in_step = step

    def close(self, error: BaseException | None) -> None:
        if self._leads:
            self._answer.unlink(missing_ok=True)
            if os.path.lexists(self._request) and not self._stays:
                self._tell(f"{self._request} came too late for this run and stays; the next run will take it.")

    def _lead(self, step: int, steps_per_second: float) -> None:
        """Take a request, if there is one, and report what becomes of it."""
        is_there = os.path.lexists(self._request)
        self._stays = self._stays and is_there
        if not is_there or self._stays:
            return
        length = self._take()
        if length is None:
            return
        if self._alone:
            first = step + 2
        else:
            first = step + MAX_STEPS_APART + int(3 * SECONDS_BETWEEN_REQUEST_LOOKS * steps_per_second)
        told = self._move_window(step, range(first, first + length))
        self._tell(f"{self._request}{told}")

    def _move_window(self, step: int, steps: range) -> str:
        """Move the window to the steps asked for, where that is possible.

        Args:
            step: The one that begins.
            steps: Steps that are to be profiled.

        Returns:
            What becomes of the request, as the end of a sentence.
        """
        planned = self._planned
        if self._records is None:
            return (
                ": nsys holds the GPU's counters in this run and collects the planned window only, "
                "so nothing is profiled; start the run without nsys to profile on demand."
            )
        if planned and planned.start <= steps.stop and planned.stop > step:
            held = f"{planned.start}-{planned.stop - 1}"
            return f": steps {held} are about to be profiled anyway; ask again after them."
        if steps.start > self.window.last_step:
            return f": the run ends before step {steps.start}, so nothing is profiled."
        if not self._alone:
            write_atomically(self._answer, f"{steps.start} {steps.stop}")
        self.window.steps = steps
        self.window.on_demand = True
        return f" taken: {self._records} {self.window.words()}."

    def _take(self) -> int | None:
        """Read the number of steps asked for; None if it cannot be read. Removes the file, if that is possible.

        Its text is never printed: the file may be a link to a secret that this process can read and the file's maker
        cannot.
        """
        wrong = f"holds no number of steps from 1 to {MAX_REQUESTED_STEPS}"
        try:
            text = read_bounded(self._request, MAX_REQUEST_BYTES).strip()
        except OSError as error:
            text = "?"
            wrong = f"cannot be read ({error.strerror})"
        try:
            self._request.unlink()
        except OSError:
            self._stays = True
        if not text:
            return self._length
        if text.isdecimal() and 0 < int(text) <= MAX_REQUESTED_STEPS:
            return int(text)
        self._tell(
            f"{self._request}: {wrong}, so nothing is profiled; "
            f"make it an empty file for {self._length} steps, or write "
            "their number into it."
        )
        return None

    def _follow(self, step: int) -> None:
        """Move the window as the leading rank has answered, if it has."""
        with contextlib.suppress(OSError, ValueError):
            first, stop = map(int, read_bounded(self._answer, MAX_REQUEST_BYTES).split())
            if self._seen != (first, stop) and step < stop:
                self.window.steps = range(max(first, step), stop)
                self.window.on_demand = True
                self.window.traced_on_demand = True  # by the one that leads, at least
            self._seen = (first, stop)
