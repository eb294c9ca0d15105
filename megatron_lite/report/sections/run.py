"""What the run folder says of the whole run, of which a trace shows a few steps."""

from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run.figures import Run
from megatron_lite.analysis.run.learning import learning_of
from megatron_lite.report.numbers import flops, milliseconds, percent
from megatron_lite.report.section import Lines, Section
from megatron_lite.units import count


def run_section(report: Report, everything: bool) -> Section | None:
    """Speed without the profiler, the first step, skipped steps, how it ended."""
    run = report.facts.run
    if run is None:
        return None
    return Section(
        "run",
        "The whole run",
        f"{run.steps:,} steps, {run.status.partition(':')[0]}",
        [Lines([*_failure(run), *_speed(run), *_profiled(run), *_first(run), *_learned(run)])],
    )


def _failure(run: Run) -> list[str]:
    ended = [run.status] if run.status.startswith(("failed:", "killed")) else []
    return [*ended, run.verdict_on_ranks] if run.verdict_on_ranks not in run.status else ended


def _speed(run: Run) -> list[str]:
    if run.steady_step_ms is None:
        return []
    parts = [
        f"ordinary step {milliseconds(run.steady_step_ms)} ms",
        f"{count(run.tokens_per_second)} tokens/s" if run.tokens_per_second else "",
        f"{flops(run.model_tflops * 1e12)}/s per rank" if run.model_tflops else "",
        f"MFU {percent(run.mfu_causal)} (all of attention counted: {percent(run.mfu_full)})"
        if run.mfu_causal and run.mfu_full
        else "",
    ]
    return [", ".join(part for part in parts if part)]


def _profiled(run: Run) -> list[str]:
    slower = run.profiler_slowdown
    return (
        [f"inside the profiled window a step{run.on_rank} took {slower:.2f} times as long as before it"]
        if slower
        else []
    )


def _first(run: Run) -> list[str]:
    if run.first_step_ms is None or not run.steady_step_ms:
        return []
    times = run.first_step_ms / run.steady_step_ms
    return [f"first step {milliseconds(run.first_step_ms)} ms, as long as {times:,.1f} ordinary ones"]


def _learned(run: Run) -> list[str]:
    learning = learning_of(run)
    skipped = learning.steps - learning.updates
    told = (
        f"{skipped:,} of {run.steps:,} steps skipped: a gradient was not finite" if skipped else "",
        learning.losses,
        f"the gradient norm is cut in every update, to 1/{learning.clipped:,.0f} in the median (--clip-grad)"
        if learning.clipped
        else "",
    )
    return [one for one in told if one]
