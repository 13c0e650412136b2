"""Line charts, as drawings on pages and as files: lines over numbers, with a level to compare with.

Each line has its colour and marks, and maybe a band. Axes say where numbers lie and which of them are written. Files
are drawn with matplotlib in the colours and marks of the pages.
"""

import contextlib
import dataclasses
import html
import importlib.util
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from calm_beam.errors import UsageError
from calm_beam.exits.measures import COMPARABLE
from calm_beam.extras import how_to_install
from calm_beam.storage import replacing

from .document import SERIES, isolated, signed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """Where a drawing lies, in pixels, and what of; numbers grow to the right and upwards.

    Attributes:
      left: Where the numbers to the right begin.
      right: Where they end.
      top: Where the numbers upwards end.
      bottom: Where they begin.
      x_ends: The numbers at the left and at the right; of a logarithmic axis, their logarithms to base 10.
      y_ends: The numbers at the bottom and at the top.
      is_log: Whether equal steps to the right are equal factors.
    """

    left: float
    right: float
    top: float
    bottom: float
    x_ends: tuple[float, float]
    y_ends: tuple[float, float]
    is_log: bool = False

    def x(self, value: float) -> float:
        """Returns where a number lies between left and right."""
        low, high = self.x_ends
        place = math.log10(value) if self.is_log else value
        return self.left + (place - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Returns where a number lies between bottom and top."""
        low, high = self.y_ends
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def x_ticks(self) -> list[float]:
        """Returns the numbers that are written below."""
        low, high = self.x_ends
        if not self.is_log:
            return round_numbers(low, high)
        factors = (1, 2, 5) if high - low < 2 else (1,)
        powers = range(math.floor(low), math.ceil(high) + 1)
        ticks = [float(factor) * 10.0**power for power in powers for factor in factors]
        return [tick for tick in ticks if low - 1e-9 <= math.log10(tick) <= high + 1e-9]


def round_numbers(low: float, high: float) -> list[float]:
    """Returns up to six multiples of 1, 2 or 5 times a power of ten between two numbers, 0 among them."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [float(f"{index * step:.6g}") for index in range(first, last + 1)]


def grid_lines(frame: Frame, values: Sequence[float], *, written: Callable[[float], str]) -> list[str]:
    """Returns a line across the frame for each number, as SVG, with the number written at its left."""
    parts = []
    for value in values:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{written(value)}</text>'
        )
    return parts


def level_line(frame: Frame, value: float, *, name: str, is_at_end: bool) -> list[str]:
    """Returns a line across the frame to compare with, as SVG, and its name above one of its ends."""
    y = frame.y(value)
    place = f'x="{frame.right}" text-anchor="end"' if is_at_end else f'x="{frame.left + 6}"'
    return [
        f'<line class="delta" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text class="delta-name" {place} y="{y - 6:.1f}">{html.escape(name)}</text>',
    ]


def points_text(points: Sequence[tuple[float, float]]) -> str:
    """Returns pixels as SVG writes the points of a line."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


# As wide as a phone has room for: its texts are then as large as others.
_WIDTH, _HEIGHT = 340, 240
_TOP, _BOTTOM, _RIGHT = 16, 46, 14
# Width of a digit, at the size of ticks.
_DIGIT = 7
_MOST_MARKS = 60
# Around (0, 0), by the place of a line among others.
_SHAPES = (
    '<circle class="dot" r="3.5" {at}/>',
    '<path class="dot" d="M-3.2-3.2h6.4v6.4h-6.4z" {at}/>',
    '<path class="dot" d="M0-4.4l4.2 7.4h-8.4z" {at}/>',
    '<path class="dot" d="M0-4.6l4.6 4.6-4.6 4.6-4.6-4.6z" {at}/>',
    '<path class="dot" d="M0 4.4l4.2-7.4h-8.4z" {at}/>',
    '<path class="dot" d="M-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z" {at}/>',
)
REFERENCE, FULL = len(SERIES) - 2, len(SERIES) - 1
"""Styles of what others are compared with: a baseline, and a single point."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """Some points.

    Attributes:
      name: What they are: a text of others.
      points: Where they lie, at least one; drawn in this order.
      ends: Where the band, or the whiskers, of each begin and end; None for none.
      style: Place of the colour and of the mark, from 0.
      has_band: Whether ends are those of a band; otherwise of whiskers.
      is_dashed: Whether the line is.
      words: Text shown for each point on hover; its numbers if omitted.
    """

    name: str
    points: Sequence[tuple[float, float]]
    ends: Sequence[tuple[float, float]] | None = None
    style: int
    has_band: bool = False
    is_dashed: bool = False
    words: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineChart:
    """The contents of a drawing.

    Attributes:
      title: In a few words.
      x_name: What goes to the right.
      y_name: What goes up.
      lines: At least one.
      level: A value to compare with, and its name; None for none.
      has_diagonal: Whether the line where both are equal is drawn, as for a risk over its tolerance.
      is_log: Whether equal steps to the right are equal factors.
      y_ends: Where what goes up begins and ends; what is beyond them is cut off. None takes it from the points.
      caption: Further text below the drawing on a page; empty for none.
    """

    title: str
    x_name: str
    y_name: str
    lines: Sequence[Line]
    level: tuple[float, str] | None = None
    has_diagonal: bool = False
    is_log: bool = False
    y_ends: tuple[float | None, float | None] = (None, None)
    caption: str = ""

    def svg(self) -> str:
        """Returns the drawing."""
        frame = self._frame()
        # Clipping at the ends leaves room for whole marks.
        left, top, width = frame.left - 6, frame.top - 6, frame.right - frame.left + 12
        height = frame.bottom - frame.top + 12
        parts = [
            *self._axes(frame),
            f'<svg x="{left}" y="{top}" width="{width}" height="{height}" viewBox="{left} {top} {width} {height}">',
            *(self._diagonal(frame) if self.has_diagonal else []),
            *(part for line in self.lines for part in _drawn(line, frame)),
            "</svg>",
            *self._level(frame),
        ]
        names = ", ".join(isolated(line.name) for line in self.lines)
        label = html.escape(f"{isolated(self.title)}: {self.y_name} over {self.x_name}, of {names}")
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
            f'aria-label="{label}">{"".join(parts)}</svg>'
        )

    def figure(self) -> str:
        """Returns the drawing below its title, what goes up and the caption, as HTML."""
        words = html.escape(f"{self.y_name}; {self.caption}" if self.caption else self.y_name)
        return (
            f'<figure class="panel"><figcaption><strong>{html.escape(isolated(self.title))}</strong> '
            f"<span>{words}</span></figcaption>{self.svg()}</figure>"
        )

    def _frame(self) -> Frame:
        xs = [x for line in self.lines for x, _ in line.points]
        ys = [y for line in self.lines for _, y in line.points]
        if self.level is not None:
            ys.append(self.level[0])
        ends = [each for line in self.lines for pair in line.ends or () for each in pair]
        low, high = min([*ys, *ends]), max([*ys, *ends])
        if self.has_diagonal:
            low, high = min(low, 0.0), max(high, *xs)
        room = 0.06 * ((high - low) or abs(high) or 1.0)
        begin, end = self.y_ends
        low = low - room if begin is None else begin
        high = high + room if end is None else end
        ticks = round_numbers(low, high)
        longest = max((len(_short(tick)) for tick in ticks), default=1)
        left, right = min(xs), max(xs)
        if self.has_diagonal:
            left = min(left, 0.0)
        if self.is_log:
            left, right = math.log10(left), math.log10(right)
        if left == right:
            left, right = left - 0.5, right + 0.5
        return Frame(
            left=18 + _DIGIT * longest,
            right=_WIDTH - _RIGHT,
            top=_TOP,
            bottom=_HEIGHT - _BOTTOM,
            x_ends=(left, right),
            y_ends=(low, high),
            is_log=self.is_log,
        )

    def _axes(self, frame: Frame) -> list[str]:
        parts = grid_lines(frame, round_numbers(*frame.y_ends), written=_short)
        parts.append(
            f'<line class="axis" x1="{frame.left}" x2="{frame.right}" y1="{frame.bottom}" y2="{frame.bottom}"/>'
        )
        last = -math.inf
        for tick in frame.x_ticks():
            x, text = frame.x(tick), _short(tick)
            if x - _DIGIT * len(text) / 2 < last + 6:
                continue
            last = x + _DIGIT * len(text) / 2
            parts.append(f'<text class="tick" x="{x:.1f}" y="{frame.bottom + 18}" text-anchor="middle">{text}</text>')
        parts.append(
            f'<text class="axis-name" x="{frame.right}" y="{frame.bottom + 38}" text-anchor="end">'
            f"{html.escape(self.x_name)} →</text>"
        )
        return parts

    def _diagonal(self, frame: Frame) -> list[str]:
        (low, high), (_, top) = frame.x_ends, frame.y_ends
        end = min(high, top)
        return [
            f'<line class="delta" x1="{frame.x(low):.1f}" y1="{frame.y(low):.1f}" x2="{frame.x(end):.1f}" '
            f'y2="{frame.y(end):.1f}"/>'
        ]

    def _level(self, frame: Frame) -> list[str]:
        if self.level is None:
            return []
        value, name = self.level
        return level_line(frame, value, name=name, is_at_end=self._is_free_at_the_end(value))

    def _is_free_at_the_end(self, value: float) -> bool:
        """Returns whether lines are farther from a level at the right end than at the left one."""
        points = [sorted(line.points) for line in self.lines]
        first = min(abs(line[0][1] - value) for line in points)
        last = min(abs(line[-1][1] - value) for line in points)
        return last > first


def measure_line(
    name: str,
    points: Sequence[tuple[float, float]],
    *,
    place: int = 0,
    spreads: Sequence[float | None] | None = None,
    has_band: bool = False,
    words: Sequence[str] | None = None,
) -> Line:
    """Returns what is drawn of a measure.

    Args:
      name: A confidence measure, or another name that needs a colour too.
      points: Where it lies.
      place: Of that other name among its like, from 0.
      spreads: How much lower or higher each may be; None for none.
      has_band: Whether spreads are drawn as a band; otherwise as whiskers.
      words: Text shown for each point on hover; its numbers if omitted.
    """
    style = {"static": REFERENCE, "oracle": FULL}.get(name)
    if style is None:
        own = COMPARABLE.index(name) if name in COMPARABLE else len(COMPARABLE) + place
        style = own % REFERENCE
    return Line(
        name=f"{name} layers" if name == "static" else name,
        points=points,
        ends=None if spreads is None else around([y for _, y in points], spreads),
        style=style,
        has_band=has_band,
        is_dashed=name == "static",
        words=words,
    )


def plots(charts: Sequence[LineChart]) -> str:
    """Returns charts side by side, with one legend below them, as HTML."""
    drawn = "".join(chart.figure() for chart in charts)
    return f'<div class="plots">{drawn}</div>{legend([line for chart in charts for line in chart.lines])}'


def legend(lines: Sequence[Line]) -> str:
    """Returns the legend of lines, as HTML; each name once."""
    items = []
    for line in {line.name: line for line in lines}.values():
        dashed = " dashed" if line.is_dashed else ""
        stroke = "" if len(line.points) == 1 else f'<path class="series{dashed}" d="M1 8h26"/>'
        items.append(
            f'<li><svg class="s{line.style}" width="28" height="16" aria-hidden="true">{stroke}'
            f"{_mark(line.style, 14, 8)}</svg><bdi>{html.escape(isolated(line.name))}</bdi></li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>\n'


def _drawn(line: Line, frame: Frame) -> list[str]:
    at = [(frame.x(x), frame.y(y)) for x, y in line.points]
    parts = [f'<g class="s{line.style}">']
    if line.ends is not None:
        ends = [(x, frame.y(low), frame.y(high)) for (x, _), (low, high) in zip(at, line.ends, strict=True)]
        if line.has_band and len(ends) > 1:
            outline = [(x, high) for x, _, high in ends] + [(x, low) for x, low, _ in reversed(ends)]
            parts.append(f'<polygon class="band" points="{points_text(outline)}"/>')
        else:
            parts += [
                f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{high:.1f}" y2="{low:.1f}"/>'
                for x, low, high in ends
            ]
    if len(at) > 1:
        parts.append(f'<polyline class="series{" dashed" if line.is_dashed else ""}" points="{points_text(at)}"/>')
    if len(at) <= _MOST_MARKS:
        words = line.words or [f"{_short(x)}: {_short(y)}" for x, y in line.points]
        for (x, y), each in zip(at, words, strict=True):
            title = f"<title>{html.escape(f'{isolated(line.name)}, {each}')}</title>"
            parts.append(f"<g>{title}{_mark(line.style, x, y)}</g>")
    return [*parts, "</g>"]


def _mark(style: int, x: float, y: float) -> str:
    return _SHAPES[style % len(_SHAPES)].format(at=f'transform="translate({x:.1f} {y:.1f})"')


def _short(value: float) -> str:
    return signed(f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}")


def around(values: Sequence[float], spreads: Sequence[float | None]) -> list[tuple[float, float]]:
    """Returns where values begin and end that may be so much lower or higher; None is nothing."""
    return [(value - (spread or 0.0), value + (spread or 0.0)) for value, spread in zip(values, spreads, strict=True)]


BLACK, GREY = "#000000", "#777777"
# As pages draw them.
_MARKS = ("o", "s", "^", "D", "v", "P")
# Of a panel, in inches, and the room that legends and a title take next to panels.
_PANEL_WIDTH, _PANEL_HEIGHT, _AROUND = 3.6, 2.7, 1.0
# Longest line of a title or of the name of an axis, in characters.
_TITLE_WIDTH, _AXIS_WIDTH = 46, 42
_LEGEND_COLUMNS = 4


def why_no_figures() -> str | None:
    """Returns why figures cannot be drawn, as a sentence without its full stop; None if they can."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"plots need matplotlib, which is not installed: {how_to_install('plots')}"
    return None


def check_plots_available() -> None:
    """Raises `UsageError` if matplotlib is not installed."""
    if why := why_no_figures():
        raise UsageError(f"{why}.")


def write_figure(path: str, rows: Sequence[Sequence[LineChart]], *, title: str = "", note: str = "") -> None:
    """Writes charts as one file atomically; equal charts give equal files.

    Args:
      path: Where to, ending in .svg, .png or .pdf.
      rows: The charts from top to bottom; the first row is the longest.
      title: Of the whole; empty for none.
      note: What a legend says before the names; empty for nothing.
    """
    width, height = _AROUND + _PANEL_WIDTH * len(rows[0]), _AROUND + _PANEL_HEIGHT * len(rows)
    with saved_figure(path, width=width, height=height) as figure:
        figure.suptitle(title)
        draw_charts(rows, figure, note=note)


def draw_charts(rows: Sequence[Sequence[LineChart]], figure: "Figure", *, note: str = "") -> None:
    """Draws charts on an empty figure; arguments as of `write_figure`.

    One legend is about all charts, unless they name their lines differently: then each has its own.
    """
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    found: dict[str, Any] = {}
    names = {tuple(line.name for line in chart.lines) for charts in rows for chart in charts}
    for line_of_axes, charts in zip(grid, rows, strict=True):
        for axes, chart in zip(line_of_axes, charts, strict=False):
            _draw_chart(axes, chart)
            handles, labels = axes.get_legend_handles_labels()
            found.update(zip(labels, handles, strict=True))
            if len(names) > 1:
                # Below, where it hides no line.
                axes.legend(fontsize="small", ncols=2, title=note, loc="upper center", bbox_to_anchor=(0.5, -0.17))
        for axes in line_of_axes[len(charts) :]:
            axes.set_visible(False)
    if len(names) == 1:
        figure.legend(
            found.values(),
            found.keys(),
            title=note,
            loc="outside lower center",
            ncols=min(len(found), _LEGEND_COLUMNS),
            frameon=False,
        )


@contextlib.contextmanager
def saved_figure(path: str, *, width: float = 7.0, height: float = 4.0) -> "Iterator[Figure]":
    """Gives an empty figure, in inches, and writes it once the block has drawn on it.

    The file, .svg, .png or .pdf, appears atomically; equal figures give equal files.
    """
    # Here, since it is an extra. Not through pyplot, which keeps state and looks for a display.
    import matplotlib
    from matplotlib.figure import Figure

    # Ids in the file come from its content, not from a random draw.
    with matplotlib.rc_context({"svg.hashsalt": "calm-beam", "font.size": 9.0}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        kind = os.path.splitext(path)[1][1:]
        dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
        with replacing(path) as temporary:
            figure.savefig(temporary, format=kind, dpi=150, metadata=dates.get(kind))


def draw_line(axes: "Axes", line: Line) -> None:
    """Draws a line with its band or whiskers, under its name."""
    style = line_style(line)
    xs, ys = zip(*line.points, strict=True)
    if line.ends is None:
        axes.plot(xs, ys, label=line.name, **style)
        return
    lows, highs = zip(*line.ends, strict=True)
    if line.has_band:
        axes.plot(xs, ys, label=line.name, **style)
        axes.fill_between(xs, lows, highs, color=style["color"], alpha=0.18, linewidth=0)
        return
    below, above = ([end - y for end, y in zip(ends, ys, strict=True)] for ends in (lows, highs))
    axes.errorbar(xs, ys, yerr=([-each for each in below], above), elinewidth=0.6, label=line.name, **style)


def line_style(line: Line) -> dict[str, Any]:
    """Returns how a line is drawn, as matplotlib takes it; a single point is larger."""
    return {
        "color": SERIES[line.style][0],
        "marker": _MARKS[line.style % len(_MARKS)],
        "markersize": 3 if len(line.points) > 1 else 6,
        "linestyle": "--" if line.is_dashed else "-",
        "linewidth": 1.2,
    }


def tidy(axes: "Axes") -> None:
    """Takes away the frame above and to the right, and lays a light grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e5e5", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_chart(axes: "Axes", chart: LineChart) -> None:
    if chart.has_diagonal:
        end = max(x for line in chart.lines for x, _ in line.points)
        axes.plot([0, end], [0, end], color=GREY, linestyle=":", linewidth=1, label=chart.x_name)
    for line in chart.lines:
        draw_line(axes, line)
    if chart.level is not None:
        value, name = chart.level
        axes.axhline(value, color=BLACK, linewidth=0.8, linestyle=":", label=name)
    if chart.is_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(*chart.y_ends)
    axes.set_title(textwrap.fill(chart.title, _TITLE_WIDTH), fontsize="medium")
    axes.set_xlabel(chart.x_name)
    axes.set_ylabel(textwrap.fill(chart.y_name, _AXIS_WIDTH))
    tidy(axes)
