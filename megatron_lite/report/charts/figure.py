"""What charts share: a figure for Plotly as plain dicts, quiet axes, safe names."""

import html
import math
from dataclasses import dataclass

from megatron_lite.report.colors import INK, LINE
from megatron_lite.report.text import fit

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
NAME_WIDTH = 48
TICKS = (
    (1.2, (1, 1.5, 2, 3, 4, 5, 6, 8)),
    (4.0, (1, 2, 5)),
    (math.inf, (1,)),
)  # below so many decades: digits with a tick


@dataclass(frozen=True)
class Figure:
    """One chart: what it shows in a sentence (for readers who cannot see it), and Plotly's data and layout."""

    says: str
    data: list[dict]
    layout: dict

    @property
    def legend(self) -> list[tuple[str, str]]:
        """(name, color) of each series that has a name: the page writes it, since Plotly's does not wrap on phones."""
        named = [series for series in self.data if "name" in series and series.get("showlegend", True)]
        colors = [
            series.get("marker", {}).get("color") or series.get("fillcolor") or series["line"]["color"]
            for series in named
        ]
        return [(series["name"], color) for series, color in zip(named, colors)]


def named(text: str, width: int = NAME_WIDTH) -> str:
    """A foreign name as Plotly takes it, which reads <b> and &amp; in any text."""
    return html.escape(fit(text, width), quote=False)


def axis(title: str = "", **more) -> dict:
    """A quiet axis: light grid, no box."""
    look = {
        "gridcolor": LINE,
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
        "ticks": "outside",
        "ticklen": 6,
        "tickcolor": "rgba(0,0,0,0)",
    }
    return {**look, **({"title": {"text": title, "standoff": 8, "font": {"size": 13}}} if title else {}), **more}


def log_axis(title: str, lowest: float, highest: float, **more) -> dict:
    """A logarithmic axis with ticks at round numbers, the more in each decade the fewer decades there are."""
    decades = range(math.floor(math.log10(lowest)) - 1, math.ceil(math.log10(highest)) + 1)
    digits = next(digits for most, digits in TICKS if math.log10(highest / lowest) < most)
    ticks = [digit * 10.0**decade for decade in decades for digit in digits]
    return axis(title, type="log", tickvals=ticks, ticktext=[f"{tick:,.10g}" for tick in ticks], **more)


def layout(height: int, x: dict, y: dict, **more) -> dict:
    """The look of every chart."""
    return {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 8, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 13, "color": INK},
        "xaxis": x,
        "yaxis": y,
        "hoverlabel": {"font": {"family": FONT, "size": 13}, "align": "left", "namelength": -1},
        "showlegend": False,
        "dragmode": False,  # else a finger on the chart does not scroll the page
        **more,
    }
