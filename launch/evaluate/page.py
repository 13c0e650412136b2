"""An experiment on a sample of prompts as a page: curves, and all numbers."""

from collections.abc import Mapping
from typing import Any

from calm_beam.report.document import Document, Section, paragraphs, sentence
from calm_beam.report.foreign import short_place
from calm_beam.report.line_chart import legend
from calm_beam.report.tables import Cell, number, table

from .experiment import Findings

_HEADINGS = {
    "propagation": "What the cache of skipped layers does",
    "sensitivity": "What one wrong token does",
    "tradeoff": "Quality at fewer layers",
}


def experiment_page(name: str, findings: Findings, *, provenance: Mapping[str, Any]) -> str:
    """Returns the page.

    Args:
      name: Of the experiment.
      findings: What it found.
      provenance: What its JSON has beside the rows.
    """
    flags = provenance["flags"]
    charts = "".join(chart.figure() for chart in findings.charts)
    lines = [line for chart in findings.charts for line in chart.lines]
    layers = provenance["model"]["layers"]
    return Document(
        kind=f"evaluation: {name}",
        title=short_place(str(flags["checkpoint"])),
        made=f"calm-beam {provenance['software']['calm-beam']}",
        heading=_HEADINGS[name],
        opening=sentence(*findings.headline) + paragraphs([provenance["sample"], findings.notes]),
        sections=[
            Section(
                title="Curves",
                lead="Point at a mark to see its numbers, as the table has. Bars and bands: ± one standard error.",
                content=f'<div class="plots">{charts}</div>{legend(lines)}',
            ),
            Section(title="All numbers", lead="Heads sort.", content=_numbers(findings)),
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


def _numbers(findings: Findings) -> str:
    """Returns all rows, without columns in which nothing stands, or one word wherever something does: a flag has it."""
    first, *others = findings.rows[0]
    columns = [first, *(name for name in others if _tells_apart({row[name] for row in findings.rows} - {None}))]
    rows = [[_cell(row[name]) for name in columns] for row in findings.rows]
    for row in rows:
        row[0] = row[0] if row[0].text else Cell("full model")
    return table([_in_words(name) for name in columns], rows, label="Table of all numbers")


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
