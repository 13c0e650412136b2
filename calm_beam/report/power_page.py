"""How many examples a promise needs, as a page: the power over the number of examples."""

from collections.abc import Mapping, Sequence

from calm_beam.manifest.versions import certifying_versions

from .document import Document, Section, paragraphs, sentence
from .line_chart import Line, LineChart, legend
from .power_figure import Curve
from .tables import Cell, table


def power_page(
    panels: Mapping[str, Sequence[Curve]],
    *,
    delta: float,
    target: float,
    meaning: str,
    facts: Sequence[tuple[str, str]],
) -> str:
    """Returns the page.

    Args:
      panels: Curves by what losses are taken to be.
      delta: Risk tolerance.
      target: The power asked for.
      meaning: How the numbers are to be read.
      facts: What was asked for, by name.
    """
    first, curves = next(iter(panels.items()))
    found = [curve for curve in curves if curve.needed is not None]
    if found:
        best = min(found, key=lambda curve: curve.needed or 0)
        opening = sentence(
            "To accept a threshold with ",
            first,
            f" at δ\u00a0=\u00a0{delta:g} with probability {target:.6g}, ",
            best.name,
            " needs ",
            f"{best.needed:,} examples",
            ", the fewest." if len(curves) > 1 else ".",
        )
    else:
        most = max(curve.at_most for curve in curves)
        opening = sentence(
            "A threshold with ",
            first,
            f" is not accepted at δ\u00a0=\u00a0{delta:g} with probability {target:.6g} by ",
            f"{most:,} examples",
            " or fewer.",
            warns=True,
        )
    charts = [
        LineChart(
            title=title,
            x_name="examples",
            y_name="probability that the threshold is accepted",
            lines=_lines(of_panel),
            level=(target, f"{target:.6g} asked for"),
            is_log=True,
            y_ends=(0.0, 1.05),
        ).figure()
        for title, of_panel in panels.items()
    ]
    versions = certifying_versions()
    return Document(
        kind="plan",
        title="how many examples",
        made=f"calm-beam {versions['calm-beam']}",
        heading="How many examples it takes",
        opening=opening + paragraphs([meaning]),
        sections=[
            Section(
                title="Power over the number of examples",
                lead="Point at a mark to see its numbers.",
                content=f'<div class="plots">{"".join(charts)}</div>{legend(_lines(curves))}',
            ),
            Section(
                title="Examples needed",
                lead=f"For a power of {target:.6g}. Heads sort.",
                content=table(
                    ("p-value", *panels),
                    [(by_panel[0].name, *map(_needed, by_panel)) for by_panel in zip(*panels.values(), strict=True)],
                    label="Table of examples needed",
                ),
            ),
        ],
        about="What was asked for",
        facts=[*facts, ("Software", ", ".join(f"{name} {version}" for name, version in sorted(versions.items())))],
        fewer="Plan for fewer guesses.",
    ).text()


def _lines(curves: Sequence[Curve]) -> list[Line]:
    return [Line(name=curve.name, points=curve.points, style=place) for place, curve in enumerate(curves)]


def _needed(curve: Curve) -> Cell:
    return (
        Cell(f"> {curve.at_most:,}", curve.at_most + 1)
        if curve.needed is None
        else Cell(f"{curve.needed:,}", curve.needed)
    )
