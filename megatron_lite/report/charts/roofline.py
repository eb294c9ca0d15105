"""Operators by arithmetic intensity against the hardware's two limits."""

from megatron_lite.analysis.kernels.kernel_results import RooflineRow
from megatron_lite.analysis.report import Report
from megatron_lite.report.charts.figure import Figure, layout, log_axis, named
from megatron_lite.report.colors import CARD, ROLE_COLORS, SLATE

MAX_POINTS = 300
LARGEST_PX, SMALLEST_PX = 34, 6


def roofline(report: Report) -> Figure | None:
    """A point per operator and shape, as large as its time, below the hardware's limits; None if those are unknown."""
    rank = report.facts.critical
    rows = [
        row for row in (rank.kernels.roofline if rank else ()) if row.flops > 0 and row.num_bytes > 0 and row.ms > 0
    ]
    rows = sorted(rows, key=lambda row: -row.ms)[:MAX_POINTS]
    if len(rows) < 2 or not any(row.bound_ms for row in rows):
        return None
    roles = list(dict.fromkeys(row.role for row in rows))
    data = [
        _points([row for row in rows if row.role == role], str(role), ROLE_COLORS[role], rows[0].ms) for role in roles
    ]
    intensities = [row.flops / row.num_bytes for row in rows]
    data += _ceilings(rank.kernels.roofline, min(intensities) / 2, max(intensities) * 2)
    speeds = [speed for line in data for speed in line["y"]]
    x = log_axis("FLOP per byte", min(intensities) / 2, max(intensities) * 2)
    y = log_axis("TFLOP/s", min(speeds), max(speeds))
    return Figure(
        "How fast operators are against what memory and arithmetic units allow",
        data,
        layout(400, x, y),
    )


def _points(rows: list[RooflineRow], role: str, color: str, longest_ms: float) -> dict:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": role,
        "x": [row.flops / row.num_bytes for row in rows],
        "y": [row.flops / row.ms / 1e9 for row in rows],
        "marker": {
            "color": color,
            "opacity": 0.75,
            "line": {"color": CARD, "width": 1},
            "size": [max(LARGEST_PX * (row.ms / longest_ms) ** 0.5, SMALLEST_PX) for row in rows],
        },
        "text": [
            f"{named(row.operator)} {named(row.shape, 80)}<br>"
            f"{row.ms:.3f} ms per step in {named(row.phase or 'no phase')}"
            + (f"<br>{row.efficiency:.0%} of what {row.bound_by} allows" if row.efficiency is not None else "")
            for row in rows
        ],
        "hovertemplate": "%{text}<br>%{y:.3g} TFLOP/s at %{x:.3g} FLOP per byte<extra></extra>",
    }


def _ceilings(rows: tuple[RooflineRow, ...], lowest: float, highest: float) -> list[dict]:
    """The limits that the rows' bounds were made of: arithmetic per number format, and memory."""
    peaks = {row.dtype: row.flops / row.bound_ms / 1e9 for row in rows if row.bound_by == "compute" and row.bound_ms}
    bandwidths = [row.num_bytes / row.bound_ms / 1e9 for row in rows if row.bound_by == "memory" and row.bound_ms]
    lines = [
        _line([lowest, highest], [peak, peak], f"{peak:,.0f} TFLOP/s in {named(dtype)}")
        for dtype, peak in peaks.items()
    ]
    if bandwidths:
        tb_s = max(bandwidths)  # TFLOP/s = FLOP per byte x TB/s
        end = min(highest, max(peaks.values()) / tb_s) if peaks else highest
        if end > lowest:
            lines.append(
                _line([lowest, end], [lowest * tb_s, end * tb_s], f"memory, {tb_s * 1000:,.0f} GB/s", "bottom right")
            )
    return lines


def _line(x: list[float], y: list[float], name: str, side: str = "top right") -> dict:
    """Its name stands at its beginning, below a line that rises; no legend entry to look up."""
    return {
        "type": "scatter",
        "mode": "lines+text",
        "x": x,
        "y": y,
        "name": name,
        "line": {"color": SLATE, "width": 1.5, "dash": "dot"},
        "showlegend": False,
        "hovertemplate": f"{name}<extra></extra>",
        "text": [name, ""],
        "textposition": side,
        "textfont": {"size": 12, "color": SLATE},
    }
