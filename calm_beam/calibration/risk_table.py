"""The risk table as a CSV file."""

import csv
import dataclasses
import io
import os
from collections.abc import Sequence

from calm_beam.storage import replacing

from .result import RiskRow


def risk_table_text(rows: Sequence[RiskRow]) -> str:
    """Returns the table as CSV: a header, then one line per spec and threshold.

    Numbers are written so that they read back as the same float64; booleans as true and false.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in dataclasses.fields(RiskRow)])
    for row in rows:
        writer.writerow([_cell(value) for value in dataclasses.astuple(row)])
    return text.getvalue()


def write_risk_table(path: str | os.PathLike[str], rows: Sequence[RiskRow], *, replaces: str | None = None) -> None:
    """Writes the table; the file appears whole or not at all, and `replaces` is as in `storage.replacing`."""
    with replacing(path, replaces=replaces) as temporary:
        temporary.write_text(risk_table_text(rows), encoding="utf-8")


def _cell(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
