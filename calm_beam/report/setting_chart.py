"""The risk of settings as a drawing: a curve in testing order, the tolerance, what was proved, and the costs."""

import dataclasses
import html
import math
from collections.abc import Sequence
from typing import Protocol

from .foreign import isolated

_MOST_LABELS = 14
_MOST_MARKS = 100
_LONGEST_LABEL = 16
# In pixels: of a letter of the widest usual font, and between two names.
_LETTER_WIDTH, _LABEL_GAP = 6.8, 8
_COST_HEIGHT = 46


class Tested(Protocol):
    """One setting under a test, as `calm_beam.calibration.settings.SettingRow` has it."""

    @property
    def setting(self) -> str:
        """Its name."""
        ...

    @property
    def delta(self) -> float:
        """Risk tolerance."""
        ...

    @property
    def risk(self) -> float:
        """Mean loss."""
        ...

    @property
    def p_value(self) -> float:
        """Of "the risk exceeds delta"."""
        ...

    @property
    def tested(self) -> bool:
        """Whether the procedure looked at it."""
        ...

    @property
    def rejected(self) -> bool:
        """Whether it was found safe."""
        ...

    @property
    def cost(self) -> float | None:
        """What it costs; None where nobody told."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """Where a chart lies, in pixels; risks grow upwards."""

    left: float
    right: float
    top: float
    bottom: float
    low: float
    high: float
    count: int

    def x(self, index: int) -> float:
        """Returns where one of `count` columns is, from 0."""
        width = (self.right - self.left) / self.count
        return self.left + width * (index + 0.5)

    def y(self, risk: float) -> float:
        """Returns where a value is; one beyond the ends is at the end."""
        share = (min(max(risk, self.low), self.high) - self.low) / (self.high - self.low)
        return self.bottom - share * (self.bottom - self.top)


def setting_chart(
    rows: Sequence[Tested], *, chosen: str | None, width: int, height: int, is_large: bool, costs: str = "cost"
) -> str:
    """Returns an SVG of one test: every setting's risk in testing order, with delta and the decisions.

    Args:
      rows: All settings in testing order.
      chosen: The one that was chosen.
      width: In pixels.
      height: Of the part above the labels.
      is_large: Whether settings have labels and costs bars.
      costs: What costs are called.
    """
    delta = rows[0].delta
    risks = [row.risk for row in rows]
    frame = Frame(
        left=52,
        right=width - 12,
        top=14,
        bottom=height - 8,
        low=min(0.0, *risks),
        high=max(*risks, delta) * 1.06 or 1.0,
        count=len(rows),
    )
    known = [row.cost for row in rows if row.cost is not None] if is_large else []
    below = 30 + (_COST_HEIGHT + 12 if known else 0) if is_large else 6
    parts = [*_grid(frame), *_curve(frame, rows, chosen=chosen)]
    if is_large:
        parts += _labels(frame, rows, chosen=chosen)
        if known:
            parts += _costs(frame, rows, top=height + 24, highest=max(known), name=costs)
    title = f"Risk of {len(rows)} settings against delta {delta:g}"
    return (
        f'<svg viewBox="0 0 {width} {height + below}" width="{width}" height="{height + below}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(parts)}</svg>'
    )


def _grid(frame: Frame) -> list[str]:
    parts = []
    for risk in round_numbers(frame.low, frame.high):
        y = frame.y(risk)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{risk:g}</text>')
    return parts


def round_numbers(low: float, high: float) -> list[float]:
    """Returns up to six multiples of 1, 2 or 5 times a power of ten between two numbers, 0 among them."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [float(f"{index * step:.6g}") for index in range(first, last + 1)]


def _curve(frame: Frame, rows: Sequence[Tested], *, chosen: str | None) -> list[str]:
    delta, y = rows[0].delta, frame.y(rows[0].delta)
    parts = [
        f'<rect class="within" x="{frame.left}" y="{y:.1f}" width="{frame.right - frame.left:.1f}" '
        f'height="{max(frame.bottom - y, 0):.1f}"/>'
    ]
    tested = [index for index, row in enumerate(rows) if row.tested]
    last = max(tested, default=0)
    for name, indices in (("path after", range(last, len(rows))), ("path", range(last + 1))):
        points = " ".join(f"{frame.x(index):.1f},{frame.y(rows[index].risk):.1f}" for index in indices)
        parts.append(f'<polyline class="{name}" points="{points}"/>')
    parts.append(f'<line class="delta" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
    # At the end where no risk comes near.
    to_begin, to_end = (min(abs(row.risk - delta) for row in end) for end in (rows[: len(rows) // 3 + 1], rows[-2:]))
    place = f'x="{frame.right}" text-anchor="end"' if to_end > to_begin else f'x="{frame.left + 6}"'
    parts.append(f'<text class="delta-name" {place} y="{y - 6:.1f}">δ = {delta:g}</text>')
    if len(rows) <= _MOST_MARKS:
        parts += [_mark(frame, index, row, is_chosen=row.setting == chosen) for index, row in enumerate(rows)]
    return parts


def _mark(frame: Frame, index: int, row: Tested, *, is_chosen: bool) -> str:
    x, y = frame.x(index), frame.y(row.risk)
    words = f"{isolated(row.setting)}: risk {row.risk:.4f}, p = {row.p_value:.2g}"
    title = f"<title>{html.escape(words)}</title>"
    if row.tested and not row.rejected:
        return f'<path class="mark failed" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10">{title}</path>'
    kind = "open" if not row.tested else "accepted choice" if is_chosen else "accepted"
    return f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{6 if is_chosen else 4.5}">{title}</circle>'


def _labels(frame: Frame, rows: Sequence[Tested], *, chosen: str | None) -> list[str]:
    """Returns the names of settings; of many, some, and none so near the chosen one that it would cover that."""
    names = [
        row.setting if len(row.setting) <= _LONGEST_LABEL else row.setting[: _LONGEST_LABEL - 1] + "…" for row in rows
    ]
    room = (frame.right - frame.left) / (max(map(len, names), default=1) * _LETTER_WIDTH + _LABEL_GAP)
    step = -(-len(rows) // max(1, min(_MOST_LABELS, int(room))))
    place = next((index for index, row in enumerate(rows) if row.setting == chosen), -step)
    parts = []
    for index, row in enumerate(rows):
        if index != place and (index % step or abs(index - place) < step):
            continue
        now = " now" if row.setting == chosen else ""
        parts.append(
            f'<text class="tick{now}" x="{frame.x(index):.1f}" y="{frame.bottom + 22:.1f}" text-anchor="middle">'
            f"{html.escape(isolated(names[index]))}</text>"
        )
    return parts


def _costs(frame: Frame, rows: Sequence[Tested], *, top: float, highest: float, name: str) -> list[str]:
    """Returns bars of what settings cost, below their names."""
    width = min(28.0, (frame.right - frame.left) / frame.count * 0.6)
    parts = [f'<text class="tick" x="{frame.left - 8}" y="{top + _COST_HEIGHT:.1f}" text-anchor="end">{name}</text>']
    step = -(-len(rows) // _MOST_LABELS)
    for index, row in enumerate(rows):
        if row.cost is None:
            continue
        height = (_COST_HEIGHT - 14) * (row.cost / highest if highest else 0)
        x, y = frame.x(index), top + _COST_HEIGHT - height
        parts.append(
            f'<rect class="strip" x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'
        )
        if index % step == 0:
            parts.append(f'<text class="value" x="{x:.1f}" y="{y - 4:.1f}" text-anchor="middle">{row.cost:.4g}</text>')
    return parts
