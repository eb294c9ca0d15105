"""The trainer's own step around a model of one number and an optimizer that updates nothing."""

import contextlib
import itertools

import torch
from torch import Tensor, nn

from megatron_lite.optim.optimizer import Update
from megatron_lite.phases import Phase
from megatron_lite.train.step import TrainingStep


class NoModel:
    """Stands in for a DataParallel: losses that hang on one number, so that backward has something to do."""

    def __init__(self, device: torch.device):
        self.number = nn.Parameter(torch.ones(1, 1, device=device))

    def __call__(self, tokens_BT: Tensor, *_) -> Tensor:
        return self.number.expand(tokens_BT.shape)

    def micro_batch(self, last: bool):
        return contextlib.nullcontext()

    def gradients(self) -> list[Tensor]:
        return [self.number.grad]

    def clear(self):
        self.number.grad = None


class NoUpdate:
    """Stands in for an Optimizer: goes through its phases."""

    def __init__(self, device: torch.device):
        self.loss_scale, self._norm = torch.ones((), device=device), torch.ones((), device=device)
        self._skipped = torch.zeros((), dtype=torch.bool, device=device)

    def step(self, gradients: list[Tensor], samples: int, phase, divisor=None) -> Update:
        for part in (Phase.UNSCALE, Phase.CLIP_GRAD, Phase.OPTIMIZER_STEP):
            with phase(part):
                pass
        return Update(self._norm, self._skipped, self.loss_scale, self.loss_scale, next_lr=self._norm)


def empty_step(plan, replica, optimizer, make, computed=None) -> TrainingStep:
    """In place of TrainingStep(...)."""
    return TrainingStep(plan, NoModel(make.device), NoUpdate(make.device), make, computed)


def same_batch(feed, progress):
    """In place of DataStreams.training: one micro-batch over and over."""
    t, sequence = feed.plan.args.training, feed.plan.shape.seq_length
    return itertools.repeat(torch.zeros(t.micro_batch_size, sequence + 1, dtype=torch.int64))
