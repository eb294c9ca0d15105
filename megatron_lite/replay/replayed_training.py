"""A training of this process's rank that is run up to a step, watched, and put back to the weights before it."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from megatron_lite.checkpoint.random_states import get_random_state, set_random_state
from megatron_lite.config.plan import LearningRatePlan, Plan
from megatron_lite.data.batch import Batch
from megatron_lite.formats.replay_record import ReplayedStep
from megatron_lite.model.experts import list_expert_biases
from megatron_lite.parallel.process_group import find_device
from megatron_lite.phases import Phase
from megatron_lite.replay.module_observer import ModuleObserver
from megatron_lite.train.checkpoint import Checkpoints
from megatron_lite.train.data_streams import DataStreams
from megatron_lite.train.loop import Progress
from megatron_lite.train.run import build_training
from megatron_lite.train.step import BatchMaker, TrainingStep
from megatron_lite.train.step_metrics import StepMetrics

MAX_RATIO = 1e18  # of an update to the weights; beyond it squares of fp32 overflow


class Unwatched:
    """A run's observer that does nothing."""

    def resume(self, iteration: int) -> None:
        """Called once with the iteration that training goes on from."""

    def gradients_computed(self) -> None:
        """Called when this rank has its gradients."""

    def wait_for_stage(self, rank: int, what: str) -> None:
        """Called when this rank waits for another stage."""

    def step(self, step: int, /) -> contextlib.AbstractContextManager[object]:
        """Called before a step."""
        return contextlib.nullcontext()

    def phase(self, phase: Phase, /) -> contextlib.AbstractContextManager[object]:
        """Called where a phase of a step begins."""
        return contextlib.nullcontext()


class SeenBatches(BatchMaker):
    """Makes batches, and keeps those of the running step."""

    def begin_step(self) -> None:
        """Forget the step before."""
        self.raw: list[Tensor] = []
        self.made: list[Batch] = []

    def __call__(self, raw_BT1: Tensor) -> Batch:
        """Make the batch of raw tokens, int64 [B, T + 1]."""
        batch = super().__call__(raw_BT1)
        self.raw.append(raw_BT1)
        self.made.append(batch)
        return batch


@dataclass(frozen=True)
class TrainingState:
    """The state that a step depends on, on the host, and where training was."""

    tensors: list[Tensor]
    random: dict[str, Tensor]
    progress: Progress


class ReplayedTraining:
    """A training that is built anew and begins where the plan's flags say.

    Attributes:
        watched: What the modules of the newest watched step computed.
        batches: The micro-batches of the newest step.
        update_ratio: Norm of the newest measured update over that of the weights; None: none was measured.
    """

    def __init__(self, plan: Plan, streams: DataStreams, eod: int | None):
        """Build it, and load what the plan says. Collective.

        Args:
            plan: This rank's plan.
            streams: Its data.
            eod: The tokenizer's id of the end of a document; None if it has none.
        """
        self.plan = plan
        self.device = find_device(plan.device, plan.world)
        self._phase = Unwatched().phase
        self.replica, self.optimizer = build_training(plan, self.device, Unwatched())
        self.progress = Progress()
        Checkpoints(plan, self.replica, self.optimizer, self.device).load(self.progress)
        self._streams = streams
        self._stream: Iterator[Tensor] | None = None
        self.batches = SeenBatches(plan.args.data, plan.layout, self.device, eod)
        self.batches.begin_step()
        self.watched = ModuleObserver(self.replica.chunks)
        self._step = TrainingStep(plan, self.replica, self.optimizer, self.batches)
        self._metrics = StepMetrics(self.optimizer, self.device, plan.world.size, check_for_nan=False)
        self.update_ratio: float | None = None

    def scale_rate(self, factor: float) -> None:
        """Multiply all learning rates of the schedule by a factor."""
        self.optimizer.follow(scale_schedule(self.optimizer.schedule, factor))

    def leaves_out(self, iteration: int) -> bool:
        """Tell whether the command line leaves an iteration out."""
        return self._step.leaves_out(iteration)

    def run_to(self, last: int, watch_from: int | None = None) -> Iterator[ReplayedStep]:
        """Train until an iteration, and yield each step. Collective.

        Args:
            last: The iteration.
            watch_from: The first iteration whose modules are watched; None: none.
        """
        if self._stream is None:
            self._stream = self._streams.training(self.progress)
        while self.progress.iteration < last:
            if self._step.leaves_out(self.progress.iteration + 1):
                samples = self._step.draw(self._stream, self.progress.consumed, self._phase)
                self.progress.leave_out(samples)
                continue
            number = self.progress.iteration + 1
            is_watched = watch_from is not None and number >= watch_from
            yield self.run_step(self._stream, is_watched)

    def run_step(self, batches: Iterator[Tensor], is_watched: bool) -> ReplayedStep:
        """Run one step. Collective.

        Args:
            batches: This rank's raw_BT1, one micro-batch after the other.
            is_watched: Watch its modules.
        """
        self.batches.begin_step()
        if is_watched:
            self.watched.begin_step()
        result = self._step(batches, self.progress.consumed, self._phase)
        self.watched.end_step()
        self.progress.iteration += 1
        self.progress.consumed += result.samples
        self._metrics.record(self.progress, result)
        own_loss_sum = float(result.loss_sum)
        [figures] = self._metrics.take()
        return ReplayedStep(
            iteration=figures.iteration,
            loss=keep_finite(figures.loss),
            grad_norm=keep_finite(figures.grad_norm),
            loss_scale=keep_finite(figures.loss_scale),
            skipped=figures.skipped,
            own_loss_sum=keep_finite(own_loss_sum),
            checksums=self.watched.list_checksums() if is_watched else (),
        )

    def measure_update(self, last: int, watch_from: int | None) -> Iterator[ReplayedStep]:
        """Train until an iteration as run_to does, and measure the update of its last step. Collective.

        Args:
            last: The iteration.
            watch_from: The first iteration whose modules are watched.
        """
        yield from self.run_to(last - 1, watch_from)
        if self.progress.iteration >= last:
            return
        masters = self.optimizer.weights.masters
        before: list[Tensor] = [master.detach().clone() for master in masters]
        yield from self.run_to(last, watch_from)
        changes = [master.detach() - old for master, old in zip(masters, before, strict=True)]
        change = self.optimizer.measure_norm(changes)
        size = self.optimizer.measure_norm(before)
        self.update_ratio = _bound(float(change / size))

    def draw_batches(self) -> list[Tensor]:
        """Draw the micro-batches of the next step, which then comes to be run from them."""
        if self._stream is None:
            self._stream = self._streams.training(self.progress)
        number = self.plan.micro_batches(self.progress.consumed)
        return list(islice(self._stream, number))

    def list_state(self) -> list[Tensor]:
        """List the tensors that a step depends on; the live ones."""
        tensors = [parameter.detach() for parameter in self.replica.parameters]
        tensors += self.optimizer.tensors(self.replica.names).values()
        tensors += list_expert_biases(self.replica.list_mixtures(), self.device).values()
        tensors.append(self.optimizer.stopped)
        return tensors

    def keep_state(self) -> TrainingState:
        """Copy the state to the host."""
        tensors = [tensor.detach().to("cpu", copy=True) for tensor in self.list_state()]
        progress = Progress(**vars(self.progress))
        random = get_random_state(self.device)
        return TrainingState(tensors, random, progress)

    @torch.no_grad()
    def put_back(self, state: TrainingState) -> None:
        """Go on from a state that was kept."""
        for live, kept in zip(self.list_state(), state.tensors, strict=True):
            live.copy_(kept)
        self.optimizer.resume()
        set_random_state(state.random, self.device)
        self.progress = Progress(**vars(state.progress))

    @torch.no_grad()
    def take_weights(self, weights: Sequence[Tensor], state: TrainingState) -> None:
        """Begin with the weights of a training in another precision.

        Args:
            weights: Of each parameter of this rank.
            state: Random states, and where that training was.
        """
        for parameter, weight in zip(self.replica.parameters, weights, strict=True):
            parameter.copy_(weight)
        for master, weight in zip(self.optimizer.weights.masters, weights, strict=True):
            master.copy_(weight)
        set_random_state(state.random, self.device)
        self.progress = Progress(**vars(state.progress))


def scale_schedule(schedule: LearningRatePlan, factor: float) -> LearningRatePlan:
    """The schedule with its rates multiplied.

    Args:
        schedule: Rates by samples.
        factor: What each rate is multiplied by.
    """
    return replace(
        schedule,
        init=schedule.init * factor,
        peak=schedule.peak * factor,
        floor=schedule.floor * factor,
    )


def _bound(ratio: float) -> float | None:
    """The ratio, or a number that is too large to be one in its place; None for NaN."""
    if math.isnan(ratio):
        return None
    return min(ratio, MAX_RATIO)


def keep_finite(value: float) -> float | None:
    """The value; None for NaN and Inf."""
    return value if math.isfinite(value) else None
