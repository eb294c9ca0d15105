"""Which chart stands in which section."""

from megatron_lite.analysis.report import Report
from megatron_lite.report.charts.figure import Figure
from megatron_lite.report.charts.memory_curve import memory_curve
from megatron_lite.report.charts.roofline import roofline
from megatron_lite.report.charts.run_steps import run_steps
from megatron_lite.report.charts.step_bars import step_bars
from megatron_lite.report.charts.timeline import timeline


def charts_of(report: Report) -> dict[str, Figure]:
    """Section.key: its chart; none where the bars of a table show as much."""
    makers = {"step": step_bars, "phases": timeline, "roofline": roofline, "memory": memory_curve, "run": run_steps}
    made = {key: make(report) for key, make in makers.items()}
    return {key: figure for key, figure in made.items() if figure is not None}
