"""Memory over time, by what holds it."""

from itertools import pairwise

from megatron_lite.analysis.memory.memory_results import Moment, Snapshot
from megatron_lite.analysis.report import Report
from megatron_lite.estimate.memory_categories import CATEGORIES
from megatron_lite.report.charts.figure import Figure, axis, layout
from megatron_lite.report.colors import CARD, CATEGORY_COLORS, SLATE
from megatron_lite.units import size

MAX_POINTS = 1500  # more than a chart has pixels
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def memory_curve(report: Report) -> Figure | None:
    """Stacked categories, the reserved bytes above, the peak marked."""
    snapshot = report.facts.highest_snapshot
    if snapshot is None or len(snapshot.curve) < 2:
        return None
    curve = thinned(snapshot.curve, MAX_POINTS)
    unit, of = next((pair for pair in UNITS if snapshot.peak_bytes >= pair[1]), UNITS[-1])
    seconds = [moment.time_us / 1e6 for moment in curve]
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "held",
            "name": category,
            "x": seconds,
            "y": [moment.by_category[at] / of for moment in curve],
            "line": {"width": 0, "shape": "hv"},
            "fillcolor": CATEGORY_COLORS[category],
            "hovertemplate": f"%{{fullData.name}}: %{{y:.2f}} {unit}<extra></extra>",
        }
        for at, category in enumerate(CATEGORIES)
        if any(moment.by_category[at] for moment in curve)
    ]
    data += _reserved(curve, seconds, unit, of)
    x, y = axis("seconds since the record began"), axis(unit, rangemode="tozero")
    return Figure(
        "Allocated memory over time by category",
        data,
        layout(350, x, y, hovermode="x", annotations=_peak(snapshot, of, seconds)),
    )


def thinned(curve: tuple[Moment, ...], most: int) -> list[Moment]:
    """At most `most` moments: of each stretch the one with the most allocated, so that no peak is lost."""
    if len(curve) <= most:
        return list(curve)
    edges = [at * len(curve) // most for at in range(most + 1)]
    return [max(curve[begin:end], key=lambda moment: moment.allocated) for begin, end in pairwise(edges)]


def _reserved(curve: list[Moment], seconds: list[float], unit: str, of: int) -> list[dict]:
    if not any(moment.reserved for moment in curve):
        return []
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "reserved",
            "x": seconds,
            "y": [moment.reserved / of for moment in curve],
            "line": {"color": SLATE, "width": 1.5, "dash": "dot", "shape": "hv"},
            "hovertemplate": f"reserved: %{{y:.2f}} {unit}<extra></extra>",
        }
    ]


def _peak(snapshot: Snapshot, of: int, seconds: list[float]) -> list[dict]:
    """Its text stands on the side that has more room."""
    late = 2 * snapshot.peak_time_us / 1e6 > seconds[0] + seconds[-1]
    where = f" in {snapshot.peak_phase}" if snapshot.peak_phase.isidentifier() else ""
    return [
        {
            "x": snapshot.peak_time_us / 1e6,
            "y": snapshot.peak_bytes / of,
            "text": f"peak {size(snapshot.peak_bytes)}{where}",
            "showarrow": True,
            "arrowhead": 0,
            "arrowcolor": SLATE,
            "ax": -20 if late else 20,
            "xanchor": "right" if late else "left",
            "ay": -22,
            "bgcolor": CARD,
        }
    ]
