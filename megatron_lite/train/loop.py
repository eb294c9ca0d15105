"""The training loop."""

from dataclasses import dataclass
from typing import Protocol

from megatron_lite.phases import Phase


@dataclass
class Progress:
    """How far training is."""

    iteration: int = 0
    consumed: int = 0  # samples
    consumed_valid: int = 0  # samples of all evaluations
    started_at: int = 0  # iteration that this run started from
    left_out: int = 0  # samples of the consumed ones that --iterations-to-skip named

    @property
    def step(self) -> int:
        """This run's own steps, from 1."""
        return self.iteration - self.started_at

    def leave_out(self, samples: int) -> None:
        """Count an iteration whose samples were drawn, but not trained on."""
        self.iteration += 1
        self.consumed += samples
        self.left_out += samples


class StepHook(Protocol):
    """Something that happens between steps: evaluating, saving."""

    phase: Phase

    def due(self, progress: Progress) -> bool: ...

    def run(self, progress: Progress): ...


def train(last: int, progress: Progress, step, batches, log, hooks: list[StepHook], exits, instruments) -> str | None:
    """Train until iteration `last`; returns why it ended earlier, or None."""
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
