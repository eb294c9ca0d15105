"""What happens between steps: evaluating, saving, and Python's garbage collector on a schedule."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.args import CheckpointArgs, TrainingArgs
from megatron_lite.config.plan import Plan
from megatron_lite.marks import EVALUATION, mark_memory
from megatron_lite.parallel.replica import Replica
from megatron_lite.phases import Phase
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.console import evaluation_lines
from megatron_lite.train.loop import Progress
from megatron_lite.train.step import BatchMaker, MicroBatches, loss_and_tokens


@torch.no_grad()
@mark_memory(EVALUATION)
def evaluate(replica: Replica, batches: Iterator[Tensor], make: BatchMaker, micro_batches: int) -> float:
    """Mean loss per token in nats over the next `micro_batches` of all ranks. Collective."""
    chunks, feed = replica.chunks, MicroBatches(batches, make, replica.pipeline, lambda phase: nullcontext())
    for chunk in chunks:
        chunk.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=make.device)
    for turn in replica.pipeline.take_forwards(micro_batches):
        loss_sum, tokens = loss_and_tokens(chunks[turn.chunk], feed.take(turn))
        sums += torch.stack((loss_sum, tokens)).double()
    for chunk in chunks:
        chunk.train()
    dist.all_reduce(sums)
    loss_sum, tokens = sums.tolist()
    return loss_sum / max(tokens, 1)


class Evaluation:
    """The hook that validates at --eval-interval."""

    phase = Phase.EVAL

    def __init__(self, plan: Plan, replica: Replica, batches: Iterator[Tensor], make: BatchMaker, log):
        self.plan, self.replica, self.batches, self.make, self.log = plan, replica, batches, make, log
        self.latest: tuple[int, float] | None = None  # (iteration, loss) of the last evaluation at an interval

    def due(self, progress: Progress) -> bool:
        return progress.iteration % self.plan.args.watch.eval_interval == 0

    def run(self, progress: Progress):
        self.log.metrics.settle()  # a run that diverged must stop, not be evaluated
        self.latest = (progress.iteration, self.report(progress, f"iteration {progress.iteration}", "validation"))

    def report(self, progress: Progress, title: str, which: str) -> float:
        """Evaluate on the next batches and log the loss; returns it."""
        samples = self.plan.args.watch.eval_iters * self.plan.batch.final
        progress.consumed_valid += samples
        loss = evaluate(self.replica, self.batches, self.make, samples // self.plan.samples_per_pass)
        self.log.evaluation(title, which, loss)
        return loss

    def report_at_the_end(self, progress: Progress):
        """Report the final validation loss, as Megatron-LM does: the last interval's, if the weights are still the same."""
        title = f"iteration {progress.iteration} on validation set"
        if self.latest and self.latest[0] == progress.iteration:
            self.log.say(evaluation_lines(title, self.latest[1]))
        else:
            self.report(progress, title, "validation")


class SaveHook:
    """Saves at --save-interval, and at the end what has not been saved yet."""

    phase = Phase.SAVE

    def __init__(self, c: CheckpointArgs, checkpoints: Checkpoints, log, loaded: int):
        self.checkpoints, self.log, self._interval, self._folder = checkpoints, log, c.save_interval, c.save
        here = c.save is not None and c.load is not None and Path(c.save).resolve() == Path(c.load).resolve()
        self.saved = loaded if here and loaded else None  # the newest iteration that the folder holds

    def due(self, progress: Progress) -> bool:
        return self._interval is not None and progress.iteration % self._interval == 0

    def run(self, progress: Progress):
        """Save, unless this iteration is saved already."""
        if self._folder is None or self.saved == progress.iteration:
            return
        self.log.metrics.settle()  # weights of a run that diverged must not be called a checkpoint
        self.checkpoints.save(progress)
        self.saved = progress.iteration


class GarbageCollectionHook:
    """--manual-gc: collection is off, but for every --manual-gc-interval iterations, so that all ranks pause in the same step."""

    phase = Phase.LOG

    def __init__(self, t: TrainingArgs):
        self._interval = t.manual_gc_interval if t.manual_gc else 0
        if t.manual_gc:
            gc.collect()
            gc.disable()

    def due(self, progress: Progress) -> bool:
        return self._interval > 0 and progress.iteration % self._interval == 0

    def run(self, progress: Progress):
        gc.collect()
