"""When the phases of one step run: the device's clock, or the host's without a GPU."""

from megatron_lite.analysis.report import Report
from megatron_lite.report.charts.figure import Figure, axis, layout, named
from megatron_lite.report.colors import ORANGE, SERIES, VERMILION

HUES = tuple(color for color in SERIES[:-2] if color not in (VERMILION, ORANGE))  # those two as in the bars of a step
SHARED = {"communication": VERMILION, "copies": ORANGE}
MOST_SPANS = 400  # longer ones first; beyond that a picture shows nothing more


def timeline(report: Report) -> Figure | None:
    """A row per phase, a bar per span of a representative step. None for a single phase."""
    rank = report.facts.critical
    if rank is None or not rank.time.timeline:
        return None
    spans = sorted(
        sorted(rank.time.timeline, key=lambda span: span.start_ns - span.end_ns)[:MOST_SPANS],
        key=lambda span: span.start_ns,
    )
    if len({span.name for span in spans}) < 2:
        return None
    begin = spans[0].start_ns
    names = list(dict.fromkeys(span.name for span in spans))
    rows = {name: f"{named(name, 22)}" for name in names}
    colors = {name: SHARED.get(name, HUES[at % len(HUES)]) for at, name in enumerate(names)}
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": [rows[span.name] for span in spans],
            "base": [(span.start_ns - begin) / 1e6 for span in spans],
            "x": [(span.end_ns - span.start_ns) / 1e6 for span in spans],
            "marker": {"color": [colors[span.name] for span in spans]},
            "hovertemplate": "%{y}: %{x:.3f} ms from %{base:.3f} ms<extra></extra>",
        }
    ]
    clock = "device" if rank.time.on_gpu else "host"
    x, y = axis(f"ms of the step, {clock}'s clock"), axis(autorange="reversed", type="category", showgrid=False)
    return Figure(
        "When the phases of one step run", data, layout(70 + 28 * len(names), x, y, barmode="overlay", bargap=0.35)
    )
