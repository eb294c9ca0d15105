"""Where the step of each rank goes, one bar per rank."""

from megatron_lite.analysis.report import Report
from megatron_lite.analysis.time.figures import ROW_TITLES
from megatron_lite.report.charts.figure import Figure, axis, layout
from megatron_lite.report.colors import GREY, ROW_COLORS
from megatron_lite.report.sections.step import NOTHING, row_title

MOST_RANKS = 64


def step_bars(report: Report) -> Figure | None:
    """One stacked bar per rank; the bar's length is the step. None for a single rank: its table has bars."""
    ranks = [rank for rank in report.facts.ranks_seen if rank.time.step_ms > 0][:MOST_RANKS]
    if len(ranks) < 2:
        return None
    names = [f"file {at}" if rank.time.rank is None else f"rank {rank.time.rank}" for at, rank in enumerate(ranks)]
    on_gpu = ranks[0].time.on_gpu
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": row_title(row, on_gpu),
            "y": names,
            "x": [rank.time.rows.get(row, 0.0) for rank in ranks],
            "marker": {"color": ROW_COLORS.get(row, GREY)},
            "hovertemplate": "%{fullData.name}: %{x:.3f} ms<extra>%{y}</extra>",
        }
        for row in ROW_TITLES
        if any(rank.time.rows.get(row, 0.0) > NOTHING * rank.time.step_ms for rank in ranks)
    ]
    x, y = axis("ms per step"), axis(autorange="reversed", type="category", showgrid=False)
    return Figure(
        "Where a step of each rank goes, in milliseconds",
        data,
        layout(60 + 26 * len(ranks), x, y, barmode="stack", bargap=0.3),
    )
