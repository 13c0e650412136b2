"""How many examples a promise needs, as a page or as a figure: the power over the number of examples."""

import dataclasses
from collections.abc import Mapping, Sequence

from calm_beam.manifest.versions import certifying_versions
from calm_beam.risk.sample_size import Curve

from .document import Cell, Document, Section, paragraphs, sentence, software_fact, table
from .line_chart import Line, LineChart, plots, write_figure

_MOST_PANELS_IN_A_ROW = 3


def power_page(
    panels: Mapping[str, Sequence[Curve]],
    *,
    target: float,
    meaning: str,
    facts: Sequence[tuple[str, str]],
) -> str:
    """Returns the page.

    Args:
      panels: Curves by the losses and the tolerance that are asked about.
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
            f" with probability {target:.6g}, ",
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
            f" is not accepted with probability {target:.6g} by ",
            f"{most:,} examples",
            " or fewer.",
            warns=True,
        )
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
                content=plots(_charts(panels, target=target)),
            ),
            Section(
                title="Examples needed",
                lead=f"For a power of {target:.6g}. Click on the head of a column to sort by it.",
                content=table(
                    ("p-value", *panels),
                    [(by_panel[0].name, *map(_needed, by_panel)) for by_panel in zip(*panels.values(), strict=True)],
                    label="Table of examples needed",
                ),
            ),
        ],
        about="What was asked for",
        facts=[*facts, software_fact(versions)],
        fewer="Plan for fewer guesses.",
    ).text()


def write_power_figure(path: str, panels: Mapping[str, Sequence[Curve]], *, target: float, title: str) -> None:
    """Writes the charts of the page as one figure, whose legends say how many examples are needed.

    Args:
      path: As `write_figure` takes it.
      panels: Curves by the panel's title.
      target: The power asked for, drawn as a line.
      title: Of the whole.
    """
    charts = [
        dataclasses.replace(chart, lines=_lines(curves, has_needed=True))
        for chart, curves in zip(_charts(panels, target=target), panels.values(), strict=True)
    ]
    write_figure(
        path,
        [charts[start : start + _MOST_PANELS_IN_A_ROW] for start in range(0, len(charts), _MOST_PANELS_IN_A_ROW)],
        title=f"Probability that the threshold is accepted ({title})",
        note="examples needed",
    )


def _charts(panels: Mapping[str, Sequence[Curve]], *, target: float) -> list[LineChart]:
    return [
        LineChart(
            title=title,
            x_name="examples",
            y_name="probability that the threshold is accepted",
            lines=_lines(curves),
            level=(target, f"{target:.6g} asked for"),
            is_log=True,
            y_ends=(0.0, 1.05),
        )
        for title, curves in panels.items()
    ]


def _lines(curves: Sequence[Curve], *, has_needed: bool = False) -> list[Line]:
    return [
        Line(
            name=f"{curve.name}: {curve.needed_in_words()}" if has_needed else curve.name,
            points=curve.points,
            style=place,
        )
        for place, curve in enumerate(curves)
    ]


def _needed(curve: Curve) -> Cell:
    return Cell(curve.needed_in_words(), curve.at_most + 1 if curve.needed is None else curve.needed)
