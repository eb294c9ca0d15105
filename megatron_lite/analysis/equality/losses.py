"""Lays the losses of a step beside the reference's."""

from collections.abc import Callable, Sequence

import numpy as np

from megatron_lite.analysis.equality.measure import LATER_STEPS, MOST_LATER, SAFETY, Precision
from megatron_lite.analysis.equality.proved_run import ProvedRun
from megatron_lite.analysis.equality.rows import build_row
from megatron_lite.formats.prove_report import ComparedRow

LEAST_LOSS_TOLERANCE = 1e-6  # scripts compute losses in float32 where they compute all else in float64
Combine = Callable[[Sequence[float]], np.floating]
# how a step's loss may be made of those of its micro-batches
COMBINATIONS: tuple[Combine, ...] = (np.mean, np.sum)


def compare_losses(
    run: ProvedRun, reference: ProvedRun, perturbed: ProvedRun | None, precision: Precision, step: int
) -> ComparedRow | None:
    """Compare means over ranks of the mean, or the sum, over micro-batches.

    Args:
        run: The records of what is proved.
        reference: The records of what it is laid beside.
        perturbed: The records of the reference with weights that differ by rounding.
        precision: The coarsest dtype of both.
        step: Number of the step, from 0.

    Returns:
        None where one of both noted no loss.
    """
    mine = _read_losses(run, step)
    theirs = _read_losses(reference, step)
    if not mine or not theirs:
        return None
    pairs = [(_combine(mine, combine), _combine(theirs, combine)) for combine in COMBINATIONS]
    one, other = min(pairs, key=lambda pair: _compute_distance(*pair))
    tolerance = max(precision.unmeasured, LEAST_LOSS_TOLERANCE)
    if perturbed is not None and perturbed.steps > step:
        others = _read_losses(perturbed, step)
        moved = SAFETY * _find_nearest(others, other)
        tolerance = max(tolerance, moved)
    if step:
        tolerance = min(tolerance * LATER_STEPS, MOST_LATER)
    return build_row(
        name=f"step {step + 1}: loss",
        difference=_compute_distance(one, other),
        tolerance=tolerance,
        reference=other,
        proved=one,
    )


def _find_nearest(losses: Sequence[Sequence[float]], other: float) -> float:
    """How far the nearest combination of losses is from another run's loss; 0 where there are no losses."""
    if not losses:
        return 0.0
    distances = []
    for combine in COMBINATIONS:
        loss = _combine(losses, combine)
        distances.append(_compute_distance(loss, other))
    return min(distances)


def _read_losses(run: ProvedRun, step: int) -> list[list[float]]:
    """Read the losses of a step's micro-batches, of each rank that has any."""
    found = []
    for own in run.list_steps(step).values():
        losses = [batch.loss for batch in own.micro_batches if batch.loss is not None]
        if losses:
            found.append(losses)
    return found


def _combine(losses: Sequence[Sequence[float]], combine: Combine) -> float:
    """The mean over ranks of what their losses are together."""
    of_ranks = [combine(own) for own in losses]
    return float(np.mean(of_ranks))


def _compute_distance(one: float, other: float) -> float:
    """Compute the relative distance of two losses."""
    distance = abs(one - other)
    if not other:
        return distance
    return distance / abs(other)
