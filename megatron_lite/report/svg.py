"""Charts as SVG: drawn once, colors by the names of the style sheet, as wide as the window, and no script.

What runs across is in percent and what runs down in pixels, so that texts and points keep their size in any window. An element's
`title` is what a pointer shows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup

from megatron_lite.report.figure import Arrangement, Axis, BarChart, Bars, Curve, CurveChart, Figure, Look
from megatron_lite.report.text import fit
from megatron_lite.units import significant

MAX_TICKS = 7
MAX_STRIPS = 100  # places at which a pointer is told the curves' values
MAX_DESCRIBED = 1500  # bars of a chart; more are drawn without titles, at a tenth of the bytes
MAX_TEXT = 200  # letters of what a pointer shows
BAR_SHARE = 0.68  # of a row's height
TOP_PX, ROW_TOP_PX = 24, 4  # above the plot: the vertical axis's title; above the rows
AXIS_PX = 44  # below the plot
WIDE = 1000  # units of a path across the plot
MARGIN = 0.04  # of the range of a vertical axis
# below so many decades: digits with a tick
DIGITS = ((1.2, (1, 1.5, 2, 3, 4, 5, 6, 8)), (4.0, (1, 2, 5)), (math.inf, (1,)))


class Scale:
    """Places of values between two ends, 0 to 1."""

    def __init__(self, lowest: float, highest: float, is_log: bool = False):
        self.is_log = is_log
        self.lowest = lowest
        self.highest = highest if highest > lowest else lowest + (abs(lowest) or 1.0)

    def place(self, value: float) -> float:
        if self.is_log:
            return math.log(value / self.lowest) / math.log(self.highest / self.lowest)
        return (value - self.lowest) / (self.highest - self.lowest)

    def ticks(self) -> list[tuple[float, str]]:
        """Round values between the ends, and how they are written."""
        if self.is_log:
            return [(value, significant(value, 1 if value < 1000 else 2)) for value in self._choose_log_ticks()]
        span = self.highest - self.lowest
        size = 10.0 ** math.floor(math.log10(span / MAX_TICKS))
        step = next(size * digit for digit in (1, 2, 5, 10) if span / (size * digit) <= MAX_TICKS)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first = math.ceil(self.lowest / step - 1e-9)
        last = math.floor(self.highest / step + 1e-9)
        return [(at * step, f"{at * step:,.{decimals}f}") for at in range(first, last + 1)]

    def _choose_log_ticks(self) -> list[float]:
        """The more in each decade the fewer decades there are; of very many decades every second, third, ..."""
        decades = math.log10(self.highest / self.lowest)
        digits = next(digits for most, digits in DIGITS if decades < most)
        every = max(1, math.ceil(decades / (2 * MAX_TICKS)))
        powers = range(math.floor(math.log10(self.lowest)), math.ceil(math.log10(self.highest)) + 1, every)
        ticks = (digit * 10.0**power for power in powers for digit in digits)
        return [tick for tick in ticks if self.lowest * 0.999 <= tick <= self.highest * 1.001]


def draw(figure: Figure) -> Markup:
    """The chart as an element for a page; a name in it is text and nothing else."""
    root = _draw_bars(figure) if isinstance(figure, BarChart) else _draw_curves(figure)
    # ElementTree has escaped every text and attribute
    return Markup(tostring(root, encoding="unicode"))


def measure_gutter(figure: Figure) -> int:
    """Letters that stand to the left of the plot."""
    if isinstance(figure, BarChart):
        return max(map(len, figure.rows))
    return max(len(text) for _, text in _scale_vertical(figure).ticks())


def place_rows(figure: Figure) -> list[tuple[str, int]]:
    """Names of the rows of bars, each with the pixel of its middle."""
    if not isinstance(figure, BarChart):
        return []
    return [(row, ROW_TOP_PX + at * figure.row_px + figure.row_px // 2) for at, row in enumerate(figure.rows)]


# --- bars


@dataclass(frozen=True)
class PlacedBar:
    """A bar of a series, where it begins and ends on the axis, and its color."""

    number: int
    begin: float
    end: float
    color: str


def _draw_bars(figure: BarChart) -> Element:
    bars = _place_bars(figure)
    scale = _scale_bars(figure, [bar for of_series in bars for bar in of_series])
    plot_px = figure.row_px * len(figure.rows)
    root = _begin(plot_px, ROW_TOP_PX)
    _draw_horizontal_axis(root, scale, figure.axis, plot_px)
    if figure.arrangement is Arrangement.OVERLAID and sum(map(len, bars)) > MAX_DESCRIBED:
        _draw_many_bars(root, figure, bars, scale, plot_px)
    else:
        for number, of_series in enumerate(bars):
            _draw_series(root, figure, number, of_series, scale)
    if scale.lowest < 0:
        _draw_upright(root, "zero", scale.place(0.0), plot_px)
    if figure.limit is not None:
        _draw_upright(root, "limit", scale.place(figure.limit), plot_px)
    return root


def _place_bars(figure: BarChart) -> list[list[PlacedBar]]:
    """The bars of each series."""
    ends: dict[str, float] = {}
    placed = []
    for one in figure.series:
        of_series = []
        for at, (row, value) in enumerate(zip(one.rows, one.values)):
            begin = one.begins[at] if one.begins else 0.0
            if figure.arrangement is Arrangement.STACKED:
                begin = ends.get(row, 0.0)
                ends[row] = begin + value
            of_series.append(PlacedBar(at, begin, begin + value, one.colors[at if len(one.colors) > 1 else 0]))
        placed.append(of_series)
    return placed


def _scale_bars(figure: BarChart, bars: Sequence[PlacedBar]) -> Scale:
    """Scale the axis of bars from zero, or the lowest bar, to the highest or the limit; an axis that names its ends
    has these."""
    values = [0.0, figure.limit or 0.0, *(bar.begin for bar in bars), *(bar.end for bar in bars)]
    lowest = min(values) if figure.axis.lowest is None else figure.axis.lowest
    highest = max(values) if figure.axis.highest is None else figure.axis.highest
    return Scale(lowest, highest)


def _draw_series(root: Element, figure: BarChart, number: int, bars: Sequence[PlacedBar], scale: Scale) -> None:
    one = figure.series[number]
    rows = {row: at for at, row in enumerate(figure.rows)}
    height = BAR_SHARE * figure.row_px
    above = (figure.row_px - height) / 2
    if figure.arrangement is Arrangement.BESIDE:
        height /= len(figure.series)
        above += number * height
    group = SubElement(root, "g", _paint(one.colors[0]))
    for bar in bars:
        if bar.begin == bar.end:
            continue
        left, right = sorted((scale.place(bar.begin), scale.place(bar.end)))
        top = rows[one.rows[bar.number]] * figure.row_px + above
        shape = {"x": _percent(left), "y": f"{top:.1f}", "width": _percent(right - left), "height": f"{height:.1f}"}
        shape |= _paint(bar.color) if bar.color != one.colors[0] else {}
        _say(SubElement(group, "rect", shape), _describe_bar(figure, one, bar.number))


def _draw_many_bars(
    root: Element, figure: BarChart, bars: Sequence[Sequence[PlacedBar]], scale: Scale, plot_px: int
) -> None:
    """Each series as one path, whose strokes are as thick as bars. Each has one color."""
    paths = _begin_paths(root, plot_px)
    middles = dict(place_rows(figure))
    for one, of_series in zip(figure.series, bars):
        parts = []
        for bar in of_series:
            left, right = sorted((scale.place(bar.begin), scale.place(bar.end)))
            middle = middles[one.rows[bar.number]] - ROW_TOP_PX
            parts.append(f"M{_shorten(WIDE * left)} {middle}h{_shorten(WIDE * (right - left))}")
        width = f"{BAR_SHARE * figure.row_px:.1f}"
        shape = {"class": "line", "stroke-width": width, "d": "".join(parts)}
        SubElement(paths, "path", {**shape, **_paint(one.colors[0])})


def _draw_upright(root: Element, kind: str, place: float, plot_px: int) -> None:
    across = _percent(place)
    SubElement(root, "line", {"class": kind, "x1": across, "x2": across, "y1": "0", "y2": f"{plot_px}"})


def _describe_bar(figure: BarChart, one: Bars, at: int) -> str:
    """Describe a bar: 'rank 3, compute: 12.3 ms', 'forward: 12.3 ms from 40.1'."""
    named = [one.rows[at], *([one.name] if one.name else [])]
    named += [f"micro-batch {one.micro_batches[at]}"] if one.micro_batches else []
    begins = f", from {significant(one.begins[at], 4)}" if one.begins else ""
    unit = figure.axis.title.partition(",")[0].partition(" of ")[0]
    return f"{', '.join(named)}: {significant(one.values[at], 4)} {unit}{begins}"


# --- curves


def _draw_curves(figure: CurveChart) -> Element:
    across = [value for one in figure.curves for value in one.x]
    lowest = min(across) if figure.x.lowest is None else figure.x.lowest
    highest = max(across) if figure.x.highest is None else figure.x.highest
    x, y = Scale(lowest, highest, figure.x.is_log), _scale_vertical(figure)
    root = _begin(figure.plot_px, TOP_PX)
    _draw_vertical_axis(root, y, figure)
    _draw_horizontal_axis(root, x, figure.x, figure.plot_px)
    paths = _begin_paths(root, figure.plot_px)
    # upper areas first: each reaches down to the ground, and the next covers its lower part
    areas = _stack_areas(figure.curves)
    for one, tops in reversed(areas):
        _draw_path(paths, one, _trace_area(one.x, tops, x, y, figure.plot_px))
    for one in figure.curves:
        if one.look in (Look.LINE, Look.JOINED_POINTS, Look.STAIRS):
            _draw_path(paths, one, _trace_line(one, x, y, figure.plot_px))
        elif one.look is Look.POINTS and not one.texts:
            _draw_path(paths, one, _trace_points(one, x, y, figure.plot_px))
    _draw_strips(root, figure, x)
    for one in figure.curves:
        _draw_described_points(root, one, x, y, figure.plot_px)
        if one.is_limit:
            _draw_limit_name(root, one, x, y, figure.plot_px)
    if figure.mark:
        _draw_mark(root, figure, x, y)
    return root


def _scale_vertical(figure: CurveChart) -> Scale:
    """Scale the vertical axis, with some room above, and below where it does not begin at zero."""
    areas = _stack_areas(figure.curves)
    values = [value for one in figure.curves if one.look is not Look.AREA for value in one.y]
    values += [value for _, tops in areas for value in tops]
    values += [figure.mark.y] if figure.mark else []
    lowest = min(values) if figure.y.lowest is None else figure.y.lowest
    highest = max(values) if figure.y.highest is None else figure.y.highest
    if figure.y.is_log:
        room = (highest / lowest) ** MARGIN if highest > lowest else 1.1
        return Scale(lowest / room, highest * room, is_log=True)
    room = MARGIN * (highest - lowest)
    return Scale(lowest - (0.0 if figure.y.lowest is not None else room), highest + room)


def _stack_areas(curves: Sequence[Curve]) -> list[tuple[Curve, list[float]]]:
    """Areas, each upon those before it."""
    stacked: list[tuple[Curve, list[float]]] = []
    for one in curves:
        if one.look is Look.AREA:
            below = stacked[-1][1] if stacked else [0.0] * len(one.y)
            stacked.append((one, [low + value for low, value in zip(below, one.y)]))
    return stacked


def _drop(value: float, y: Scale, plot_px: int) -> float:
    """Pixels below the plot's top."""
    return (1 - y.place(value)) * plot_px


def _draw_path(parent: Element, one: Curve, path: str) -> None:
    kind = {Look.AREA: "area", Look.POINTS: "dots"}.get(one.look, "dotted" if one.is_dotted else "line")
    width = {"stroke-width": f"{one.width:g}"} if kind in ("line", "dotted") else {}
    SubElement(parent, "path", {"class": kind, "d": path, **width, **_paint(one.color)})


def _trace_area(across: Sequence[float], tops: Sequence[float], x: Scale, y: Scale, plot_px: int) -> str:
    return f"M{_wide(x, across[0])} {plot_px}" + _trace_stairs(across, tops, x, y, plot_px) + f"V{plot_px}Z"


def _trace_stairs(across: Sequence[float], values: Sequence[float], x: Scale, y: Scale, plot_px: int) -> str:
    """Each value holds until the next one; equal ones need no word."""
    parts, last = [], ""
    for place, value in zip(across, values):
        height = f"{_drop(value, y, plot_px):.1f}"
        if height != last:
            parts.append(f"H{_wide(x, place)}V{height}")
        last = height
    return "".join([*parts, f"H{_wide(x, across[-1])}"])


def _trace_line(one: Curve, x: Scale, y: Scale, plot_px: int) -> str:
    if one.look is Look.STAIRS:
        start = f"M{_wide(x, one.x[0])} {_drop(one.y[0], y, plot_px):.1f}"
        return start + _trace_stairs(one.x, one.y, x, y, plot_px)
    places = [f"{_wide(x, place)} {_drop(value, y, plot_px):.1f}" for place, value in zip(one.x, one.y)]
    return "M" + "L".join(places)


def _trace_points(one: Curve, x: Scale, y: Scale, plot_px: int) -> str:
    """Lines of no length, whose round ends are the points; the same place once."""
    places = [f"M{_wide(x, place)} {_drop(value, y, plot_px):.1f}h0" for place, value in zip(one.x, one.y)]
    return "".join(dict.fromkeys(places))


def _begin_paths(root: Element, plot_px: int) -> Element:
    """An element whose paths are WIDE units across, however wide the plot is, and pixels down."""
    box = {"viewBox": f"0 0 {WIDE} {plot_px}", "preserveAspectRatio": "none"}
    return SubElement(root, "svg", {**box, "width": "100%", "height": f"{plot_px}"})


def _wide(x: Scale, value: float) -> str:
    return _shorten(WIDE * x.place(value))


def _shorten(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _draw_described_points(root: Element, one: Curve, x: Scale, y: Scale, plot_px: int) -> None:
    """Points that say what they are."""
    if not one.texts:
        return
    group = SubElement(root, "g", {"class": "points", **_paint(one.color)})
    for at, text in enumerate(one.texts):
        size = one.sizes[at] if one.sizes else 7.0
        shape = {
            "cx": _percent(x.place(one.x[at])),
            "cy": f"{_drop(one.y[at], y, plot_px):.1f}",
            "r": f"{size / 2:.1f}",
        }
        _say(SubElement(group, "circle", shape), text)


def _draw_strips(root: Element, figure: CurveChart, x: Scale) -> None:
    """Draw invisible strips that a pointer can be at; each shows the values where the curves are highest in it."""
    told = [one for one in figure.curves if not one.texts and not one.is_limit]
    found: dict[int, list[tuple[Curve, int]]] = {}
    for one in told:
        # curves over the same places are told of the same moment, at which they are highest together
        together = [other.y for other in told if other.x is one.x or list(other.x) == list(one.x)]
        heights = [sum(values) for values in zip(*together)]
        best: dict[int, int] = {}
        for at, value in enumerate(one.x):
            strip = min(int(x.place(value) * MAX_STRIPS), MAX_STRIPS - 1)
            if strip not in best or heights[at] > heights[best[strip]]:
                best[strip] = at
        for strip, at in best.items():
            found.setdefault(strip, []).append((one, at))
    group = SubElement(root, "g", {"class": "strips"})
    for strip, members in sorted(found.items()):
        lines = [f"{one.name or figure.y.title}: {_tell(figure, one, at)}" for one, at in members if one.y[at]]
        shape = {"x": f"{strip * 100 // MAX_STRIPS}%", "width": f"{100 // MAX_STRIPS}%", "height": f"{figure.plot_px}"}
        _say(SubElement(group, "rect", shape), *lines)


def _tell(figure: CurveChart, one: Curve, at: int) -> str:
    place = f"{one.x[at]:,}" if isinstance(one.x[at], int) else significant(one.x[at], 4)
    return f"{significant(one.y[at], 4)} at {place}"


def _draw_limit_name(root: Element, one: Curve, x: Scale, y: Scale, plot_px: int) -> None:
    """Write a limit's name at the right end of a level limit, and at the beginning of one that rises."""
    is_level = one.y[0] == one.y[-1]
    at = -1 if is_level else 0
    place = {"x": _percent(x.place(one.x[at])), "y": f"{_drop(one.y[at], y, plot_px) - 6:.1f}"}
    side = {"text-anchor": "end"} if is_level else {}
    SubElement(root, "text", {"class": "name", **place, **side}).text = one.name


def _draw_mark(root: Element, figure: CurveChart, x: Scale, y: Scale) -> None:
    """The text stands on the side that has more room."""
    assert figure.mark is not None
    place, top = x.place(figure.mark.x), _drop(figure.mark.y, y, figure.plot_px)
    SubElement(root, "circle", {"class": "mark", "cx": _percent(place), "cy": f"{top:.1f}", "r": "4"})
    side = {"text-anchor": "end", "dx": "-8"} if place > 0.5 else {"dx": "8"}
    text = SubElement(root, "text", {"class": "name", "x": _percent(place), "y": f"{top - 5:.1f}", **side})
    text.text = figure.mark.text


# --- axes


def _begin(plot_px: int, top_px: int) -> Element:
    """The chart's element; its room above is a margin, so that the plot begins at 0."""
    style = f"margin-top:{top_px}px"
    return Element("svg", {"width": "100%", "height": f"{plot_px + AXIS_PX}", "aria-hidden": "true", "style": style})


def _draw_horizontal_axis(root: Element, scale: Scale, axis: Axis, plot_px: int) -> None:
    group = SubElement(root, "g", {"class": "axis"})
    for number, (value, text) in enumerate(scale.ticks()):
        place = _percent(scale.place(value))
        SubElement(group, "line", {"x1": place, "x2": place, "y1": "0", "y2": f"{plot_px}"})
        # a phone has room for every second one
        kind = {"class": "odd"} if number % 2 else {}
        SubElement(group, "text", {"x": place, "y": f"{plot_px + 18}", **kind}).text = text
    SubElement(group, "text", {"x": "50%", "y": f"{plot_px + 37}", "class": "title"}).text = axis.title


def _draw_vertical_axis(root: Element, scale: Scale, figure: CurveChart) -> None:
    group = SubElement(root, "g", {"class": "axis left"})
    for value, text in scale.ticks():
        height = f"{_drop(value, scale, figure.plot_px):.1f}"
        SubElement(group, "line", {"x1": "0", "x2": "100%", "y1": height, "y2": height})
        SubElement(group, "text", {"x": "-8", "y": height, "dy": ".35em"}).text = text
    SubElement(group, "text", {"x": "0", "y": "-10", "class": "title"}).text = figure.y.title


def _say(element: Element, *lines: str) -> None:
    SubElement(element, "title").text = "\n".join(fit(line, MAX_TEXT) for line in lines)


def _paint(color: str) -> dict[str, str]:
    return {"style": f"color:{color}"}


def _percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"
