"""Loss on data that is not trained on."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.plan import Plan
from megatron_lite.marks import EVALUATION, mark_memory
from megatron_lite.phases import Phase
from megatron_lite.train.console import evaluation_lines
from megatron_lite.train.loop import Progress
from megatron_lite.train.step import BatchMaker, loss_and_tokens


@torch.no_grad()
@mark_memory(EVALUATION)
def evaluate(plan: Plan, model, batches: Iterator[Tensor], make: BatchMaker) -> float:
    """Mean loss per token in nats over --eval-iters global batches and all ranks. Collective."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=make.device)
    for _ in range(plan.args.watch.eval_iters * plan.batch.final // plan.samples_per_pass):
        loss_sum, tokens = loss_and_tokens(model, make(next(batches)))
        sums += torch.stack((loss_sum, tokens)).double()
    model.train()
    dist.all_reduce(sums)
    loss_sum, tokens = sums.tolist()
    return loss_sum / max(tokens, 1)


class Evaluation:
    """The hook that validates at --eval-interval."""

    phase = Phase.EVAL

    def __init__(self, plan: Plan, model, batches: Iterator[Tensor], make: BatchMaker, log):
        self.plan, self.model, self.batches, self.make, self.log = plan, model, batches, make, log
        self.latest: tuple[int, float] | None = None  # (iteration, loss) of the last evaluation at an interval

    def due(self, progress: Progress) -> bool:
        return progress.iteration % self.plan.args.watch.eval_interval == 0

    def run(self, progress: Progress):
        self.log.metrics.settle()  # a run that diverged must stop, not be evaluated
        self.latest = (progress.iteration, self.report(progress, f"iteration {progress.iteration}", "validation"))

    def report(self, progress: Progress, title: str, which: str) -> float:
        """Evaluate on the batches that come next, and say so; returns the loss."""
        progress.consumed_valid += self.plan.args.watch.eval_iters * self.plan.batch.final
        loss = evaluate(self.plan, self.model, self.batches, self.make)
        self.log.evaluation(title, which, loss)
        return loss

    def report_at_the_end(self, progress: Progress):
        """As Megatron-LM does; where the last interval ends here, its loss again, rather than a second one of the same weights."""
        title = f"iteration {progress.iteration} on validation set"
        if self.latest and self.latest[0] == progress.iteration:
            self.log.say(evaluation_lines(title, self.latest[1]))
        else:
            self.report(progress, title, "validation")
