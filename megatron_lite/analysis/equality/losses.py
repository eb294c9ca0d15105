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
    others = [] if perturbed is None or perturbed.steps <= step else _read_losses(perturbed, step)
    if others:
        moved = min(_compute_distance(_combine(others, combine), other) for combine in COMBINATIONS)
        tolerance = max(tolerance, SAFETY * moved)
    if step:
        tolerance = min(tolerance * LATER_STEPS, MOST_LATER)
    return build_row(f"step {step + 1}: loss", _compute_distance(one, other), tolerance, other, one)


def _read_losses(run: ProvedRun, step: int) -> list[list[float]]:
    """Read the losses of a step's micro-batches, of each rank that has any."""
    found = []
    for own in run.list_steps(step).values():
        losses = [batch.loss for batch in own.micro_batches if batch.loss is not None]
        if losses:
            found.append(losses)
    return found


def _combine(losses: Sequence[Sequence[float]], combine: Combine) -> float:
    return float(np.mean([combine(own) for own in losses]))


def _compute_distance(one: float, other: float) -> float:
    """Compute the relative distance of two losses."""
    distance = abs(one - other)
    return distance / abs(other) if other else distance
