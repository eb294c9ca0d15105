"""Profiles a run that is already going on, when the user makes the file RUN/profile.now."""

import contextlib
import os
import time
from pathlib import Path

from megatron_lite.config.plan import Plan
from megatron_lite.instruments.base import Instrument, Window
from megatron_lite.run_folder import write_atomically
from megatron_lite.shared_files import read_bounded

REQUEST = "profile.now"  # made by the user: empty, or with the number of steps
ANSWER = "profile.next"  # written for other ranks by the one that took the request: "FIRST STOP"
SECONDS_BETWEEN_LOOKS = 0.2  # a folder on a network may take milliseconds to answer
MAX_STEPS_APART = 5  # hosts: every rank reads back results that are two steps old, which need all ranks
MAX_BYTES = 100  # read of either: other people may write to the folder
MAX_STEPS = 1000  # a step of a large model is tens of megabytes of trace, held in memory until the end


class OnDemand(Instrument):
    """Moves the window when the file REQUEST appears in `run_dir`.

    Ranks run no collective for this. The leading rank takes the request and writes the first profiled step to the file
    ANSWER, far enough ahead for all ranks to read it in time; a rank that reads it late joins late.
    """

    def __init__(self, window: Window, plan: Plan, run_dir: Path, tell):
        profile, world = plan.args.profile, plan.world
        self.window, self._tell, self._planned = window, tell, window.steps
        self._request, self._answer = run_dir / REQUEST, run_dir / ANSWER
        self._length = max(profile.profile_step_end - max(profile.profile_step_start, 1), 1)
        self._leads = world.rank == min(plan.profile_ranks, default=-1)
        self._alone = plan.profile_ranks | {world.size - 1} == {world.rank}  # no other rank follows
        # what is done in the window; None: nothing can be. nsys holds the GPU's counters, and does not record it
        # either: it was told before the run when to collect, and that is over or taken after one window.
        self._records = "profiling"
        if world.under_nsys and plan.device == "cuda":
            only_memory = "nsys holds the GPU's counters, so only memory is recorded in"
            self._records = only_memory if profile.record_memory_history else None
        self._seen = None  # the last answer that was followed
        self._stays = False  # the request was taken but cannot be removed
        self._looked_at, self._looked_in_step = time.monotonic(), 0

    def open(self):
        if self._leads:  # left by an earlier run
            self._answer.unlink(missing_ok=True)

    def begin(self, step: int):
        window = self.window
        if window.on_demand and step >= window.steps.stop + window.margin:
            window.steps, window.on_demand = self._planned if self._planned.start > step else range(0), False
            if self._leads:
                self._answer.unlink(missing_ok=True)
        now = time.monotonic()
        if now - self._looked_at < SECONDS_BETWEEN_LOOKS:
            return
        if not window.on_demand:
            if self._leads:
                self._lead(step, (step - self._looked_in_step) / max(now - self._looked_at, 1e-3))
            else:
                self._follow(step)
        self._looked_at, self._looked_in_step = now, step

    def close(self, error: BaseException | None):
        if self._leads:
            self._answer.unlink(missing_ok=True)
            if os.path.lexists(self._request) and not self._stays:
                self._tell(f"{self._request} came too late for this run and stays; the next run will take it.")

    def _lead(self, step: int, steps_per_second: float):
        there = os.path.lexists(self._request)
        self._stays = self._stays and there
        length = self._take() if there and not self._stays else None
        if length is None:
            return
        first = step + 2 if self._alone else step + MAX_STEPS_APART + int(3 * SECONDS_BETWEEN_LOOKS * steps_per_second)
        steps, planned = range(first, first + length), self._planned
        if self._records is None:
            told = (
                ": nsys holds the GPU's counters in this run and collects the planned window only, "
                "so nothing is profiled; "
                "start the run without nsys to profile on demand."
            )
        elif planned and planned.start <= steps.stop and planned.stop > step:
            held = f"{planned.start}-{planned.stop - 1}"
            told = f": steps {held} are about to be profiled anyway; ask again after them."
        elif first > self.window.last_step:
            told = f": the run ends before step {first}, so nothing is profiled."
        else:
            if not self._alone:
                write_atomically(self._answer, f"{steps.start} {steps.stop}")
            self.window.steps, self.window.on_demand = steps, True
            told = f" taken: {self._records} {self.window.words()}."
        self._tell(f"{self._request}{told}")

    def _take(self) -> int | None:
        """The number of steps asked for; None if it cannot be read. Removes the file, if that is possible.

        Its text is never printed: the file may be a link to a secret that this process can read and the file's maker
        cannot.
        """
        wrong = f"holds no number of steps from 1 to {MAX_STEPS}"
        try:
            text = read_bounded(self._request, MAX_BYTES).strip()
        except OSError as error:
            text, wrong = "?", f"cannot be read ({error.strerror})"
        try:
            self._request.unlink()
        except OSError:
            self._stays = True
        if not text:
            return self._length
        if text.isdecimal() and 0 < int(text) <= MAX_STEPS:
            return int(text)
        self._tell(
            f"{self._request}: {wrong}, so nothing is profiled; "
            f"make it an empty file for {self._length} steps, or write "
            "their number into it."
        )
        return None

    def _follow(self, step: int):
        with contextlib.suppress(OSError, ValueError):
            first, stop = map(int, read_bounded(self._answer, MAX_BYTES).split())
            if self._seen != (first, stop) and step < stop:
                self.window.steps, self.window.on_demand = range(max(first, step), stop), True
                self.window.traced_on_demand = True  # by the one that leads, at least
            self._seen = first, stop
