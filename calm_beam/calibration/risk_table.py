"""The risk table as a CSV file."""

import csv
import dataclasses
import io
import os
from collections.abc import Callable, Sequence
from typing import Any

from calm_beam.storage import open_input, replacing

from .result import RiskRow


def risk_table_text(rows: Sequence[RiskRow]) -> str:
    """Returns the table as CSV: a header, then one line per spec and threshold. There is a column of groups if any are.

    Numbers are written so that they read back as the same float64; booleans as true and false.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [field.name for field in dataclasses.fields(RiskRow)]
    if all(row.group is None for row in rows):
        names.remove("group")
    writer.writerow(names)
    for row in rows:
        writer.writerow([_cell(getattr(row, name)) for name in names])
    return text.getvalue()


def write_risk_table(path: str | os.PathLike[str], rows: Sequence[RiskRow], *, replaces: str | None = None) -> None:
    """Writes the table; the file appears whole or not at all, and `replaces` is as in `storage.replacing`."""
    with replacing(path, replaces=replaces) as temporary:
        temporary.write_text(risk_table_text(rows), encoding="utf-8")


def read_risk_table(path: str | os.PathLike[str]) -> tuple[RiskRow, ...]:
    """Returns the rows of a file of `write_risk_table`.

    Raises:
      ValueError: If it is none; says where.
    """
    types = {field.name: _READERS[field.type] for field in dataclasses.fields(RiskRow)}
    rows = []
    with open_input(path) as raw, io.TextIOWrapper(raw, "utf-8", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            try:
                rows.append(RiskRow(**{name: types[name](text) for name, text in row.items()}))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}, line {reader.line_num}: is not a row of a risk table ({type(error).__name__}: {error})."
                ) from error
    return tuple(rows)


# By the annotations of `RiskRow`.
_READERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: {"true": True, "false": False}[text],
    # The whole has no name.
    str | None: lambda text: text or None,
}


def _cell(value: object) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
