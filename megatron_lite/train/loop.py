"""The training loop, and what it asks of all that it calls."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from megatron_lite.phases import BeginPhase, Phase
from megatron_lite.train.step import StepResult


@dataclass
class Progress:
    """The iterations and samples that training has come to."""

    iteration: int = 0
    consumed: int = 0  # samples
    consumed_valid: int = 0  # samples of all evaluations
    started_at: int = 0  # iteration that this run started from
    left_out: int = 0  # samples of the consumed ones that --iterations-to-skip named

    @property
    def step(self) -> int:
        """The number of steps of this run itself."""
        return self.iteration - self.started_at

    def leave_out(self, samples: int) -> None:
        """Count an iteration whose samples were drawn, but not trained on."""
        self.iteration += 1
        self.consumed += samples
        self.left_out += samples


class LoopStep(Protocol):
    """A training step, or what stands in for it."""

    def leaves_out(self, iteration: int) -> bool:
        """Called before each iteration: tell whether it is left out."""

    def draw(self, batches: Iterator[Tensor], consumed: int, phase: BeginPhase) -> int:
        """Called instead of a step that is left out: draw its batch, and return its number of samples.

        Args:
            batches: The micro-batches of the run.
            consumed: Samples that were consumed before the step.
            phase: Opened around the drawing.
        """

    def __call__(self, batches: Iterator[Tensor], consumed: int, phase: BeginPhase) -> StepResult:
        """Called for each other iteration: train on the batch after `consumed` samples."""


class StepLog(Protocol):
    """A log of steps."""

    def record(self, progress: Progress, result: StepResult) -> None:
        """Called after each step, once `progress` counts it."""


class StepHook(Protocol):
    """Something that happens between steps: evaluating, saving."""

    @property
    def phase(self) -> Phase:
        """The phase in which the hook runs."""

    def due(self, progress: Progress) -> bool:
        """Called after each step was logged, in the order of the hooks: tell whether the hook runs."""

    def run(self, progress: Progress) -> None:
        """Called at once if the hook is due, inside its phase."""


class Exits(Protocol):
    """Reasons to end before the last iteration."""

    def reason(self, progress: Progress) -> str | None:
        """Called after each step's hooks: tell why to end now; None to go on."""


class StepObserver(Protocol):
    """An observer of steps and their phases, which changes nothing."""

    def step(self, step: int, /) -> AbstractContextManager[object]:
        """Called before a step's data is fetched, with its number in this run, from 1; the context that it returns is
        left after the step's hooks."""

    def phase(self, phase: Phase, /) -> AbstractContextManager[object]:
        """Called where a phase of a step begins; the context that it returns is left where the phase ends."""


def train(
    last: int,
    progress: Progress,
    step: LoopStep,
    batches: Iterator[Tensor],
    log: StepLog,
    hooks: Sequence[StepHook],
    exits: Exits,
    instruments: StepObserver,
) -> str | None:
    """Train until an iteration.

    Args:
        last: The iteration.
        progress: What is done so far; it is updated.
        step: Trains a step.
        batches: The micro-batches of the run.
        log: Is told of each step.
        hooks: What runs between steps, in this order, where it is due.
        exits: Reasons to end earlier.
        instruments: Observes steps and phases.

    Returns:
        Why training ended earlier, or None.
    """
    while progress.iteration < last:
        if step.leaves_out(progress.iteration + 1):
            with instruments.step(progress.step + 1):
                progress.leave_out(step.draw(batches, progress.consumed, instruments.phase))
            continue
        with instruments.step(progress.step + 1):
            result = step(batches, progress.consumed, instruments.phase)
            progress.iteration += 1
            progress.consumed += result.samples
            with instruments.phase(Phase.LOG):
                log.record(progress, result)
            for hook in hooks:
                if hook.due(progress):
                    with instruments.phase(hook.phase):
                        hook.run(progress)
        reason = exits.reason(progress)
        if reason:
            return reason
    return None
