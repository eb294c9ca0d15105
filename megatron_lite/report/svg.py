"""Charts as SVG: drawn once, colors by the names of the style sheet, as wide as the window, and no script.

What runs across is in percent and what runs down in pixels, so that texts and points keep their size in any window. An
element's `title` is what a pointer shows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from markupsafe import Markup

from megatron_lite.report.figure import Arrangement, Axis, BarChart, Bars, Curve, CurveChart, Figure, Look, Mark
from megatron_lite.report.text import fit
from megatron_lite.units import significant

MAX_TICKS = 7
MAX_STRIPS = 100  # places at which a pointer is told the curves' values
MAX_DESCRIBED = 1500  # bars of a chart; more are drawn without titles, at a tenth of the bytes
MAX_TITLE_LETTERS = 200  # letters of what a pointer shows
BAR_SHARE = 0.68  # of a row's height
TOP_PX = 24  # above the plot of curves: the vertical axis's title
ROW_TOP_PX = 4  # above the rows of bars
AXIS_PX = 44  # below the plot
POINT_PX = 7.0  # across, of a point whose size says nothing
PLOT_UNITS = 1000  # units of a path across the plot
AXIS_MARGIN = 0.04  # of the range of a vertical axis
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
        magnitude = 10.0 ** math.floor(math.log10(span / MAX_TICKS))
        steps = [magnitude * digit for digit in (1, 2, 5, 10)]
        step = next(step for step in steps if span / step <= MAX_TICKS)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        first = math.ceil(self.lowest / step - 1e-9)
        last = math.floor(self.highest / step + 1e-9)
        values = [number * step for number in range(first, last + 1)]
        return [(value, f"{value:,.{decimals}f}") for value in values]

    def _choose_log_ticks(self) -> list[float]:
        """Choose the more digits of each decade the fewer decades there are; of very many decades every second,
        third, ..."""
        decades = math.log10(self.highest / self.lowest)
        digits = next(digits for most, digits in DIGITS if decades < most)
        every = max(1, math.ceil(decades / (2 * MAX_TICKS)))
        first_power = math.floor(math.log10(self.lowest))
        last_power = math.ceil(math.log10(self.highest))
        ticks = []
        for power in range(first_power, last_power + 1, every):
            ticks += [digit * 10.0**power for digit in digits]
        return [tick for tick in ticks if self.lowest * 0.999 <= tick <= self.highest * 1.001]


def draw(figure: Figure) -> Markup:
    """Draw a chart as an element for a page; a name in it is text and nothing else."""
    root = _draw_bars(figure) if isinstance(figure, BarChart) else _draw_curves(figure)
    # ElementTree has escaped every text and attribute
    return Markup(tostring(root, encoding="unicode"))


def measure_gutter(figure: Figure) -> int:
    """Count the letters that stand to the left of the plot."""
    if isinstance(figure, BarChart):
        return max(map(len, figure.rows))
    ticks = _scale_vertical(figure).ticks()
    return max(len(text) for _, text in ticks)


def place_rows(figure: Figure) -> list[tuple[str, int]]:
    """List the names of the rows of bars, each with the pixel of its middle; [] for curves."""
    if not isinstance(figure, BarChart):
        return []
    first_middle = ROW_TOP_PX + figure.row_px // 2
    return [(row, first_middle + number * figure.row_px) for number, row in enumerate(figure.rows)]


# --- bars


@dataclass(frozen=True)
class PlacedBar:
    """A bar of a series, where it begins and ends on the axis, and its color."""

    number: int
    begin: float
    end: float
    color: str

    def find_sides(self, scale: Scale) -> tuple[float, float]:
        """The left and the right end as shares of the plot's width; a bar of a negative value ends at its left."""
        places = scale.place(self.begin), scale.place(self.end)
        return min(places), max(places)


def _draw_bars(figure: BarChart) -> Element:
    bars = _place_bars(figure)
    scale = _scale_bars(figure, [bar for of_series in bars for bar in of_series])
    plot_px = figure.row_px * len(figure.rows)
    root = _begin(plot_px, ROW_TOP_PX)
    _draw_horizontal_axis(root, scale, figure.axis, plot_px)
    are_many = sum(map(len, bars)) > MAX_DESCRIBED
    if are_many and figure.arrangement is Arrangement.OVERLAID:
        _draw_many_bars(root, figure, bars, scale)
    else:
        for number, of_series in enumerate(bars):
            _draw_series(root, figure, number, of_series, scale)
    if scale.lowest < 0:
        _draw_upright(root, "zero", scale.place(0.0), plot_px)
    if figure.limit is not None:
        _draw_upright(root, "limit", scale.place(figure.limit), plot_px)
    return root


def _place_bars(figure: BarChart) -> list[list[PlacedBar]]:
    """Place the bars of each series on the axis; stacked ones begin where the series before ends in their row."""
    ends: dict[str, float] = {}
    placed = []
    for series in figure.series:
        bars = []
        for number, (row, value) in enumerate(zip(series.rows, series.values)):
            begin = 0.0
            if figure.arrangement is Arrangement.STACKED:
                begin = ends.get(row, 0.0)
                ends[row] = begin + value
            elif series.begins:
                begin = series.begins[number]
            has_own_colors = len(series.colors) > 1
            color = series.colors[number] if has_own_colors else series.colors[0]
            bars.append(PlacedBar(number, begin, begin + value, color))
        placed.append(bars)
    return placed


def _scale_bars(figure: BarChart, bars: Sequence[PlacedBar]) -> Scale:
    """Scale the axis of bars from zero, or the lowest bar, to the highest or the limit; an axis that names its ends
    has these."""
    values = [0.0, figure.limit or 0.0]
    for bar in bars:
        values += [bar.begin, bar.end]
    return _scale_axis(figure.axis, values)


def _scale_axis(axis: Axis, values: Sequence[float]) -> Scale:
    """Scale an axis from the least to the largest of its values, but for the ends that it names itself."""
    lowest = min(values) if axis.lowest is None else axis.lowest
    highest = max(values) if axis.highest is None else axis.highest
    return Scale(lowest, highest, axis.is_log)


def _draw_series(root: Element, figure: BarChart, number: int, bars: Sequence[PlacedBar], scale: Scale) -> None:
    """Draw the bars of a series as rectangles that describe themselves.

    Args:
        root: the chart's element.
        figure: the chart.
        number: the place of the series among the chart's.
        bars: the bars of the series.
        scale: the horizontal axis.
    """
    series = figure.series[number]
    row_numbers = {row: at for at, row in enumerate(figure.rows)}
    height = BAR_SHARE * figure.row_px
    above = (figure.row_px - height) / 2
    if figure.arrangement is Arrangement.BESIDE:
        height /= len(figure.series)
        above += number * height
    usual_color = series.colors[0]
    group = SubElement(root, "g", _paint(usual_color))
    for bar in bars:
        if bar.begin == bar.end:
            continue
        left, right = bar.find_sides(scale)
        top = row_numbers[series.rows[bar.number]] * figure.row_px + above
        shape = {
            "x": _percent(left),
            "y": f"{top:.1f}",
            "width": _percent(right - left),
            "height": f"{height:.1f}",
        }
        if bar.color != usual_color:
            shape |= _paint(bar.color)
        rectangle = SubElement(group, "rect", shape)
        _add_title(rectangle, _describe_bar(figure, series, bar.number))


def _draw_many_bars(root: Element, figure: BarChart, bars: Sequence[Sequence[PlacedBar]], scale: Scale) -> None:
    """Draw each series as one path, whose strokes are as thick as bars. Each has one color.

    Args:
        root: the chart's element.
        figure: the chart.
        bars: the bars of each series.
        scale: the horizontal axis.
    """
    middles = dict(place_rows(figure))
    paths = _begin_paths(root, figure.row_px * len(middles))
    for series, of_series in zip(figure.series, bars):
        strokes = []
        for bar in of_series:
            left, right = bar.find_sides(scale)
            middle = middles[series.rows[bar.number]] - ROW_TOP_PX
            length = _shorten(PLOT_UNITS * (right - left))
            strokes.append(f"M{_shorten(PLOT_UNITS * left)} {middle}h{length}")
        shape = {
            "class": "line",
            "stroke-width": f"{BAR_SHARE * figure.row_px:.1f}",
            "d": "".join(strokes),
        }
        SubElement(paths, "path", {**shape, **_paint(series.colors[0])})


def _draw_upright(root: Element, kind: str, place: float, plot_px: int) -> None:
    """Draw a line across all rows.

    Args:
        root: the chart's element.
        kind: the class of the line.
        place: where it stands, as a share of the plot's width.
        plot_px: the height of the plot.
    """
    across = _percent(place)
    shape = {"class": kind, "x1": across, "x2": across, "y1": "0", "y2": f"{plot_px}"}
    SubElement(root, "line", shape)


def _describe_bar(figure: BarChart, series: Bars, number: int) -> str:
    """Describe a bar: 'rank 3, compute: 12.3 ms', 'forward: 12.3 ms from 40.1'."""
    names = [series.rows[number]]
    if series.name:
        names.append(series.name)
    if series.micro_batches:
        names.append(f"micro-batch {series.micro_batches[number]}")
    begins = ""
    if series.begins:
        begins = f", from {significant(series.begins[number], 4)}"
    # 'ms per step, B - A' and 'ms of a step' are axes of milliseconds
    unit = figure.axis.title.partition(",")[0].partition(" of ")[0]
    return f"{', '.join(names)}: {significant(series.values[number], 4)} {unit}{begins}"


# --- curves


@dataclass(frozen=True)
class Plot:
    """The area that curves are drawn in: the scales of both axes, and the height in pixels."""

    x: Scale
    y: Scale
    height_px: int

    def place_percent(self, x: float) -> str:
        """Write where a value of x stands, in percent of the width."""
        return _percent(self.x.place(x))

    def place_unit(self, x: float) -> str:
        """Write where a value of x stands in a path, in PLOT_UNITS units of the width."""
        return _shorten(PLOT_UNITS * self.x.place(x))

    def measure_drop(self, y: float) -> float:
        """Measure how far a value of y stands below the plot's top, in pixels."""
        return (1 - self.y.place(y)) * self.height_px

    def write_drop(self, y: float) -> str:
        """Write how far a value of y stands below the plot's top, in pixels."""
        return f"{self.measure_drop(y):.1f}"


def _draw_curves(figure: CurveChart) -> Element:
    across = [x for curve in figure.curves for x in curve.x]
    plot = Plot(_scale_axis(figure.x, across), _scale_vertical(figure), figure.plot_px)
    root = _begin(figure.plot_px, TOP_PX)
    _draw_vertical_axis(root, plot, figure.y.title)
    _draw_horizontal_axis(root, plot.x, figure.x, figure.plot_px)
    paths = _begin_paths(root, figure.plot_px)
    # upper areas first: each reaches down to the ground, and the next covers its lower part
    for curve, tops in reversed(_stack_areas(figure.curves)):
        _draw_path(paths, curve, _trace_area(curve.x, tops, plot))
    for curve in figure.curves:
        if curve.look in (Look.LINE, Look.JOINED_POINTS, Look.STAIRS):
            _draw_path(paths, curve, _trace_line(curve, plot))
        elif curve.look is Look.POINTS and not curve.texts:
            _draw_path(paths, curve, _trace_points(curve, plot))
    _draw_strips(root, figure, plot.x)
    for curve in figure.curves:
        _draw_described_points(root, curve, plot)
        if curve.is_limit:
            _draw_limit_name(root, curve, plot)
    if figure.mark:
        _draw_mark(root, figure.mark, plot)
    return root


def _scale_vertical(figure: CurveChart) -> Scale:
    """Scale the vertical axis, with some room above, and below where it does not begin at zero."""
    values: list[float] = []
    for curve in figure.curves:
        if curve.look is not Look.AREA:
            values += curve.y
    for _, tops in _stack_areas(figure.curves):
        values += tops
    if figure.mark:
        values.append(figure.mark.y)
    lowest = min(values) if figure.y.lowest is None else figure.y.lowest
    highest = max(values) if figure.y.highest is None else figure.y.highest
    if figure.y.is_log:
        room = (highest / lowest) ** AXIS_MARGIN if highest > lowest else 1.1
        return Scale(lowest / room, highest * room, is_log=True)
    room = AXIS_MARGIN * (highest - lowest)
    room_below = room if figure.y.lowest is None else 0.0
    return Scale(lowest - room_below, highest + room)


def _stack_areas(curves: Sequence[Curve]) -> list[tuple[Curve, list[float]]]:
    """Stack each area upon those before it: the curves that are areas, each with its upper edge."""
    stacked: list[tuple[Curve, list[float]]] = []
    for curve in curves:
        if curve.look is not Look.AREA:
            continue
        ground = [0.0] * len(curve.y)
        below = stacked[-1][1] if stacked else ground
        tops = [low + value for low, value in zip(below, curve.y)]
        stacked.append((curve, tops))
    return stacked


def _draw_path(parent: Element, curve: Curve, path: str) -> None:
    shape = {"class": _name_path(curve), "d": path}
    if curve.look not in (Look.AREA, Look.POINTS):
        shape["stroke-width"] = f"{curve.width:g}"
    SubElement(parent, "path", shape | _paint(curve.color))


def _name_path(curve: Curve) -> str:
    """Name the class of a curve's path in the style sheet."""
    if curve.look is Look.AREA:
        return "area"
    if curve.look is Look.POINTS:
        return "dots"
    return "dotted" if curve.is_dotted else "line"


def _trace_area(across: Sequence[float], tops: Sequence[float], plot: Plot) -> str:
    start = f"M{plot.place_unit(across[0])} {plot.height_px}"
    return f"{start}{_trace_stairs(across, tops, plot)}V{plot.height_px}Z"


def _trace_stairs(across: Sequence[float], values: Sequence[float], plot: Plot) -> str:
    """Trace values each of which holds until the next one; a value that equals the one before needs no step."""
    steps = []
    last = ""
    for x, value in zip(across, values):
        height = plot.write_drop(value)
        if height != last:
            steps.append(f"H{plot.place_unit(x)}V{height}")
        last = height
    steps.append(f"H{plot.place_unit(across[-1])}")
    return "".join(steps)


def _trace_line(curve: Curve, plot: Plot) -> str:
    if curve.look is Look.STAIRS:
        start = f"M{plot.place_unit(curve.x[0])} {plot.write_drop(curve.y[0])}"
        return start + _trace_stairs(curve.x, curve.y, plot)
    places = [f"{plot.place_unit(x)} {plot.write_drop(y)}" for x, y in zip(curve.x, curve.y)]
    return "M" + "L".join(places)


def _trace_points(curve: Curve, plot: Plot) -> str:
    """Trace lines of no length, whose round ends are the points; the same place once."""
    places = [f"M{plot.place_unit(x)} {plot.write_drop(y)}h0" for x, y in zip(curve.x, curve.y)]
    return "".join(dict.fromkeys(places))


def _begin_paths(root: Element, plot_px: int) -> Element:
    """Add an element whose paths are PLOT_UNITS units across, however wide the plot is, and pixels down."""
    shape = {
        "viewBox": f"0 0 {PLOT_UNITS} {plot_px}",
        "preserveAspectRatio": "none",
        "width": "100%",
        "height": f"{plot_px}",
    }
    return SubElement(root, "svg", shape)


def _shorten(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _draw_described_points(root: Element, curve: Curve, plot: Plot) -> None:
    """Draw the points of a curve whose points have texts, which a pointer shows."""
    if not curve.texts:
        return
    group = SubElement(root, "g", {"class": "points", **_paint(curve.color)})
    for number, text in enumerate(curve.texts):
        diameter = curve.sizes[number] if curve.sizes else POINT_PX
        shape = {
            "cx": plot.place_percent(curve.x[number]),
            "cy": plot.write_drop(curve.y[number]),
            "r": f"{diameter / 2:.1f}",
        }
        _add_title(SubElement(group, "circle", shape), text)


def _draw_strips(root: Element, figure: CurveChart, x: Scale) -> None:
    """Draw invisible strips that a pointer can be at; each shows the values where the curves are highest in it."""
    shown = [curve for curve in figure.curves if not curve.texts and not curve.is_limit]
    points_by_strip: dict[int, list[tuple[Curve, int]]] = {}
    for curve in shown:
        # curves over the same places are told of the same moment, at which they are highest together
        together = [other for other in shown if other.x is curve.x or list(other.x) == list(curve.x)]
        for strip, number in _find_highest_by_strip(curve, together, x).items():
            points_by_strip.setdefault(strip, []).append((curve, number))
    group = SubElement(root, "g", {"class": "strips"})
    for strip, points in sorted(points_by_strip.items()):
        lines = [_describe_point(figure, curve, number) for curve, number in points if curve.y[number]]
        shape = {
            "x": f"{strip * 100 // MAX_STRIPS}%",
            "width": f"{100 // MAX_STRIPS}%",
            "height": f"{figure.plot_px}",
        }
        _add_title(SubElement(group, "rect", shape), *lines)


def _find_highest_by_strip(curve: Curve, together: Sequence[Curve], x: Scale) -> dict[int, int]:
    """Find the point of each strip at which curves are highest together.

    Args:
        curve: the curve whose points are looked at.
        together: all curves over the same values of x, this one among them.
        x: the horizontal axis.

    Returns:
        The number of the point, by number of the strip; strips without a point are not named.
    """
    heights = [sum(values) for values in zip(*(other.y for other in together))]
    highest: dict[int, int] = {}
    for number, value in enumerate(curve.x):
        strip = min(int(x.place(value) * MAX_STRIPS), MAX_STRIPS - 1)
        best = highest.get(strip)
        if best is None or heights[number] > heights[best]:
            highest[strip] = number
    return highest


def _describe_point(figure: CurveChart, curve: Curve, number: int) -> str:
    """Describe a point of a curve: 'forward: 12.3 at 40'."""
    x = curve.x[number]
    place = f"{x:,}" if isinstance(x, int) else significant(x, 4)
    name = curve.name or figure.y.title
    return f"{name}: {significant(curve.y[number], 4)} at {place}"


def _draw_limit_name(root: Element, curve: Curve, plot: Plot) -> None:
    """Write a limit's name at the right end of a level limit, and at the beginning of one that rises."""
    is_level = curve.y[0] == curve.y[-1]
    number = -1 if is_level else 0
    top_px = plot.measure_drop(curve.y[number]) - 6
    shape = {"class": "name", "x": plot.place_percent(curve.x[number]), "y": f"{top_px:.1f}"}
    if is_level:
        shape["text-anchor"] = "end"
    SubElement(root, "text", shape).text = curve.name


def _draw_mark(root: Element, mark: Mark, plot: Plot) -> None:
    """Draw a point with its text, which stands on the side that has more room."""
    across = plot.place_percent(mark.x)
    top_px = plot.measure_drop(mark.y)
    SubElement(root, "circle", {"class": "mark", "cx": across, "cy": f"{top_px:.1f}", "r": "4"})
    shape = {"class": "name", "x": across, "y": f"{top_px - 5:.1f}"}
    if plot.x.place(mark.x) > 0.5:
        shape |= {"text-anchor": "end", "dx": "-8"}
    else:
        shape["dx"] = "8"
    SubElement(root, "text", shape).text = mark.text


# --- axes


def _begin(plot_px: int, top_px: int) -> Element:
    """Make the chart's element; its room above is a margin, so that the plot begins at 0."""
    shape = {
        "width": "100%",
        "height": f"{plot_px + AXIS_PX}",
        "aria-hidden": "true",
        "style": f"margin-top:{top_px}px",
    }
    return Element("svg", shape)


def _draw_horizontal_axis(root: Element, scale: Scale, axis: Axis, plot_px: int) -> None:
    """Draw the ticks and the title below the plot.

    Args:
        root: the chart's element.
        scale: places of the axis' values.
        axis: the title.
        plot_px: the height of the plot.
    """
    group = SubElement(root, "g", {"class": "axis"})
    for number, (value, text) in enumerate(scale.ticks()):
        place = _percent(scale.place(value))
        SubElement(group, "line", {"x1": place, "x2": place, "y1": "0", "y2": f"{plot_px}"})
        shape = {"x": place, "y": f"{plot_px + 18}"}
        if number % 2:
            # a phone has room for every second one
            shape["class"] = "odd"
        SubElement(group, "text", shape).text = text
    title = SubElement(group, "text", {"x": "50%", "y": f"{plot_px + 37}", "class": "title"})
    title.text = axis.title


def _draw_vertical_axis(root: Element, plot: Plot, title: str) -> None:
    """Draw the ticks at the left of the plot, and the title above them."""
    group = SubElement(root, "g", {"class": "axis left"})
    for value, text in plot.y.ticks():
        height = plot.write_drop(value)
        SubElement(group, "line", {"x1": "0", "x2": "100%", "y1": height, "y2": height})
        SubElement(group, "text", {"x": "-8", "y": height, "dy": ".35em"}).text = text
    SubElement(group, "text", {"x": "0", "y": "-10", "class": "title"}).text = title


def _add_title(element: Element, *lines: str) -> None:
    """Add what a pointer shows, a line each."""
    SubElement(element, "title").text = "\n".join(fit(line, MAX_TITLE_LETTERS) for line in lines)


def _paint(color: str) -> dict[str, str]:
    return {"style": f"color:{color}"}


def _percent(share: float) -> str:
    digits = f"{100 * share:.2f}".rstrip("0").rstrip(".")
    return f"{digits}%"
