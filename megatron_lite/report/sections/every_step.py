"""Where all steps of the run go, beside the profiled ones: from the run's own clock, whatever a trace shows."""

from functools import partial

from megatron_lite.analysis.report import Report
from megatron_lite.analysis.run.every_step import NO_CORE, EveryStepRow
from megatron_lite.report.section import READS_AS_ZERO, Lines, Section, Table
from megatron_lite.report.text import milliseconds, percent, share

TITLES = {
    "data": "waiting for the data loader",
    "optimizer_step": "optimizer step",
    "grad_sync": "gradient reduction",
    "other": "in no phase",
    NO_CORE: "included: waiting for a CPU core",
}


def every_step_section(report: Report, everything: bool) -> Section | None:
    """Build a row per phase: medians of all typical steps, and of those inside of the window."""
    found = report.facts.every_step
    if found is None:
        return None
    on_gpu = any(row.gpu_ms is not None for row in found.rows)
    has_window = found.profiled_step_ms is not None
    write = partial(milliseconds, largest=max(found.step_ms, found.profiled_step_ms or 0.0))
    rows = []
    for row in found.rows:
        if everything or _is_shown(row, found.step_ms):
            cells = [
                TITLES.get(row.name, row.name),
                write(row.ms),
                percent(share(row.ms, found.step_ms)),
            ]
            if has_window:
                cells.append(write(row.profiled_ms))
            if on_gpu:
                cells.append(write(row.gpu_ms))
            if on_gpu and has_window:
                cells.append(write(row.profiled_gpu_ms))
            rows.append(cells)
    head = ["phase", "ms", "of step"]
    whole = ["a step", write(found.step_ms), "100%"]
    if has_window:
        head.append("in the window")
        whole.append(write(found.profiled_step_ms))
    if on_gpu:
        head.append("on the GPU")
        whole.append("")
    if on_gpu and has_window:
        head.append("in the window")
        whole.append("")
    rows.append(whole)
    window = f", in the window of {found.profiled_steps}" if has_window else ""
    subtitle = f"ms per step on the host, medians of {found.steps:,} typical steps{window}"
    quiet = Lines(["medians of phases need not add up to the median step"], quiet=True)
    return Section(
        "every_step",
        "All steps",
        subtitle,
        [Table(rows, "l" + "r" * (len(head) - 1), head), quiet],
    )


def _is_shown(row: EveryStepRow, step_ms: float) -> bool:
    """Tell whether a phase takes enough of a step to be shown without --all."""
    least = READS_AS_ZERO * step_ms
    return row.ms > least or (row.profiled_ms or 0.0) > least
