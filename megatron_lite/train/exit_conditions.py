"""Reasons to stop before the last iteration, agreed upon by all ranks."""

import os
import signal
import time

import torch
import torch.distributed as dist

from megatron_lite.config.args import TrainingArgs
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.loop import Progress
from megatron_lite.train.step_metrics import LAG, Readback

AGAIN_SECONDS = 5  # a signal to all processes comes twice, the second time from the launcher that passes it on
STAY, TIME_OVER, SIGNALLED, SAVE_FAILED = 0.0, 1.0, 2.0, 3.0


class ExitConditions:
    """--exit-interval, --exit-duration-in-mins, --exit-signal-handler, and a save in the background that failed."""

    def __init__(self, t: TrainingArgs, device: torch.device, checkpoints: Checkpoints, async_save: bool):
        self._checkpoints = checkpoints
        self._interval, self._minutes, self._signal = t.exit_interval, t.exit_duration_in_mins, t.exit_signal
        self._device, self._started = device, time.monotonic()
        self._signalled_at: float | None = None
        self._votes = Readback()
        if t.exit_signal_handler:
            signal.signal(getattr(signal, self._signal), self._note)
        # ranks see a signal, the clock or a thread's end at different steps: they must agree on one, or some would
        # wait forever
        self._must_agree = t.exit_signal_handler or t.exit_duration_in_mins is not None or async_save

    def reason(self, progress: Progress) -> str | None:
        """Why to leave now, in Megatron-LM's words; None to go on. Collective if ranks must agree.

        CheckpointError on every rank after a save in the background failed.
        """
        agreed = STAY
        if self._must_agree:
            over = self._minutes is not None and time.monotonic() - self._started >= 60 * self._minutes
            wish = SIGNALLED if self._signalled_at is not None else TIME_OVER if over else STAY
            wish = SAVE_FAILED if self._checkpoints.failed else wish
            vote = torch.full((), wish, device=self._device)  # a fill does not make the host wait, a copy would
            dist.all_reduce(vote, op=dist.ReduceOp.MAX)
            self._votes.push(None, (vote,))
            # all ranks read the same step's vote: on GPUs one that has arrived, on CPUs there is none to wait for
            lag = LAG if self._device.type == "cuda" else 0
            agreed = max((values[0] for _, values in self._votes.pop(lag)), default=STAY)
        if agreed == SAVE_FAILED:
            self._checkpoints.finish()
        if agreed == SIGNALLED:
            return f"exiting program after receiving {self._signal}."
        if agreed == TIME_OVER:
            return f"exiting program after {self._minutes} minutes"
        if self._interval and progress.iteration % self._interval == 0:
            return f"exiting program at iteration {progress.iteration}"
        return None

    def over(self):
        """Called after the last save: ignore a second signal, which must not kill a process that is about to end well.

        Python takes its handlers away while it shuts down, but leaves a signal that is ignored alone.
        """
        if self._signalled_at is not None:
            signal.signal(getattr(signal, self._signal), signal.SIG_IGN)

    def _note(self, number, frame):
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
        elif now - self._signalled_at > AGAIN_SECONDS:
            os._exit(128 + number)  # a second wish means now
