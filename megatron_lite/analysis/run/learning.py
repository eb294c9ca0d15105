"""Did the run learn? What its steps say of updates, losses and clipping; nothing here judges a model."""

import math
from dataclasses import dataclass

import numpy as np

from megatron_lite.analysis.intervals import Integers, Numbers
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.units import significant

PARTS_OF_LOSSES = 5  # the first and the last fifth of the losses are compared
MIN_LOSSES = 20
MIN_CLIPPED = 10  # times --clip-grad: the flag, not the gradient, sets the step's size
NEARLY_ALL = 0.95  # of the updates
MIN_UPDATES = 10
MAX_LOSS_BLOCKS = 50  # losses are compared block by block
MIN_LOSS_BLOCKS = 3
MIN_BLOCK_LOSSES = 10  # losses of one block
RISEN = 0.1  # from the lowest block to the last one, as a share of it
RISEN_NOISE = 5.0  # the same in standard errors
MAX_NAMED_ITERATIONS = 3  # iterations


@dataclass(frozen=True)
class Learning:
    """How the last start's updates went."""

    steps: int
    updates: int  # steps that were not skipped
    not_finite: tuple[int, ...]  # iterations of updates whose loss is NaN or Inf
    falls: bool | None  # None for too few steps to say
    clipped: float | None  # median gradient norm / --clip-grad, where it exceeds MIN_CLIPPED in NEARLY_ALL; else None
    losses: str  # where they went, in words; '' where they do not say
    nothing: str  # why no step has taught the model anything; '' where one may have


def find_clip_limit(run: Run) -> float | None:
    """The largest norm that clipping leaves: --clip-grad, or of a watched script what it gave torch;
    None for unknown."""
    watched = run.record.watched
    if run.plan.settings.clip_grad is not None or watched is None:
        return run.plan.settings.clip_grad
    return watched.clip_grad


def measure_learning(run: Run) -> Learning:
    """Conclusions from the run's skipped steps, losses and gradient norms."""
    updates = run.steps - int(run.skipped.sum())
    not_finite = tuple(run.iterations[run.not_finite].tolist())
    falls, losses = _compare_losses(run)
    if not_finite:
        some = ", ".join(map(str, not_finite[:MAX_NAMED_ITERATIONS]))
        if len(not_finite) > MAX_NAMED_ITERATIONS:
            some += ", ..."
        losses = f"the loss was not finite in {len(not_finite):,} of {updates:,} updates (iteration {some})"
    nothing = ""
    if run.steps and not updates:
        nothing = f"all {run.steps:,} steps were skipped, because a gradient was not finite"
    elif updates and len(not_finite) == updates:
        nothing = f"the loss was not finite in all {updates:,} updates"
    return Learning(
        steps=run.steps,
        updates=updates,
        not_finite=not_finite,
        falls=falls,
        clipped=_measure_clipping(run),
        losses=losses,
        nothing=nothing,
    )


def _find_updates(run: Run, values: Numbers) -> Integers:
    """Indices of the steps that updated the weights and whose value is known."""
    known = ~np.isnan(values)
    return np.flatnonzero(known & ~run.skipped)


def _compare_losses(run: Run) -> tuple[bool | None, str]:
    """Whether the losses of the last updates are below those of the first, and a sentence; None and "" for too few."""
    losses = run.losses[_find_updates(run, run.losses)]
    if len(losses) < MIN_LOSSES:
        return None, ""
    part = len(losses) // PARTS_OF_LOSSES
    first = math.fsum(losses[:part]) / part
    last = math.fsum(losses[-part:]) / part
    falls = last < first
    went = "fell" if falls else "did not fall"
    return falls, (
        f"the loss {went}: {significant(first, 4)} in the first {part:,} updates, "
        f"{significant(last, 4)} in the last {part:,}"
    )


def _measure_clipping(run: Run) -> float | None:
    """The median gradient norm as a multiple of --clip-grad; None where nearly all norms are not far above it."""
    limit = find_clip_limit(run)
    norms = run.grad_norms[_find_updates(run, run.grad_norms)]
    if limit is None or limit <= 0 or len(norms) < MIN_UPDATES:
        return None
    far_above = float(np.mean(norms > MIN_CLIPPED * limit))
    if far_above < NEARLY_ALL:
        return None
    return float(np.median(norms)) / limit


def describe_rise(run: Run) -> str:
    """Describe how far the loss has gone up again since it was lowest; '' where it has not, or that may be chance."""
    updates = _find_updates(run, run.losses)
    length = max(len(updates) // MAX_LOSS_BLOCKS, MIN_BLOCK_LOSSES)
    number = len(updates) // length
    if number < MIN_LOSS_BLOCKS:
        return ""
    # the first ones that fill no block are left out
    blocks = updates[len(updates) - number * length :].reshape(number, length)
    losses = run.losses[blocks]
    means = losses.mean(axis=1)
    best = int(means[:-1].argmin())
    lowest = float(means[best])
    last = float(means[-1])
    deviation = float(losses[[best, -1]].std(axis=1).max())
    error = deviation / math.sqrt(length)
    if lowest <= 0 or last - lowest <= max(RISEN * lowest, RISEN_NOISE * error):
        return ""
    iteration = run.iterations[blocks[best, 0]]
    return (
        f"the loss has risen: {significant(last, 4)} in the last {length:,} updates, "
        f"{significant(lowest, 4)} in as many from "
        f"iteration {iteration:,} on"
    )
