"""Did the run learn? What its steps say of updates, losses and clipping; nothing here judges a model."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_lite.analysis.run.run_results import Run
from megatron_lite.units import significant

PART = 5  # the first and the last fifth of the losses are compared
MIN_LOSSES = 20
MIN_CLIPPED = 10  # times --clip-grad: the flag, not the gradient, sets the step's size
NEARLY_ALL = 0.95  # of the updates
MIN_UPDATES = 10
BLOCKS, MIN_BLOCK = 50, 10  # losses are compared block by block: so many blocks at most, of so many losses at least
RISEN, RISEN_NOISE = 0.1, 5.0  # from the lowest block to the last one: as a share, and in standard errors


@dataclass(frozen=True)
class Learning:
    """Facts of the last start."""

    steps: int
    updates: int  # steps that were not skipped
    not_finite: tuple[int, ...]  # iterations of updates whose loss is NaN or Inf
    falls: bool | None  # None for too few steps to say
    clipped: float | None  # median gradient norm / --clip-grad, where it exceeds MIN_CLIPPED in NEARLY_ALL; else None
    losses: str  # where they went, in words; '' where they do not say
    nothing: str  # why no step has taught the model anything; '' where one may have


def find_clip_limit(run: Run) -> Any:
    """The largest norm that clipping leaves: --clip-grad, or of a watched script what it gave torch;
    None for unknown."""
    watched = run.record.watched
    return run.args.get("clip_grad", watched.clip_grad if watched is not None else None)


def measure_learning(run: Run) -> Learning:
    """What the run's skipped steps, losses and gradient norms come to."""
    updates = run.steps - int(run.skipped.sum())
    not_finite = tuple(run.iterations[run.not_finite].tolist())
    losses, norms = (values[~run.skipped & ~np.isnan(values)] for values in (run.losses, run.grad_norms))
    part = len(losses) // PART if len(losses) >= MIN_LOSSES else 0
    falls, told, nothing, clipped = None, "", "", None
    if part:
        first, last = math.fsum(losses[:part]) / part, math.fsum(losses[-part:]) / part
        falls = last < first
        went = "fell" if falls else "did not fall"
        told = (
            f"the loss {went}: {significant(first, 4)} in the first {part:,} updates, "
            f"{significant(last, 4)} in the last {part:,}"
        )
    if not_finite:
        some = ", ".join(map(str, not_finite[:3])) + (", ..." if len(not_finite) > 3 else "")
        told = f"the loss was not finite in {len(not_finite):,} of {updates:,} updates (iteration {some})"
    if run.steps and not updates:
        nothing = f"all {run.steps:,} steps were skipped, because a gradient was not finite"
    elif updates and len(not_finite) == updates:
        nothing = f"the loss was not finite in all {updates:,} updates"
    limit = find_clip_limit(run)
    if isinstance(limit, int | float) and limit > 0 and len(norms) >= MIN_UPDATES:
        hard = float(np.mean(norms > MIN_CLIPPED * limit))
        clipped = float(np.median(norms)) / limit if hard >= NEARLY_ALL else None
    return Learning(run.steps, updates, not_finite, falls, clipped, told, nothing)


def describe_rise(run: Run) -> str:
    """How far the loss has gone up again since it was lowest; '' where it has not, or that may be chance."""
    known = np.flatnonzero(~run.skipped & ~np.isnan(run.losses))
    length = max(len(known) // BLOCKS, MIN_BLOCK)
    number = len(known) // length
    if number < 3:
        return ""
    blocks = run.losses[known[len(known) - number * length :]].reshape(number, length)
    means = blocks.mean(axis=1)
    best, last = int(means[:-1].argmin()), float(means[-1])
    lowest, noise = float(means[best]), float(blocks[[best, -1]].std(axis=1).max()) / math.sqrt(length)
    if lowest <= 0 or last - lowest <= max(RISEN * lowest, RISEN_NOISE * noise):
        return ""
    at = run.iterations[known[len(known) - (number - best) * length]]
    return (
        f"the loss has risen: {significant(last, 4)} in the last {length:,} updates, "
        f"{significant(lowest, 4)} in as many from "
        f"iteration {at:,} on"
    )
