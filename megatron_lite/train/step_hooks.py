"""The hooks that run between steps: evaluating, saving, collecting garbage, and stopping before the last iteration."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.args import CheckpointArgs, TrainingArgs
from megatron_lite.config.plan import Plan
from megatron_lite.marks import EVALUATION, mark_memory
from megatron_lite.parallel.replica import Replica
from megatron_lite.phases import Phase
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.loop import Progress
from megatron_lite.train.step import BatchMaker, MicroBatches, loss_and_tokens
from megatron_lite.train.step_metrics import LAG, Readback, StepMetrics

AGAIN_SECONDS = 5  # a signal to all processes comes twice, the second time from the launcher that passes it on
# what ranks vote on: the highest vote counts
STAY = 0.0
TIME_OVER = 1.0
SIGNALLED = 2.0
SAVE_FAILED = 3.0


class HookLog(Protocol):
    """The part of the log that hooks use."""

    @property
    def metrics(self) -> StepMetrics:
        """The figures of steps, which a hook settles before it runs."""

    def evaluation(self, title: str, which: str, loss: float) -> None:
        """Called after each evaluation, on every rank.

        Args:
            title: Words before the loss, such as "iteration 5".
            which: validation or test.
            loss: Mean loss per token, in nats.
        """


@torch.no_grad()
@mark_memory(EVALUATION)
def evaluate(replica: Replica, batches: Iterator[Tensor], make: BatchMaker, micro_batches: int) -> float:
    """Compute the mean loss per token, in nats, over the next micro-batches of all ranks. Collective.

    Args:
        replica: The model.
        batches: This rank's raw_BT1, one micro-batch after the other.
        make: Makes batches of them.
        micro_batches: How many each rank takes.
    """
    chunks = replica.chunks
    feed = MicroBatches(batches, make, replica.pipeline, lambda phase: nullcontext())
    for chunk in chunks:
        chunk.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=make.device)
    for turn in replica.pipeline.take_forwards(micro_batches):
        loss_sum, tokens = loss_and_tokens(chunks[turn.chunk], feed.take(turn))
        sums += torch.stack((loss_sum, tokens)).double()
    for chunk in chunks:
        chunk.train()
    dist.all_reduce(sums)
    total: float
    number: float
    total, number = sums.tolist()
    return total / max(number, 1)


class Evaluation:
    """The hook that validates at --eval-interval."""

    phase = Phase.EVAL

    def __init__(
        self,
        plan: Plan,
        replica: Replica,
        batches: Iterator[Tensor],
        samples: int,
        make: BatchMaker,
        log: HookLog,
    ):
        """
        Args:
            plan: This rank's.
            replica: The model.
            batches: This rank's raw_BT1, one micro-batch after the other, for all evaluations.
            samples: Samples of one evaluation, over all ranks.
            make: Makes batches.
            log: Is told the losses.
        """
        self.plan = plan
        self.replica = replica
        self.batches = batches
        self.make = make
        self.log = log
        self._samples = samples

    def due(self, progress: Progress) -> bool:
        """Tell whether this iteration is one of --eval-interval."""
        interval = self.plan.args.watch.eval_interval
        return interval > 0 and progress.iteration % interval == 0

    def run(self, progress: Progress) -> None:
        """Validate, unless training has diverged."""
        self.log.metrics.settle()  # a run that diverged must stop, not be evaluated
        self.report(progress, f"iteration {progress.iteration}", "validation")

    def report(self, progress: Progress, title: str, which: str) -> float:
        """Evaluate on the next batches, and log the loss.

        Args:
            progress: What is done so far; the consumed samples are counted in it.
            title: Words before the loss in the log.
            which: validation or test.

        Returns:
            The loss of a token, in nats.
        """
        progress.consumed_valid += self._samples
        passes = self.plan.count_evaluation_passes(self._samples)
        with self.replica.pipeline.take_sequences(self.plan.evaluation_micro_batch):
            loss = evaluate(self.replica, self.batches, self.make, passes)
        self.log.evaluation(title, which, loss)
        return loss

    def report_at_the_end(self, progress: Progress) -> None:
        """Report the final validation loss on the next samples, as Megatron-LM does even after an interval's last
        one."""
        self.report(progress, f"iteration {progress.iteration} on validation set", "validation")


class SaveHook:
    """Saves at --save-interval, and at the end what has not been saved yet."""

    phase = Phase.SAVE

    def __init__(self, c: CheckpointArgs, checkpoints: Checkpoints, log: HookLog, loaded: int):
        """
        Args:
            c: The flags of checkpoints.
            checkpoints: Saves.
            log: Holds the figures that tell whether training has diverged.
            loaded: The iteration that this run began from.
        """
        self.checkpoints = checkpoints
        self.log = log
        self._interval = c.save_interval
        self._folder = c.save
        goes_on_here = False
        if c.save is not None and c.load is not None:
            goes_on_here = Path(c.save).resolve() == Path(c.load).resolve()
        # the newest iteration that the folder holds
        self.saved = loaded if goes_on_here and loaded else None

    def due(self, progress: Progress) -> bool:
        """Tell whether this iteration is one of --save-interval."""
        return self._interval is not None and progress.iteration % self._interval == 0

    def run(self, progress: Progress) -> None:
        """Save, unless this iteration is saved already."""
        if self._folder is None or self.saved == progress.iteration:
            return
        self.log.metrics.settle()  # weights of a run that diverged must not be called a checkpoint
        self.checkpoints.save(progress)
        self.saved = progress.iteration


class GarbageCollectionHook:
    """The hook of --manual-gc: collection is off, but for every --manual-gc-interval iterations, so that all ranks
    pause in the same step."""

    phase = Phase.LOG

    def __init__(self, t: TrainingArgs):
        self._interval = t.manual_gc_interval if t.manual_gc else 0
        if t.manual_gc:
            gc.collect()
            gc.disable()

    def due(self, progress: Progress) -> bool:
        """Tell whether this iteration is one of --manual-gc-interval."""
        return self._interval > 0 and progress.iteration % self._interval == 0

    def run(self, progress: Progress) -> None:
        """Collect garbage of all generations."""
        gc.collect()


class ExitConditions:
    """The reasons to end early: --exit-interval, --exit-duration-in-mins, --exit-signal-handler, and a save in the
    background that failed."""

    def __init__(self, t: TrainingArgs, device: torch.device, checkpoints: Checkpoints, async_save: bool):
        """
        Args:
            t: The flags of training.
            device: Where ranks vote.
            checkpoints: Tells whether a save has failed.
            async_save: Whether checkpoints are written in the background.
        """
        self._checkpoints = checkpoints
        self._interval = t.exit_interval
        self._minutes = t.exit_duration_in_mins
        self._signal = t.exit_signal
        self._device = device
        self._started = time.monotonic()
        self._signalled_at: float | None = None
        self._votes: Readback[None] = Readback()
        if t.exit_signal_handler:
            signal.signal(getattr(signal, self._signal), self._note)
        # ranks see a signal, the clock or a thread's end at different steps: they must agree on one, or some would
        # wait forever
        self._must_agree = t.exit_signal_handler or t.exit_duration_in_mins is not None or async_save

    def reason(self, progress: Progress) -> str | None:
        """Tell why to leave now, in Megatron-LM's words; None to go on. Collective if ranks must agree.

        Raises:
            CheckpointError: On every rank, after a save in the background failed.
        """
        agreed = STAY
        if self._must_agree:
            # a fill does not make the host wait, a copy would
            vote = torch.full((), self._wish(), device=self._device)
            dist.all_reduce(vote, op=dist.ReduceOp.MAX)
            self._votes.push(None, (vote,))
            # all ranks read the same step's vote: on GPUs one that has arrived, on CPUs there is none to wait for
            lag = LAG if self._device.type == "cuda" else 0
            votes = [values[0] for _, values in self._votes.pop(lag)]
            agreed = max(votes, default=STAY)
        if agreed == SAVE_FAILED:
            self._checkpoints.finish()
        if agreed == SIGNALLED:
            return f"exiting program after receiving {self._signal}."
        if agreed == TIME_OVER:
            return f"exiting program after {self._minutes} minutes"
        if self._interval and progress.iteration % self._interval == 0:
            return f"exiting program at iteration {progress.iteration}"
        return None

    def _wish(self) -> float:
        """The vote of this rank."""
        if self._checkpoints.failed:
            return SAVE_FAILED
        if self._signalled_at is not None:
            return SIGNALLED
        if self._minutes is not None and time.monotonic() - self._started >= 60 * self._minutes:
            return TIME_OVER
        return STAY

    def over(self) -> None:
        """Called after the last save: ignore a second signal, which must not kill a process that is about to end well.

        Python takes its handlers away while it shuts down, but leaves a signal that is ignored alone.
        """
        if self._signalled_at is not None:
            signal.signal(getattr(signal, self._signal), signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread when the signal comes."""
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
        elif now - self._signalled_at > AGAIN_SECONDS:
            # a second wish means now
            os._exit(128 + number)
