"""The proof of one setting, round by round, as a drawing: the capital that was won, and the risk."""

import html
import math
from collections.abc import Sequence

from calm_beam.manifest import ExternalCalibration, ExternalLook

from .setting_chart import Frame, round_numbers

_WIDTH, _TOP, _MIDDLE, _BOTTOM = 1056, 26, 230, 384
_MOST_LABELS = 12
_MOST_MARKS = 60
_MOST_POWER = 300


def proof_chart(entry: ExternalCalibration) -> str:
    """Returns an SVG of an entry's looks: capital above, risk below, over the units counted by then.

    Args:
      entry: With looks.
    """
    looks = entry.looks or ()
    capitals = [look.log_capital / math.log(10) for look in looks]
    risks = [look.risk for look in looks]
    goal = -math.log10(entry.epsilon)
    low, high = min(0.0, *capitals), max(goal, *capitals)
    room = 0.08 * (high - low)
    above = _frame(_TOP, _MIDDLE, low - room, high + room, looks)
    below = _frame(_MIDDLE + 54, _BOTTOM, min(0.0, *risks), max(entry.delta, *risks) * 1.1, looks)
    parts = [
        *_grid(above, [power for power in round_numbers(above.low, above.high) if power == int(power)], is_power=True),
        *_grid(below, round_numbers(below.low, below.high), is_power=False),
        *_level(above, goal, f"proved: capital × {1 / entry.epsilon:.4g}", is_at_end=False),
        *_level(below, entry.delta, f"δ = {entry.delta:g}", is_at_end=True),
        *_line(above, looks, capitals, entry),
        *_line(below, looks, risks, entry),
        f'<text class="axis-name" x="{above.left}" y="{_TOP - 10}">capital against “not safe”</text>',
        f'<text class="axis-name" x="{above.left}" y="{_MIDDLE + 30}">risk</text>',
        *_counts(below, looks),
    ]
    label = html.escape(f"Capital and risk after each of {len(looks)} rounds")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_BOTTOM + 48}" width="{_WIDTH}" height="{_BOTTOM + 48}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


def capital_text(look: ExternalLook) -> str:
    """Returns the capital at a look in few digits; one that no float can hold, as a power of ten."""
    power = look.log_capital / math.log(10)
    return f"{10**power:.3g}" if abs(power) < _MOST_POWER else f"1e{power:.0f}"


def _frame(top: float, bottom: float, low: float, high: float, looks: Sequence[ExternalLook]) -> Frame:
    # Rounds of a group may all be without an example of it.
    return Frame(
        left=64, right=_WIDTH - 32, top=top, bottom=bottom, low=low, high=high or 1.0, count=max(1, looks[-1].n)
    )


def _x(frame: Frame, look: ExternalLook) -> float:
    return frame.left + (frame.right - frame.left) * look.n / frame.count


def _grid(frame: Frame, values: Sequence[float], *, is_power: bool) -> list[str]:
    parts = []
    for value in values:
        y = frame.y(value)
        text = _power(int(value)) if is_power else f"{value:g}"
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    return parts


def _power(exponent: int) -> str:
    """Returns a power of ten in few letters.

    >>> _power(-2), _power(4), _power(30)
    ('×0.01', '×10,000', '×1e30')
    """
    if 0 <= exponent <= 5:
        return f"×{10**exponent:,}"
    return f"×{10.0**exponent:g}" if -4 <= exponent < 0 else f"×1e{exponent}"


def _level(frame: Frame, value: float, name: str, *, is_at_end: bool) -> list[str]:
    y = frame.y(value)
    place = f'x="{frame.right}" text-anchor="end"' if is_at_end else f'x="{frame.left + 8}"'
    return [
        f'<line class="delta" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text class="delta-name" {place} y="{y - 6:.1f}">{html.escape(name)}</text>',
    ]


def _line(
    frame: Frame, looks: Sequence[ExternalLook], values: Sequence[float], entry: ExternalCalibration
) -> list[str]:
    points = [(_x(frame, look), frame.y(value)) for look, value in zip(looks, values, strict=True)]
    parts = [f'<polyline class="path" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>']
    if len(looks) > _MOST_MARKS:
        return parts
    for number, (look, (x, y)) in enumerate(zip(looks, points, strict=True), start=1):
        is_proved = entry.setting is not None and look.setting == entry.setting
        words = f"round {number}: {look.n:,} counted, capital × {capital_text(look)}, risk {look.risk:.4f}"
        parts.append(
            f'<circle class="mark {"accepted" if is_proved else "open"}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
            f"<title>{html.escape(words)}</title></circle>"
        )
    return parts


def _counts(frame: Frame, looks: Sequence[ExternalLook]) -> list[str]:
    """Returns the numbers of units counted after rounds; of many rounds, after some, the last among them."""
    step = -(-len(looks) // _MOST_LABELS)
    parts = [f'<line class="axis" x1="{frame.left}" x2="{frame.right}" y1="{frame.bottom}" y2="{frame.bottom}"/>']
    for look in looks[::-1][::step]:
        place = f'x="{_x(frame, look):.1f}" y="{frame.bottom + 18}"'
        parts.append(f'<text class="tick" {place} text-anchor="middle">{look.n:,}</text>')
    parts.append(
        f'<text class="axis-name" x="{frame.right}" y="{frame.bottom + 40}" text-anchor="end">counted by then →</text>'
    )
    return parts
