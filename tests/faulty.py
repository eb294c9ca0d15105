"""The trainer with a rank that fails as it is told: faulty.py HOW LIMIT_SECONDS FLAGS, under a launcher.

Rank 1 fails before the step that follows 8 samples, "killed late" 40. LIMIT_SECONDS replaces --distributed-timeout-minutes.
"""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch.distributed as dist

from megatron_lite import app
from megatron_lite.__main__ import train
from megatron_lite.data import loader
from megatron_lite.errors import DataError
from megatron_lite.parallel import process_group
from megatron_lite.train import log
from megatron_lite.train.step import TrainingStep

CULPRIT, SAMPLES, SAMPLES_LATE = "1", 8, 40


def never_ends():
    while True:
        pass


class Endless:
    """Batches that never come."""

    def __iter__(self):
        return self

    def __next__(self):
        never_ends()


def fail(how: str, batches):
    if how == "exception":
        raise ZeroDivisionError("a mistake in this rank only")
    if how == "user":
        raise DataError("--data-path x: only this rank's file is damaged; mend it.")
    if how in ("killed", "killed late"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "killed once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stopped":
        # kills it once the launcher has asked for its end (SIGTERM is pending): the launcher itself waits for 30 s
        me = os.getpid()
        asked = f"grep -q 'ShdPnd:.*4000$' /proc/{me}/status"
        helper = f"while kill -0 {me}; do {asked} && kill -9 {me}; sleep 0.2; done 2>/dev/null"
        subprocess.Popen(["sh", "-c", helper], start_new_session=True)
        os.kill(me, signal.SIGSTOP)
    return Endless() if how == "loop" else batches


def hang_in_a_worker(samples):
    rank = os.getppid()
    while os.getppid() == rank:  # until the launcher has ended it
        time.sleep(0.1)


def tell_group():
    print(f"rank {os.environ['RANK']} has a group: {dist.is_initialized()}", flush=True)


def main() -> int:
    how, limit, inner = sys.argv[1], float(sys.argv[2]), TrainingStep.__call__
    log.SECONDS_AHEAD = 0  # every step is written at once
    process_group.get_time_limit = lambda parallel: timedelta(seconds=limit)

    def step(self, batches, consumed, phase):
        if consumed == (SAMPLES_LATE if how == "killed late" else SAMPLES) and os.environ["RANK"] == CULPRIT:
            batches = fail(how, batches)
        return inner(self, batches, consumed, phase)

    end_with_error = app.end_with_error  # after it the process ends at once

    def tell_and_end(error, world):
        tell_group()
        end_with_error(error, world)

    TrainingStep.__call__, app.end_with_error = step, tell_and_end
    if how == "data loader" and os.environ["RANK"] == CULPRIT:
        loader._stack = hang_in_a_worker
    try:
        return train(sys.argv[3:])
    finally:
        tell_group()


if __name__ == "__main__":
    sys.exit(main())
