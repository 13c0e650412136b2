"""An experiment on a sample of prompts as a page: curves, and all numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from .document import Document, Section, paragraphs, sentence
from .foreign import short_place
from .line_chart import LineChart, legend
from .tables import Cell, number, table

_Row = Mapping[str, str | int | float | None]

_HEADINGS = {
    "propagation": "What the cache of skipped layers does",
    "sensitivity": "What one wrong token does",
    "tradeoff": "Quality at fewer layers",
}


def experiment_page(
    name: str,
    *,
    headline: Sequence[str],
    notes: str,
    charts: Sequence[LineChart],
    rows: Sequence[_Row],
    provenance: Mapping[str, Any],
) -> str:
    """Returns the page.

    Args:
      name: Of the experiment.
      headline: What it found: parts of a sentence, of which every second one is a number that matters.
      notes: How to read the numbers.
      charts: What it found, drawn.
      rows: Every number, one mapping from column to value a line, all with the same columns.
      provenance: What its JSON has beside the rows.
    """
    flags = provenance["flags"]
    drawn = "".join(chart.figure() for chart in charts)
    lines = [line for chart in charts for line in chart.lines]
    layers = provenance["model"]["layers"]
    return Document(
        kind=f"evaluation: {name}",
        title=short_place(str(flags["checkpoint"])),
        made=f"calm-beam {provenance['software']['calm-beam']}",
        heading=_HEADINGS[name],
        opening=sentence(*headline) + paragraphs([provenance["sample"], notes]),
        sections=[
            Section(
                title="Curves",
                lead="Point at a mark to see its numbers, as the table has. Bars and bands: ± one standard error.",
                content=f'<div class="plots">{drawn}</div>{legend(lines)}',
            ),
            Section(title="All numbers", lead="Heads sort.", content=_numbers(rows)),
        ],
        about="How it was measured",
        facts=[
            ("Model", f"{short_place(str(flags['checkpoint']))} ({layers} decoder layers)"),
            ("Model fingerprint", provenance["model"]["fingerprint"]),
            ("Flags", ", ".join(f"{name} {_short(value)}" for name, value in flags.items() if value is not None)),
            ("Software", ", ".join(f"{name} {version}" for name, version in sorted(provenance["software"].items()))),
        ],
        fewer="Take fewer thresholds or positions.",
    ).text()


def _numbers(rows: Sequence[_Row]) -> str:
    """Returns all rows, without columns in which nothing stands, or one word wherever something does: a flag has it."""
    first, *others = rows[0]
    columns = [first, *(name for name in others if _tells_apart({row[name] for row in rows} - {None}))]
    cells = [[_cell(row[name]) for name in columns] for row in rows]
    for line in cells:
        line[0] = line[0] if line[0].text else Cell("full model")
    return table([_in_words(name) for name in columns], cells, label="Table of all numbers")


def _tells_apart(values: set[str | int | float | None]) -> bool:
    return len(values) > 1 or any(not isinstance(value, str) for value in values)


def _cell(value: str | int | float | None) -> Cell:
    return number(value) if isinstance(value, (int, float)) else Cell(value or "")


def _in_words(column: str) -> str:
    return column.replace("_standard_error", " ±").replace("_", " ")


def _short(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_short, value))
    if isinstance(value, str):
        return short_place(value) or "none"
    return str(value)
