"""Axes of drawings: where numbers lie, which of them are written, and a level to compare with."""

import dataclasses
import html
import math
from collections.abc import Callable, Sequence


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
