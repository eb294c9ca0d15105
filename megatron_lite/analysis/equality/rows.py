"""Builds the rows of an answer: a figure of both sides, how far they are apart, and what rounding explains."""

import math

from megatron_lite.formats.prove_report import ComparedRow


def build_row(
    name: str,
    difference: float,
    tolerance: float,
    reference: float | None = None,
    proved: float | None = None,
    tensors: int = 1,
) -> ComparedRow:
    """Build a row, whose numbers are finite or unknown.

    Args:
        name: What was compared, with its step.
        difference: The largest relative difference; infinite or NaN where numbers are.
        tolerance: Up to which rounding explains it.
        reference: The figure of the reference; None where it has none.
        proved: The figure of what was proved; None where it has none.
        tensors: How many tensors were compared.
    """
    return ComparedRow(
        name=name,
        reference=_keep_finite(reference),
        proved=_keep_finite(proved),
        difference=_keep_finite(difference),
        tolerance=float(tolerance),
        tensors=tensors,
    )


def _keep_finite(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(value)
