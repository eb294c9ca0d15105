"""Did the run learn? What its steps say of updates, losses and clipping; nothing here judges a model."""

import math
from dataclasses import dataclass
from statistics import fmean, median

from megatron_lite.analysis.run.run_results import Run

PART = 5  # the first and the last fifth of the losses are compared
MIN_LOSSES = 20
MIN_CLIPPED = 10  # times --clip-grad, in every update: the flag, not the gradient, sets the step's size
MIN_UPDATES = 10


@dataclass(frozen=True)
class Learning:
    """Facts of the last start."""

    steps: int
    updates: int  # steps that were not skipped
    not_finite: tuple[int, ...]  # iterations of updates whose loss is NaN or Inf
    at_first: float | None  # mean loss of the first fifth of the updates; None of too few
    at_last: float | None
    compared: int  # losses in each of the two means
    clipped: float | None  # median gradient norm / --clip-grad, where it exceeds MIN_CLIPPED in every update; else None

    @property
    def falls(self) -> bool | None:
        """None for too few steps to say."""
        return None if self.at_first is None else self.at_last < self.at_first

    @property
    def losses(self) -> str:
        """Where the losses went, in words; '' where they do not say."""
        if self.not_finite:
            some = ", ".join(map(str, self.not_finite[:3])) + (", ..." if len(self.not_finite) > 3 else "")
            return f"the loss was not finite in {len(self.not_finite):,} of {self.updates:,} updates (iteration {some})"
        if self.falls is None:
            return ""
        went = "fell" if self.falls else "did not fall"
        first = f"{self.at_first:.4g} in the first {self.compared:,} updates"
        return f"the loss {went}: {first}, {self.at_last:.4g} in the last {self.compared:,}"

    @property
    def nothing(self) -> str:
        """Why no step has taught the model anything; '' where one may have."""
        if self.steps and not self.updates:
            return f"all {self.steps:,} steps were skipped, because a gradient was not finite"
        if self.updates and len(self.not_finite) == self.updates:
            return f"the loss was not finite in all {self.updates:,} updates"
        return ""


def measure_learning(run: Run) -> Learning:
    """What the run's skipped steps, losses and gradient norms come to."""
    updates = run.steps - sum(run.skipped)
    not_finite = tuple(at for at, lost in zip(run.iterations, run.not_finite) if lost)
    losses = [loss for loss, skipped in zip(run.losses, run.skipped) if not (skipped or math.isnan(loss))]
    part = len(losses) // PART if len(losses) >= MIN_LOSSES else 0
    return Learning(
        steps=run.steps,
        updates=updates,
        not_finite=not_finite,
        compared=part,
        at_first=fmean(losses[:part]) if part else None,
        at_last=fmean(losses[-part:]) if part else None,
        clipped=_clipped(run),
    )


def _clipped(run: Run) -> float | None:
    limit = run.args.get("clip_grad")
    norms = [norm for norm, skipped in zip(run.grad_norms, run.skipped) if not (skipped or math.isnan(norm))]
    if (
        type(limit) not in (int, float)
        or not limit > 0
        or len(norms) < MIN_UPDATES
        or min(norms) <= MIN_CLIPPED * limit
    ):
        return None
    return median(norms) / limit
