"""Measures on pages: each with a colour and a mark of its own, the same on all."""

from collections.abc import Sequence

from calm_beam.exits.measures import COMPARABLE
from calm_beam.report.line_chart import FULL, REFERENCE, Line, around


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
