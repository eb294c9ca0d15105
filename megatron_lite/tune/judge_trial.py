"""Judges a change by runs in turns: its gain beside the noise, and whether the losses agree."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from megatron_lite.analysis.compare.compare_results import Change, Pair
from megatron_lite.analysis.compare.settings import paired_samples
from megatron_lite.formats.tune_ledger import MeasuredRun, TrialResult
from megatron_lite.tune.knobs import LossEffect

# of a step's loss between runs of the same command: more comes of other data or other first weights, not of sums
MAX_OWN_DIFFERENCE = 1e-2
IN_A_ROW = 4  # steps


@dataclass(frozen=True)
class TrialJudgement:
    """The answer of the runs to a change."""

    pair: Pair | None  # None where a run failed
    loss_difference: float | None
    result: TrialResult
    reason: str = ""


def judge_runs(
    before: Sequence[MeasuredRun], after: Sequence[MeasuredRun], losses: LossEffect, tolerance: float
) -> TrialJudgement:
    """Judge a change by runs without and with it, which took turns.

    Args:
        before: runs without it.
        after: runs with it.
        losses: what it may leave of the losses.
        tolerance: relative difference of a step's loss that rounding may make.
    """
    failures = [run.failure for run in after if run.failure]
    failures += [f"the command without it: {run.failure}" for run in before if run.failure]
    if failures:
        return TrialJudgement(None, None, TrialResult.FAILED, failures[0])
    pair = pair_runs(before, after)
    difference = None
    if losses is not LossEffect.CHANGED:
        difference = measure_loss_difference(before[0], after)
        objection = _object_to_losses(before, difference, losses, tolerance)
        if objection:
            return TrialJudgement(pair, difference, TrialResult.OTHER_LOSSES, objection)
    if is_faster(pair, before, after):
        return TrialJudgement(pair, difference, TrialResult.KEPT)
    result = TrialResult.SLOWER if pair.change is Change.MORE else TrialResult.WITHIN_NOISE
    reason = "few steps were seen: more --steps" if pair.band is None else ""
    return TrialJudgement(pair, difference, result, reason)


def pair_runs(before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> Pair:
    """Pair the steps of all runs of both variants, as `compare` pairs those of two runs.

    What else ran on the machine held up both, since they took turns: it is in the noise of the steps.
    """
    steps_before = [ms for run in before for ms in average_in_a_row(run)]
    steps_after = [ms for run in after for ms in average_in_a_row(run)]
    return paired_samples(steps_before, steps_after)


def average_in_a_row(run: MeasuredRun) -> list[float]:
    """Average steps that follow each other, ms: several workers bring several batches at once, so that a single step,
    and the median of all, may take far less than their mean."""
    times_ms = run.step_ms
    return [fmean(times_ms[at : at + IN_A_ROW]) for at in range(0, len(times_ms) - IN_A_ROW + 1, IN_A_ROW)]


def is_faster(pair: Pair, before: Sequence[MeasuredRun], after: Sequence[MeasuredRun]) -> bool:
    """Whether steps are shorter by more than the noise, and in every round."""
    if pair.change is not Change.LESS:
        return False
    medians = [(median(average_in_a_row(old)), median(average_in_a_row(new))) for old, new in zip(before, after)]
    return all(new_ms < old_ms for old_ms, new_ms in medians)


def measure_loss_difference(reference: MeasuredRun, others: Sequence[MeasuredRun]) -> float | None:
    """Measure the largest relative difference of a step's loss from the reference's; None where none was recorded."""
    differences = [
        _compare_losses(loss, other)
        for run in others
        for loss, other in zip(reference.losses, run.losses)
        if loss is not None or other is not None
    ]
    return max(differences, default=None)


def _compare_losses(loss: float | None, other: float | None) -> float:
    """Compare the losses of a step: the relative difference; infinite where one of them is no number."""
    if loss is None or other is None:
        return math.inf
    if loss == other:
        return 0.0
    return abs(other - loss) / max(abs(loss), abs(other))


def _object_to_losses(
    before: Sequence[MeasuredRun], difference: float | None, losses: LossEffect, tolerance: float
) -> str:
    """Write why the losses do not agree; "" where they do.

    Args:
        before: runs without the change, which may differ among themselves.
        difference: of the runs with it.
        losses: what it may leave of them.
        tolerance: what rounding may make.
    """
    if difference is None:
        return "no losses were recorded, so that nothing says that it trains the same"
    own = measure_loss_difference(before[0], before[1:]) or 0.0
    if own > max(tolerance, MAX_OWN_DIFFERENCE):
        return f"losses of one command differ by up to {own:.1e} from run to run: nothing says that it trains the same"
    allowed = own if losses is LossEffect.BIT_EQUAL else max(tolerance, own)
    if difference <= allowed:
        return ""
    return f"losses differ by up to {difference:.1e} of their value, and {allowed:.1e} is allowed ({losses})"
