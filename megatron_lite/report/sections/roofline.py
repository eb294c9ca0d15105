"""Speed of light: how far from what the hardware can do, and where the most is lost."""

from collections.abc import Sequence

from megatron_lite.analysis.kernels.kernel_results import RankKernels, RooflineRow
from megatron_lite.analysis.report import Report
from megatron_lite.report.numbers import calls, flops, milliseconds, percent
from megatron_lite.report.section import Lines, Section, Table, first, with_some_value
from megatron_lite.report.sections.step import whose
from megatron_lite.report.text import fit

ROWS_SHOWN = 2
MIN_SHARE_OF_ROW = 0.01  # of a step
OPERATOR_WIDTH = 16  # of the terminal's columns: a shape that is cut says nothing


def roofline_section(report: Report, everything: bool) -> Section | None:
    """Arithmetic against the device's peak, tensor cores, then operators by what they lose, where limits are known."""
    rank = report.facts.critical
    if rank is None:
        return None
    told = [*_arithmetic(rank.kernels), *(_tensor_cores(rank.kernels) if rank.time.on_gpu else [])]
    least = 0.0 if everything else MIN_SHARE_OF_ROW * rank.time.step_ms
    rows = [row for row in rank.kernels.roofline if everything or row.ms >= least and row.bound_ms is not None]
    if not told and not rows:
        return None
    blocks = [Lines(told), *([_table(rows, everything)] if rows else [])]
    known = any(row.bound_ms is not None for row in rows)
    of = "operators that lose most against the hardware first" if known else "operators by shape" if rows else ""
    return Section("roofline", "Speed of light", whose(rank.time.rank) + of if of else "", blocks)


def _arithmetic(kernels: RankKernels) -> list[str]:
    if not kernels.achieved_tflops:
        return []
    of = "of products, attention and convolution per step"
    work = f"{flops(kernels.model_flops)} {of}: " if kernels.model_flops else ""
    if kernels.mfu is None or not kernels.peak_tflops:
        peak = f"{kernels.peak_dtype} peak" if kernels.peak_dtype else "peak"
        return [f"{work}{flops(kernels.achieved_tflops * 1e12)}/s; the {peak} of this device is not known"]
    peak = f"{percent(kernels.mfu)} of the device's {kernels.peak_tflops:,.4g} TFLOP/s in {kernels.peak_dtype}"
    return [f"{work}{flops(kernels.achieved_tflops * 1e12)}/s, {peak}"]


def _tensor_cores(kernels: RankKernels) -> list[str]:
    if not kernels.matrix_ms:
        return []
    maybe = kernels.maybe_tensor_core_ms / kernels.matrix_ms
    unsaid = f"; names of {percent(maybe)} do not say" if maybe > 0.005 else ""
    used = percent(kernels.tensor_core_ms / kernels.matrix_ms)
    of = f"{milliseconds(kernels.matrix_ms)} ms of products, attention and convolution"
    return [f"tensor cores: {used} of the {of}{unsaid}"]


def _table(rows: Sequence[RooflineRow], everything: bool) -> Table:
    shown, hidden = first(rows, ROWS_SHOWN, everything)
    largest = max(row.ms for row in shown)
    head = ["operator", "shape", "phase", "ms", "at best", "limit", "TFLOP/s", "GB/s", "reached"]
    body = [
        [
            row.operator if everything else fit(row.operator.removeprefix("aten::"), OPERATOR_WIDTH),
            row.shape,
            row.phase,
            milliseconds(row.ms, largest),
            milliseconds(row.bound_ms, largest),
            row.bound_by,
            f"{row.achieved_tflops:,.3g}" if row.flops else "",
            calls(row.achieved_gb_s) if row.num_bytes else "",
            percent(row.efficiency),
        ]
        for row in shown
    ]
    return with_some_value(Table(body, "lllrrlrrr", head, hidden=hidden))
