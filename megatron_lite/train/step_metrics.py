"""Reads every step's figures from the device without making it wait, and collects those of an interval."""

import contextlib
import math
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.errors import DivergedError
from megatron_lite.optim.optimizer import DynamicLossScale, GradientNorms, Optimizer
from megatron_lite.train.loop import Progress
from megatron_lite.train.nonfinite_gradients import describe_nonfinite, gather_nonfinite
from megatron_lite.train.step import StepResult

LAG = 2  # steps that the host may be ahead of what it reads: enough that reading never keeps the device waiting

Key = TypeVar("Key")


class Readback(Generic[Key]):
    """A queue of rows of numbers that are copied from the device to the host without waiting."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Key, Tensor | array[float], torch.cuda.Event | None]] = deque()

    def push(self, key: Key, values: Sequence[Tensor]) -> None:
        """Start copying `values`, numbers of any type on one device, to the host under `key`, in double precision."""
        row = torch.cat([value.detach().double().reshape(-1) for value in values])
        if row.device.type != "cuda":
            self._waiting.append((key, array("d", row.tolist()), None))
            return
        host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
        host.copy_(row, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._waiting.append((key, host, event))

    def forget(self) -> None:
        """Drop all rows that have not been read."""
        self._waiting.clear()

    def arrived(self) -> Iterator[tuple[Key, list[float]]]:
        """Yield (key, list of numbers) of what has arrived; waits for nothing, since after a failure nothing may come.

        RuntimeError where the device itself has failed and answers no more.
        """
        while self._waiting:
            key, host, event = self._waiting[0]
            if event is not None and not event.query():
                return
            self._waiting.popleft()
            yield key, host.tolist()

    def pop(self, lag: int) -> Iterator[tuple[Key, list[float]]]:
        """Yield (key, list of numbers) of all but the newest `lag` rows, waiting for each to arrive.

        With a lag of 2 the device still has a whole step queued, so that the wait costs it nothing.
        """
        while len(self._waiting) > lag:
            key, host, event = self._waiting.popleft()
            if event is not None:
                event.synchronize()
            yield key, host.tolist()


@dataclass
class StepFigures:
    """The figures of one step, on the host."""

    iteration: int
    consumed: int  # samples, this step's included
    batch_size: int
    loss_sum: float  # this rank's, until the interval is summed over ranks
    tokens: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    next_loss_scale: float
    next_lr: float
    zeros: float
    params_norm: float
    routing: tuple[float, ...] = ()  # of RoutingRow; this rank's, until the interval is summed over ranks
    predictions: tuple[float, ...] = ()  # losses of further tokens by depth; this rank's share until then
    local: bool = False  # the loss is this rank's, though there are others

    @property
    def loss(self) -> float:
        """The mean loss per token in nats, also of a skipped step."""
        return self.loss_sum / max(self.tokens, 1)


class StepKey(NamedTuple):
    """The step whose numbers lie in a row of Readback."""

    iteration: int
    consumed: int  # samples, this step's included
    batch_size: int
    depths: int  # of multi-token prediction
    norms: GradientNorms  # which stay on the device: only a step that ends the run has them read


class StepMetrics:
    """Collects the figures of the steps since the last `take`."""

    def __init__(self, optimizer: Optimizer, device: torch.device, ranks: int = 1, check_for_nan: bool = True):
        """
        Args:
            optimizer: Tells how it answers an overflow.
            device: Where the figures come from.
            ranks: All ranks, over which losses are summed.
            check_for_nan: Whether a NaN or Inf ends the run.
        """
        self.optimizer = optimizer
        self.device = device
        self._ranks = ranks
        self._check_for_nan = check_for_nan
        self._readback: Readback[StepKey] = Readback()
        self._steps: list[StepFigures] = []
        # this rank's, a few steps old
        self.latest_loss: float | None = None

    def record(self, progress: Progress, result: StepResult) -> None:
        """Queue a step's figures, and read those of the step before last."""
        u = result.update
        # in the order in which _make_figures takes them
        values = [result.loss_sum, result.tokens]
        values += [u.grad_norm, u.skipped, u.loss_scale, u.next_loss_scale, u.next_lr]
        values += [result.zeros, result.params_norm]
        depths = 0
        if result.predictions is not None:
            values.append(result.predictions)
            depths = len(result.predictions)
        if result.routing is not None:
            values.append(result.routing)
        self._readback.push(StepKey(progress.iteration, progress.consumed, result.samples, depths, u.norms), values)
        self.settle(LAG)

    def settle(self, lag: int = 0) -> None:
        """Read what has arrived. Raises DivergedError, on all ranks together, at the first NaN or Inf.

        With a dynamic loss scale there is nothing to raise: the step was skipped.
        """
        # a dynamic loss scale is expected to overflow now and then, and answers by itself
        watched = self._check_for_nan and not isinstance(self.optimizer.scaler, DynamicLossScale)
        for key, values in self._readback.pop(lag):
            figures = _make_figures(key, values)
            self._steps.append(figures)
            self.latest_loss = None if figures.skipped else figures.loss
            if figures.skipped and watched:
                self._stop_if_diverged(figures, key.norms)

    def take(self) -> list[StepFigures]:
        """All figures so far, losses summed over ranks. Collective: every rank calls it at the same iteration."""
        self.settle()
        if self._steps and self._ranks > 1:
            rows = [(s.loss_sum, s.tokens, *s.predictions, *s.routing) for s in self._steps]
            sums = torch.tensor(rows, dtype=torch.float64, device=self.device)
            dist.all_reduce(sums)  # if it fails, the steps are left over
            for step, (loss_sum, tokens, *others) in zip(self._steps, sums.tolist()):
                depths = len(step.predictions)
                step.loss_sum = loss_sum
                step.tokens = tokens
                step.predictions = tuple(others[:depths])
                step.routing = tuple(others[depths:])
        taken = self._steps
        self._steps = []
        return taken

    def leftover(self) -> list[StepFigures]:
        """Take, after a failure, what has arrived, with the losses of this rank only, since others may be gone."""
        # a GPU after a fatal error, which the step itself has raised
        with contextlib.suppress(RuntimeError):
            self._steps += [_make_figures(key, values) for key, values in self._readback.arrived()]
        steps = self._steps
        self._steps = []
        for step in steps:
            step.local = self._ranks > 1
        return steps

    def so_far(self, after: int) -> list[StepFigures]:
        """Copies of the figures that were read so far, of iterations after `after`, with losses of this rank.

        No collective.
        """
        local = self._ranks > 1
        return [replace(step, local=local) for step in self._steps if step.iteration > after]

    def _stop_if_diverged(self, figures: StepFigures, norms: GradientNorms) -> None:
        """Raise DivergedError, on all ranks, unless a fixed loss scale has skipped the step for its gradients alone."""
        finite = torch.tensor([float(math.isfinite(figures.loss_sum))], device=self.device)
        everyone = [torch.zeros_like(finite) for _ in range(self._ranks)]
        dist.all_gather(everyone, finite)
        ranks = [rank for rank, good in enumerate(everyone) if not good.item()]
        if not ranks and self.optimizer.scaler is not None:
            # only the gradients overflowed, under a fixed loss scale
            return
        if ranks:
            what = f"the loss on rank {', '.join(map(str, ranks))}"
        else:
            what = f"the gradient norm ({figures.grad_norm}), with finite losses on all ranks,"
        # steps since then had the same weights, and tell nothing
        self._readback.forget()
        first = describe_nonfinite(gather_nonfinite(self.optimizer, norms), self.optimizer.plan.layout)
        raise DivergedError(
            f"iteration {figures.iteration}: {what} is NaN or Inf; {first}"
            "the weights are those before that iteration and were not saved. "
            "Lower --lr or --clip-grad, warm up longer, or look at the data; "
            "--no-check-for-nan-in-loss-and-grad goes on regardless.",
            figures.iteration,
        )


def _make_figures(key: StepKey, values: list[float]) -> StepFigures:
    """Make a step's figures of what StepMetrics.record has queued."""
    loss_sum, tokens, norm, skipped, scale, next_scale, next_lr, zeros, params_norm, *others = values
    return StepFigures(
        iteration=key.iteration,
        consumed=key.consumed,
        batch_size=key.batch_size,
        loss_sum=loss_sum,
        tokens=tokens,
        grad_norm=norm,
        skipped=bool(skipped),
        loss_scale=scale,
        next_loss_scale=next_scale,
        next_lr=next_lr,
        zeros=zeros,
        params_norm=params_norm,
        predictions=tuple(others[: key.depths]),
        routing=tuple(others[key.depths :]),
    )
