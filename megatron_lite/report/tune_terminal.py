"""Draws what `megatron-lite tune` tries, and the command to use."""

from collections.abc import Sequence

from megatron_lite.formats.tune_ledger import MeasuredRun, Settings, TuneOutcome, TuneTrial, describe_settings
from megatron_lite.report.section import Section, Table, section_lines
from megatron_lite.report.text import Style, milliseconds, wrapped
from megatron_lite.units import counted, duration

# ms per step; losses: the largest relative difference
HEAD = ("", "finding", "change", "before", "after", "noise", "losses", "result")


def tune_lines(trials: Sequence[TuneTrial], outcome: TuneOutcome, style: Style) -> list[str]:
    """Draw the ledger: the outcome first, everything tried, and the command to use.

    Args:
        trials: what was tried, in its order.
        outcome: how it ended.
        style: how the terminal may be written to.
    """
    lines = wrapped(style.bold(judge_tuning(outcome)), "")
    if trials:
        table = Table([_write_row(trial) for trial in trials], "rllrrrrl", HEAD)
        took = f"{counted(len(trials), 'change')}, ms per step; runs took {duration(outcome.wall_s)}"
        lines += ["", *section_lines(Section("tried", "What was tried", took, [table]), style)]
        for trial in trials:
            if trial.reason:
                lines += wrapped(f"{trial.number}: {trial.reason}", "  ")
    return [*lines, "", outcome.command]


def describe_progress(told: TuneTrial | MeasuredRun) -> str:
    """Write, in a line, what is told while tuning goes on.

    Args:
        told: a change that was tried, or a recording of the changed command that failed.
    """
    if isinstance(told, MeasuredRun):
        return f"recording the changed command failed: {told.failure}"
    line = f"{told.number}. {describe_settings(told.change)} ({told.code}): {told.result.value}"
    if told.before_ms is not None and told.after_ms is not None:
        noise = "noise unknown" if told.noise_ms is None else f"noise {milliseconds(told.noise_ms)} ms"
        line += f", {milliseconds(told.before_ms)} -> {milliseconds(told.after_ms)} ms ({noise})"
    return f"{line}; {told.reason}" if told.reason else line


def judge_tuning(outcome: TuneOutcome) -> str:
    """Say in a sentence what tuning brought."""
    if outcome.settings and outcome.original_ms and outcome.best_ms:
        less = 1 - outcome.best_ms / outcome.original_ms
        times = f"{milliseconds(outcome.original_ms)} -> {milliseconds(outcome.best_ms)} ms"
        return f"{less:.0%} less time per step ({times}, noise {milliseconds(outcome.noise_ms)} ms): {outcome.reason}."
    return f"The command as given stays: {outcome.reason}."


def _write_row(trial: TuneTrial) -> tuple[str, ...]:
    """Write the row of a change."""
    return (
        str(trial.number),
        trial.code,
        _shorten(trial.change),
        milliseconds(trial.before_ms),
        milliseconds(trial.after_ms),
        milliseconds(trial.noise_ms),
        "" if trial.loss_difference is None else f"{trial.loss_difference:.0e}",
        trial.result.value,
    )


def _shorten(change: Settings) -> str:
    """Write a change as a row has it: of several settings the first, and how many there are beside it."""
    first, *others = change
    return f"{first} and {len(others)} more" if others else str(first)
