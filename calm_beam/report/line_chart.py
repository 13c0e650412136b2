"""Lines over numbers as a drawing: each with its own colour and marks, maybe a band, beside a level to compare with."""

import dataclasses
import html
import math
from collections.abc import Sequence

from calm_beam.exits.measures import COMPARABLE

from .axes import Frame, grid_lines, level_line, points_text, round_numbers
from .elements import isolated, signed
from .palette import SERIES

# As wide as a phone has room for: its texts are then as large as others.
_WIDTH, _HEIGHT = 340, 240
_TOP, _BOTTOM, _RIGHT = 16, 46, 14
# What a digit takes of a line, at the size of ticks.
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
      words: What is said of each point where one rests on it; its numbers if omitted.
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
    """What a drawing shows.

    Attributes:
      title: In a few words.
      x_name: What goes to the right.
      y_name: What goes up.
      lines: At least one.
      level: A value to compare with, and its name; None for none.
      has_diagonal: Whether the line where both are equal is drawn, as for a risk over its tolerance.
      is_log: Whether equal steps to the right are equal factors.
      y_ends: Where what goes up begins and ends; what is beyond them is cut off. None takes it from the points.
      caption: What else has to be said on a page; empty for nothing.
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
        # What is cut off at the ends leaves room for whole marks.
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
      has_band: As in `Line`.
      words: As there.
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
    """Returns charts beside each other, and below them what tells their lines apart, as HTML."""
    drawn = "".join(chart.figure() for chart in charts)
    return f'<div class="plots">{drawn}</div>{legend([line for chart in charts for line in chart.lines])}'


def legend(lines: Sequence[Line]) -> str:
    """Returns what tells lines apart, as HTML; each name once."""
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
