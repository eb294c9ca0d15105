"""Charts as SVG: drawn once, colors by the names of the style sheet, as wide as the window, and no script.

What runs across is in percent and what runs down in pixels, so that texts and points keep their size in any window. An
element's `title` is what a pointer shows.
"""

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
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
ROUNDING = 1e-9  # of a tick's distance: by less a value and a tick may differ and still be the same
# below so many decades: digits with a tick
DIGITS = (
    (1.2, (1, 1.5, 2, 3, 4, 5, 6, 8)),
    (4.0, (1, 2, 5)),
    (math.inf, (1,)),
)


class Scale:
    """Places of values between two ends, 0 to 1."""

    def __init__(self, lowest: float, highest: float, is_log: bool = False):
        self.is_log = is_log
        self.lowest = lowest
        self.highest = highest if highest > lowest else lowest + (abs(lowest) or 1.0)

    def place(self, value: float) -> float:
        """Compute where a value stands: 0 at the lowest, 1 at the highest."""
        if self.is_log:
            from_lowest = math.log(value / self.lowest)
            return from_lowest / math.log(self.highest / self.lowest)
        return (value - self.lowest) / (self.highest - self.lowest)

    def list_ticks(self) -> list[tuple[float, str]]:
        """List round values between the ends, each with how it is written."""
        return self._list_log_ticks() if self.is_log else self._list_even_ticks()

    def _list_even_ticks(self) -> list[tuple[float, str]]:
        """List the multiples of a round number, all with the decimals of that number."""
        step = self._choose_step()
        decimals = max(0, -math.floor(math.log10(step) + ROUNDING))
        first = math.ceil(self.lowest / step - ROUNDING)
        last = math.floor(self.highest / step + ROUNDING)
        ticks = []
        for number in range(first, last + 1):
            value = number * step
            ticks.append((value, f"{value:,.{decimals}f}"))
        return ticks

    def _choose_step(self) -> float:
        """Choose the distance of two ticks: the least round number with which there are at most MAX_TICKS."""
        span = self.highest - self.lowest
        magnitude = 10.0 ** math.floor(math.log10(span / MAX_TICKS))
        for digit in (1, 2, 5):
            step = magnitude * digit
            if span / step <= MAX_TICKS:
                return step
        return magnitude * 10

    def _list_log_ticks(self) -> list[tuple[float, str]]:
        """List round numbers: the more of each decade the fewer decades there are; of very many decades every second,
        third, ..."""
        decades = math.log10(self.highest / self.lowest)
        digits = next(digits for most, digits in DIGITS if decades < most)
        every = max(1, math.ceil(decades / (2 * MAX_TICKS)))
        first_power = math.floor(math.log10(self.lowest))
        last_power = math.ceil(math.log10(self.highest))
        ticks = []
        for power in range(first_power, last_power + 1, every):
            decade = 10.0**power
            for digit in digits:
                value = digit * decade
                if self.lowest * 0.999 <= value <= self.highest * 1.001:
                    written = significant(value, 1 if value < 1000 else 2)
                    ticks.append((value, written))
        return ticks


def draw(figure: Figure) -> Markup:
    """Draw a chart as an element for a page; a name in it is text and nothing else."""
    root = _draw_bars(figure) if isinstance(figure, BarChart) else _draw_curves(figure)
    # ElementTree has escaped every text and attribute
    return Markup(tostring(root, encoding="unicode"))


def measure_gutter(figure: Figure) -> int:
    """Count the letters that stand to the left of the plot."""
    if isinstance(figure, BarChart):
        return max(map(len, figure.rows))
    ticks = _scale_vertical(figure).list_ticks()
    return max(len(text) for _, text in ticks)


def place_rows(figure: Figure) -> list[tuple[str, int]]:
    """List the names of the rows of bars, each with the pixel of its middle; [] for curves."""
    if not isinstance(figure, BarChart):
        return []
    middle_px = ROW_TOP_PX + figure.row_px // 2
    placed = []
    for row in figure.rows:
        placed.append((row, middle_px))
        middle_px += figure.row_px
    return placed


# --- bars


@dataclass(frozen=True)
class PlacedBar:
    """A bar of a series, where it begins and ends on the axis, and its color."""

    number: int
    begin: float
    end: float
    color: str

    def find_sides(self, scale: Scale) -> tuple[float, float]:
        """Compute the left and the right side as shares of the plot's width; a negative value ends at its left."""
        sides = scale.place(self.begin), scale.place(self.end)
        return min(sides), max(sides)


def _draw_bars(figure: BarChart) -> Element:
    bars_of_series = _place_bars(figure)
    bars = list(chain.from_iterable(bars_of_series))
    scale = _scale_bars(figure, bars)
    plot_px = figure.row_px * len(figure.rows)
    root = _begin(plot_px, ROW_TOP_PX)
    _draw_horizontal_axis(root, scale, figure.axis, plot_px)
    are_many = len(bars) > MAX_DESCRIBED
    if are_many and figure.arrangement is Arrangement.OVERLAID:
        _draw_many_bars(root, figure, bars_of_series, scale)
    else:
        for number, of_series in enumerate(bars_of_series):
            _draw_series(root, figure, number, of_series, scale)
    if scale.lowest < 0:
        _draw_upright(root, "zero", scale.place(0.0), plot_px)
    if figure.limit is not None:
        _draw_upright(root, "limit", scale.place(figure.limit), plot_px)
    return root


def _place_bars(figure: BarChart) -> list[list[PlacedBar]]:
    """Place the bars of each series on the axis; stacked ones begin where the series before ends in their row."""
    ends: dict[str, float] = {}
    is_stacked = figure.arrangement is Arrangement.STACKED
    placed = []
    for series in figure.series:
        bars = []
        has_own_colors = len(series.colors) > 1
        for number, row in enumerate(series.rows):
            begin = 0.0
            if is_stacked:
                begin = ends.get(row, 0.0)
            elif series.begins:
                begin = series.begins[number]
            end = begin + series.values[number]
            color = series.colors[number if has_own_colors else 0]
            bars.append(PlacedBar(number, begin, end, color))
            ends[row] = end
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
        row = series.rows[bar.number]
        top = row_numbers[row] * figure.row_px + above
        left, right = bar.find_sides(scale)
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
            row = series.rows[bar.number]
            middle = middles[row] - ROW_TOP_PX
            left, right = bar.find_sides(scale)
            begin = _write_units(left)
            length = _write_units(right - left)
            strokes.append(f"M{begin} {middle}h{length}")
        shape = {
            "class": "line",
            "stroke-width": f"{BAR_SHARE * figure.row_px:.1f}",
            "d": "".join(strokes),
            **_paint(series.colors[0]),
        }
        SubElement(paths, "path", shape)


def _draw_upright(root: Element, kind: str, place: float, plot_px: int) -> None:
    """Draw a line across all rows.

    Args:
        root: the chart's element.
        kind: the class of the line.
        place: where it stands, as a share of the plot's width.
        plot_px: the height of the plot.
    """
    across = _percent(place)
    shape = {
        "class": kind,
        "x1": across,
        "x2": across,
        "y1": "0",
        "y2": f"{plot_px}",
    }
    SubElement(root, "line", shape)


def _describe_bar(figure: BarChart, series: Bars, number: int) -> str:
    """Describe a bar: 'rank 3, compute: 12.3 ms', 'forward: 12.3 ms from 40.1'."""
    names = [series.rows[number]]
    if series.name:
        names.append(series.name)
    if series.micro_batches:
        names.append(f"micro-batch {series.micro_batches[number]}")
    value = significant(series.values[number], 4)
    # 'ms per step, B - A' and 'ms of a step' are axes of milliseconds
    quantity, _, _ = figure.axis.title.partition(",")
    unit, _, _ = quantity.partition(" of ")
    text = f"{', '.join(names)}: {value} {unit}"
    if series.begins:
        begin = significant(series.begins[number], 4)
        text += f", from {begin}"
    return text


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
        return _write_units(self.x.place(x))

    def measure_drop(self, y: float) -> float:
        """Measure how far a value of y stands below the plot's top, in pixels."""
        return (1 - self.y.place(y)) * self.height_px

    def write_drop(self, y: float) -> str:
        """Write how far a value of y stands below the plot's top, in pixels."""
        return f"{self.measure_drop(y):.1f}"


def _draw_curves(figure: CurveChart) -> Element:
    places = [curve.x for curve in figure.curves]
    x = _scale_axis(figure.x, list(chain.from_iterable(places)))
    plot = Plot(x, _scale_vertical(figure), figure.plot_px)
    root = _begin(plot.height_px, TOP_PX)
    _draw_vertical_axis(root, plot, figure.y.title)
    _draw_horizontal_axis(root, plot.x, figure.x, plot.height_px)
    _draw_paths(root, figure, plot)
    _draw_strips(root, figure, plot.x)
    for curve in figure.curves:
        _draw_described_points(root, curve, plot)
        if curve.is_limit:
            _draw_limit_name(root, curve, plot)
    if figure.mark:
        _draw_mark(root, figure.mark, plot)
    return root


def _draw_paths(root: Element, figure: CurveChart, plot: Plot) -> None:
    """Draw areas, lines, and points without a text of their own."""
    paths = _begin_paths(root, plot.height_px)
    # upper areas first: each reaches down to the ground, and the next covers its lower part
    for curve, tops in reversed(_stack_areas(figure.curves)):
        area = _trace_area(curve.x, tops, plot)
        _draw_path(paths, curve, area)
    for curve in figure.curves:
        if curve.look in (Look.LINE, Look.JOINED_POINTS, Look.STAIRS):
            line = _trace_line(curve, plot)
            _draw_path(paths, curve, line)
        elif curve.look is Look.POINTS and not curve.texts:
            points = _trace_points(curve, plot)
            _draw_path(paths, curve, points)


def _scale_vertical(figure: CurveChart) -> Scale:
    """Scale the vertical axis, with some room above, and below where it does not begin at zero."""
    axis = figure.y
    heights = _list_heights(figure)
    lowest = min(heights) if axis.lowest is None else axis.lowest
    highest = max(heights) if axis.highest is None else axis.highest
    if axis.is_log:
        # a logarithmic axis has its room as a factor
        room = (highest / lowest) ** AXIS_MARGIN if highest > lowest else 1.1
        return Scale(lowest / room, highest * room, is_log=True)
    room = AXIS_MARGIN * (highest - lowest)
    room_below = room if axis.lowest is None else 0.0
    return Scale(lowest - room_below, highest + room)


def _list_heights(figure: CurveChart) -> list[float]:
    """List the values at which something is drawn: of curves, of the upper edges of areas, and of the mark."""
    heights: list[float] = []
    for curve in figure.curves:
        if curve.look is not Look.AREA:
            heights += curve.y
    for _, tops in _stack_areas(figure.curves):
        heights += tops
    if figure.mark:
        heights.append(figure.mark.y)
    return heights


def _stack_areas(curves: Sequence[Curve]) -> list[tuple[Curve, list[float]]]:
    """Stack each area upon those before it: the curves that are areas, each with its upper edge."""
    stacked: list[tuple[Curve, list[float]]] = []
    below: list[float] = []
    for curve in curves:
        if curve.look is not Look.AREA:
            continue
        tops = list(map(operator.add, below, curve.y)) if stacked else list(curve.y)
        stacked.append((curve, tops))
        below = tops
    return stacked


def _draw_path(parent: Element, curve: Curve, path: str) -> None:
    shape = {"class": _name_path(curve), "d": path}
    if curve.look not in (Look.AREA, Look.POINTS):
        shape["stroke-width"] = f"{curve.width:g}"
    shape |= _paint(curve.color)
    SubElement(parent, "path", shape)


def _name_path(curve: Curve) -> str:
    """Name the class of a curve's path in the style sheet."""
    if curve.look is Look.AREA:
        return "area"
    if curve.look is Look.POINTS:
        return "dots"
    return "dotted" if curve.is_dotted else "line"


def _trace_area(across: Sequence[float], tops: Sequence[float], plot: Plot) -> str:
    """Trace the outline of an area: its upper edge, and back along the ground."""
    left = plot.place_unit(across[0])
    ground = plot.height_px
    edge = _trace_stairs(across, tops, plot)
    return f"M{left} {ground}{edge}V{ground}Z"


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
    """Trace a line from point to point, or stairs from the first point on."""
    if curve.look is Look.STAIRS:
        [start] = _list_places(curve.x[:1], curve.y[:1], plot)
        return f"M{start}{_trace_stairs(curve.x, curve.y, plot)}"
    places = _list_places(curve.x, curve.y, plot)
    return "M" + "L".join(places)


def _trace_points(curve: Curve, plot: Plot) -> str:
    """Trace lines of no length, whose round ends are the points; the same place once."""
    places = _list_places(curve.x, curve.y, plot)
    return "".join(f"M{place}h0" for place in dict.fromkeys(places))


def _list_places(across: Sequence[float], values: Sequence[float], plot: Plot) -> list[str]:
    """Write points as a path names them: '500 12.3' is in the middle, 12.3 pixels below the top."""
    places = []
    for x, y in zip(across, values):
        left = plot.place_unit(x)
        drop = plot.write_drop(y)
        places.append(f"{left} {drop}")
    return places


def _begin_paths(root: Element, plot_px: int) -> Element:
    """Add an element whose paths are PLOT_UNITS units across, however wide the plot is, and pixels down."""
    shape = {
        "viewBox": f"0 0 {PLOT_UNITS} {plot_px}",
        "preserveAspectRatio": "none",
        "width": "100%",
        "height": f"{plot_px}",
    }
    return SubElement(root, "svg", shape)


def _write_units(share: float) -> str:
    """Write a share of the plot's width in the units of a path, of which the whole width has PLOT_UNITS."""
    units = f"{PLOT_UNITS * share:.1f}"
    return units.removesuffix(".0")


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
        point = SubElement(group, "circle", shape)
        _add_title(point, text)


def _draw_strips(root: Element, figure: CurveChart, x: Scale) -> None:
    """Draw invisible strips that a pointer can be at; each shows the values where the curves are highest in it."""
    group = SubElement(root, "g", {"class": "strips"})
    for strip, points in _choose_points_by_strip(figure, x).items():
        lines = []
        for curve, number in points:
            if curve.y[number]:
                lines.append(_describe_point(figure, curve, number))
        shape = {
            "x": f"{strip * 100 // MAX_STRIPS}%",
            "width": f"{100 // MAX_STRIPS}%",
            "height": f"{figure.plot_px}",
        }
        rectangle = SubElement(group, "rect", shape)
        _add_title(rectangle, *lines)


def _choose_points_by_strip(figure: CurveChart, x: Scale) -> dict[int, list[tuple[Curve, int]]]:
    """Choose a point of each curve for each strip, as (curve, the point's number), by the strip's number in its order;
    points with texts describe themselves, and limits have no points."""
    shown = [curve for curve in figure.curves if not curve.texts and not curve.is_limit]
    points_by_strip: dict[int, list[tuple[Curve, int]]] = defaultdict(list)
    for curve in shown:
        # curves over the same places are told of the same moment, at which they are highest together
        together = [other for other in shown if _has_same_places(other, curve)]
        for strip, number in _find_highest_by_strip(curve, together, x).items():
            points_by_strip[strip].append((curve, number))
    return dict(sorted(points_by_strip.items()))


def _has_same_places(one: Curve, other: Curve) -> bool:
    return one.x is other.x or list(one.x) == list(other.x)


def _find_highest_by_strip(curve: Curve, together: Sequence[Curve], x: Scale) -> dict[int, int]:
    """Find the point of each strip at which curves are highest together.

    Args:
        curve: the curve whose points are looked at.
        together: all curves over the same values of x, this one among them.
        x: the horizontal axis.

    Returns:
        The number of the point, by number of the strip; strips without a point are not named.
    """
    values = zip(*(other.y for other in together))
    heights = list(map(sum, values))
    highest: dict[int, int] = {}
    for number, place in enumerate(curve.x):
        strip = int(x.place(place) * MAX_STRIPS)
        # the right end belongs to the last strip
        strip = min(strip, MAX_STRIPS - 1)
        best = highest.setdefault(strip, number)
        if heights[number] > heights[best]:
            highest[strip] = number
    return highest


def _describe_point(figure: CurveChart, curve: Curve, number: int) -> str:
    """Describe a point of a curve: 'forward: 12.3 at 40'."""
    x = curve.x[number]
    place = f"{x:,}" if isinstance(x, int) else significant(x, 4)
    name = curve.name or figure.y.title
    value = significant(curve.y[number], 4)
    return f"{name}: {value} at {place}"


def _draw_limit_name(root: Element, curve: Curve, plot: Plot) -> None:
    """Write a limit's name at the right end of a level limit, and at the beginning of one that rises."""
    is_level = curve.y[0] == curve.y[-1]
    number = -1 if is_level else 0
    top_px = plot.measure_drop(curve.y[number]) - 6
    shape = {
        "class": "name",
        "x": plot.place_percent(curve.x[number]),
        "y": f"{top_px:.1f}",
    }
    if is_level:
        shape["text-anchor"] = "end"
    _add_text(root, curve.name, shape)


def _draw_mark(root: Element, mark: Mark, plot: Plot) -> None:
    """Draw a point with its text, which stands on the side that has more room."""
    across = plot.place_percent(mark.x)
    top_px = plot.measure_drop(mark.y)
    circle = {
        "class": "mark",
        "cx": across,
        "cy": f"{top_px:.1f}",
        "r": "4",
    }
    SubElement(root, "circle", circle)
    beside = {
        "class": "name",
        "x": across,
        "y": f"{top_px - 5:.1f}",
    }
    if plot.x.place(mark.x) > 0.5:
        beside |= {"text-anchor": "end", "dx": "-8"}
    else:
        beside["dx"] = "8"
    _add_text(root, mark.text, beside)


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
    for number, (value, text) in enumerate(scale.list_ticks()):
        across = _percent(scale.place(value))
        SubElement(group, "line", x1=across, x2=across, y1="0", y2=f"{plot_px}")
        shape = {"x": across, "y": f"{plot_px + 18}"}
        if number % 2:
            # a phone has room for every second one
            shape["class"] = "odd"
        _add_text(group, text, shape)
    shape = {"x": "50%", "y": f"{plot_px + 37}", "class": "title"}
    _add_text(group, axis.title, shape)


def _draw_vertical_axis(root: Element, plot: Plot, title: str) -> None:
    """Draw the ticks at the left of the plot, and the title above them."""
    group = SubElement(root, "g", {"class": "axis left"})
    for value, text in plot.y.list_ticks():
        height = plot.write_drop(value)
        SubElement(group, "line", x1="0", x2="100%", y1=height, y2=height)
        _add_text(group, text, {"x": "-8", "y": height, "dy": ".35em"})
    _add_text(group, title, {"x": "0", "y": "-10", "class": "title"})


def _add_text(parent: Element, text: str, shape: dict[str, str]) -> None:
    SubElement(parent, "text", shape).text = text


def _add_title(element: Element, *lines: str) -> None:
    """Add what a pointer shows, a line each."""
    title = SubElement(element, "title")
    title.text = "\n".join(fit(line, MAX_TITLE_LETTERS) for line in lines)


def _paint(color: str) -> dict[str, str]:
    return {"style": f"color:{color}"}


def _percent(share: float) -> str:
    digits = f"{100 * share:.2f}".rstrip("0").rstrip(".")
    return f"{digits}%"
