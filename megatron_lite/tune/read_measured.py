"""Reads what a run's folder says of a variant: times and losses of its steps, and its report's findings."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from megatron_lite.analysis.analyze import analyze
from megatron_lite.analysis.findings.base import Finding
from megatron_lite.analysis.intervals import Numbers
from megatron_lite.analysis.report import Gains
from megatron_lite.analysis.run.read import read_run
from megatron_lite.analysis.run.run_results import Run
from megatron_lite.errors import UserError
from megatron_lite.formats.tune_ledger import MeasuredRun, SeenFinding

MIN_MEASURED_STEPS = 8  # as many as are averaged


def read_measured(folder: Path, wanted: MeasuredRun, wall_s: float) -> MeasuredRun:
    """Read what a run measured.

    Args:
        folder: the run's folder.
        wanted: what was asked for.
        wall_s: that it took, in seconds.

    Returns:
        The run, with the reason where it has too few steps.
    """
    try:
        run = read_run(folder)
    except UserError as error:
        return msgspec.structs.replace(wanted, wall_s=wall_s, failure=str(error))
    step_ms = read_step_times(run)
    if len(step_ms) < MIN_MEASURED_STEPS:
        failure = f"{len(step_ms)} steps can be measured, and {MIN_MEASURED_STEPS} are needed: more --steps"
        return msgspec.structs.replace(wanted, wall_s=wall_s, failure=failure)
    waits_ms = run.core_wait_ms[run.undisturbed]
    known_ms = waits_ms[np.isfinite(waits_ms)]
    return msgspec.structs.replace(
        wanted,
        wall_s=wall_s,
        step_ms=tuple(round(float(ms), 4) for ms in step_ms),
        core_wait_ms=round(float(np.median(known_ms)), 4) if len(known_ms) else None,
        losses=tuple(float(loss) if np.isfinite(loss) else None for loss in run.losses),
    )


def read_step_times(run: Run) -> Numbers:
    """Read what each undisturbed step took, ms; evaluating and saving are spread over all of them.

    The last step is left out: a checkpoint at a run's end says nothing of how often one is written.
    """
    counted = run.undisturbed.copy()
    counted[-1:] = False
    training_ms = run.training_ms[counted]
    stalls_ms = run.step_ms[counted] - training_ms
    return training_ms + (stalls_ms.mean() if len(stalls_ms) else 0.0)


def read_findings(folder: Path) -> tuple[SeenFinding, ...]:
    """Read the findings of the report on a recorded run, in the order in which their remedies are to be tried."""
    report = analyze([folder])
    ordered = order_for_trials(report.findings, report.gains)
    return tuple(convert_finding(finding) for finding in ordered)


def order_for_trials(findings: Sequence[Finding], gains: Gains | None) -> list[Finding]:
    """Order findings as the report says what to change first.

    A finding whose remedy was not replayed stands before the first change that saves less than it saves at most. Last
    are those whose remedies save nothing on top of the others.

    Args:
        findings: of the report.
        gains: of the report; None: no remedy was replayed.
    """
    by_code = {found.code: found for found in findings}
    bounds = [found for found in findings if found.gain_is_bound]
    bounds.sort(key=_get_gain, reverse=True)
    ordered: list[Finding] = []
    for change in gains.order if gains else ():
        while bounds and _get_gain(bounds[0]) > change.ms:
            ordered.append(bounds.pop(0))
        ordered.append(by_code[change.code])
    ordered += bounds
    rest = [found for found in findings if found not in ordered]
    return [*ordered, *rest]


def _get_gain(found: Finding) -> float:
    """Get what a remedy saves of a step, ms; 0 where nobody says it."""
    return found.gain_ms or 0.0


def convert_finding(finding: Finding) -> SeenFinding:
    """Keep of a finding what tuning reads."""
    return SeenFinding(
        code=finding.code,
        title=finding.title,
        cost_ms=finding.cost_ms,
        gain_ms=finding.gain_ms,
        remedies=finding.settings,
    )
