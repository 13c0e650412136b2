"""The risk table as a CSV file."""

import csv
import dataclasses
import io
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from calm_beam.errors import CalmBeamError
from calm_beam.inputs.csv_cells import allow_long_cells, csv_line, text_of_cell, text_to_cell
from calm_beam.storage import open_input, replacing

from .result import RiskRow

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class RiskTableError(CalmBeamError, ValueError):
    """A file that is no risk table."""


_Row = TypeVar("_Row", bound="DataclassInstance")


class Row(Protocol):
    """A dataclass of which a table has a line each: `RiskRow`, or `calm_beam.calibration.settings.SettingRow`."""

    @classmethod
    def columns(cls, rows: Sequence[Self]) -> tuple[str, ...]:
        """Returns the columns of a table of such rows, in their order."""
        ...


def risk_table_text(rows: Sequence[Row]) -> str:
    """Returns the table as CSV: a header, then one line per spec and threshold, or per test and setting.

    Numbers are written so that they read back as the same float64; booleans as true and false; nothing for None. Texts
    that a spreadsheet would compute begin with an apostrophe.

    Args:
      rows: All of one kind.
    """
    names = (type(rows[0]) if rows else RiskRow).columns(rows)
    return "".join(
        csv_line(cells) for cells in [names, *([_cell(getattr(row, name)) for name in names] for row in rows)]
    )


def write_risk_table(path: str | os.PathLike[str], rows: Sequence[Row], *, replaces: str | None = None) -> None:
    """Writes the table; the file appears whole or not at all, and `replaces` is as in `storage.replacing`."""
    with replacing(path, replaces=replaces) as temporary:
        temporary.write_text(risk_table_text(rows), encoding="utf-8")


def read_risk_table(path: str | os.PathLike[str], kind: type[_Row]) -> tuple[_Row, ...]:
    """Returns the rows of a file of `write_risk_table`.

    Args:
      path: The file.
      kind: Dataclass of its rows.

    Raises:
      RiskTableError: If it is none; says where.
    """
    types = {field.name: _READERS[field.type] for field in dataclasses.fields(kind)}
    rows = []
    for number, row in read_cells(path):
        try:
            rows.append(kind(**{name: types[name](text) for name, text in row.items()}))
        except (KeyError, TypeError, ValueError) as error:
            raise RiskTableError(
                f"{path}, line {number}: is not a row of a risk table ({type(error).__name__}: {error})."
            ) from error
    return tuple(rows)


def read_cells(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the lines of a file of `write_risk_table`: their numbers, and by column what was written as a text.

    Raises:
      RiskTableError: If it is no CSV, or no text at all; says where.
    """
    allow_long_cells()
    with open_input(path) as raw, io.TextIOWrapper(raw, "utf-8", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise RiskTableError(
                        f"{path}, line {reader.line_num}: is not a row of a risk table, by its number of cells."
                    )
                yield reader.line_num, {name: text_of_cell(cell) for name, cell in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise RiskTableError(
                f"{path}, line {reader.line_num + 1}: is not a risk table, which is CSV in UTF-8 ({error}). Restore it."
            ) from error


# By the annotations of `RiskRow`.
_READERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    float | None: lambda text: float(text) if text else None,
    int | None: lambda text: int(text) if text else None,
    bool: lambda text: {"true": True, "false": False}[text],
    bool | None: lambda text: {"true": True, "false": False, "": None}[text],
    # The whole has no name.
    str | None: lambda text: text or None,
}


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return text_to_cell(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
