"""`touch RUN/profile.now`: a window for a run that is already going on."""

import contextlib
import os
import time
from pathlib import Path

from megatron_lite.instruments.base import Instrument, Window
from megatron_lite.run_folder import write_atomically
from megatron_lite.shared_files import read_bounded

REQUEST = "profile.now"  # the user's: empty, or the number of steps
ANSWER = "profile.next"  # of the rank that took it: "FIRST STOP", for the other ranks
SECONDS_BETWEEN_LOOKS = 0.2  # a folder on a network may take milliseconds to answer
MAX_STEPS_APART = 5  # hosts: every rank reads back results that are two steps old, which need all ranks
MAX_BYTES = 100  # read of either: other people may write to the folder
MAX_STEPS = 1000  # a step of a large model is tens of megabytes of trace, held in memory until the end


class OnDemand(Instrument):
    """Moves the window when asked to. `leads`: this rank takes the request; `alone`: and no other follows it.

    `last_step` gives this run's last step. `records`: what is done in the window, for the announcement; empty: nothing can
    be, and a request is refused. Ranks run no collective for this. The leading one names a step so far ahead that all see
    it in time, by the clock at which they look and the pace of the steps; one that sees it late joins late.
    """

    def __init__(
        self, window: Window, run_dir: Path, length: int, leads: bool, alone: bool, last_step, tell, records="profiling"
    ):
        self.window, self._length, self._leads, self._alone = window, length, leads, alone
        self._request, self._answer = run_dir / REQUEST, run_dir / ANSWER
        self._last_step, self._tell, self._records = last_step, tell, records
        self._scheduled = range(window.first, window.last + 1)
        self._seen = None  # the answer that was heeded
        self._stays = False  # the request that was heeded, as it cannot be removed
        self._looked_at, self._looked_in_step = time.monotonic(), 0

    def open(self):
        if self._leads:  # an answer of an earlier run
            self._answer.unlink(missing_ok=True)

    def begin(self, step: int):
        if self.window.on_demand and step > self.window.last + self.window.margin:
            self.window.move_to(self._scheduled if self._scheduled.start > step else range(0))
            if self._leads:
                self._answer.unlink(missing_ok=True)
        now = time.monotonic()
        if now - self._looked_at < SECONDS_BETWEEN_LOOKS:
            return
        if not self.window.on_demand:
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
        if not there or self._stays:
            return
        length = self._take()
        if length is None:
            return
        first = step + 2 if self._alone else step + MAX_STEPS_APART + int(3 * SECONDS_BETWEEN_LOOKS * steps_per_second)
        steps, scheduled = range(first, first + length), self._scheduled
        if not self._records:
            self._tell(
                f"{self._request}: nsys holds the GPU's counters in this run and collects the planned window only, "
                "so nothing is profiled; start the run without nsys to profile on demand."
            )
        elif scheduled and scheduled.start <= steps.stop and scheduled.stop > step:
            self._tell(
                f"{self._request}: steps {scheduled.start}-{scheduled.stop - 1} are about to be "
                "profiled anyway; ask again after them."
            )
        elif first > self._last_step():
            self._tell(f"{self._request}: the run ends before step {first}, so nothing is profiled.")
        else:
            if not self._alone:
                write_atomically(self._answer, f"{steps.start} {steps.stop}")
            self.window.move_to(steps, on_demand=True)
            self._tell(f"{self._request} taken: {self._records} {self.window.words()}.")

    def _take(self) -> int | None:
        """The number of steps asked for; None if it cannot be read. The file is gone afterwards, if it can be removed.

        What it holds is never repeated: it may be a link to a secret that its maker cannot read, but this process can.
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
            f"{self._request}: {wrong}, so nothing is profiled; make it an empty file for {self._length} steps, or write "
            "their number into it."
        )
        return None

    def _follow(self, step: int):
        if not os.path.lexists(self._answer):
            return
        with contextlib.suppress(OSError, ValueError):
            first, stop = map(int, read_bounded(self._answer, MAX_BYTES).split())
            if self._seen == (first, stop):
                return
            self._seen = first, stop
            if step < stop:
                self.window.move_to(range(max(first, step), stop), on_demand=True)
