"""Tables in files, and the rows of losses in them: CSV, JSON lines or Parquet.

A table of one column may also be plain text with one value per line. A row holds one loss of a sweep. Messages about
rows show the number of names and the first few, and shorten long values.
"""

import collections
import csv
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from calm_beam.inputs.csv_cells import allow_long_cells
from calm_beam.inputs.examples import NO_UTF_8, NUL_CHARACTER, numbered_lines
from calm_beam.inputs.files import matching_files
from calm_beam.risk.testing import LossesError
from calm_beam.storage import open_input, strict_json
from calm_beam.text import counted, shortened, written_float

_BATCH = 4096
_Row = TypeVar("_Row", covariant=True)
# A row by column, and its place for messages.
_Values = tuple[Mapping[str, Any], str]


class Reading(Protocol[_Row]):
    """The content of a kind of table, and how to read its rows."""

    @property
    def kind(self) -> str:
        """The word for its rows in messages."""
        ...

    @property
    def needs(self) -> str:
        """The values that every row needs, for messages."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """The columns that may be missing."""
        ...

    @property
    def of_line(self) -> str | None:
        """The column of a plain-text file; None if plain text cannot be such a table."""
        ...

    def row(self, values: Mapping[str, Any], *, where: str) -> _Row:
        """Returns the value of a row, given by column; `where` names the row in messages."""
        ...


def table_files(patterns: Sequence[str], reading: Reading[object]) -> tuple[str, ...]:
    """Returns the files that match patterns, sorted, each once.

    Args:
      patterns: Paths or globs, local or on Cloud Storage.
      reading: The kind of table that they should hold.

    Raises:
      LossesError: If the suffix of a file is not one of a format.
      DataError: If a pattern matches no file: none is skipped silently.
      OSError: If Cloud Storage cannot be listed.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        found = {**matching_files(pattern, among=patterns), **found}
    files = tuple(sorted(found.values()))
    for path in files:
        _reader(path, reading)
    return files


def read_rows(path: str, reading: Reading[_Row]) -> Iterator[_Row]:
    """Yields the rows of a file, local or on Cloud Storage.

    Raises:
      LossesError: If the file is damaged, has no rows, or a row is not one; names file and row.
      DataError: If gzip data are damaged, or a line is too long.
    """
    is_empty = True
    for values, where in _reader(path, reading)(path, reading):
        is_empty = False
        yield reading.row(values, where=where)
    if is_empty:
        raise LossesError(f"{path}: holds no {reading.kind}. A part that was lost would bias the result.")


def _csv_rows(path: str, reading: Reading[object]) -> Iterator[_Values]:
    allow_long_cells()
    with open_input(path) as raw:
        lines = (line.decode("utf-8") for _, line in numbered_lines(raw, path=path))
        table = csv.reader(lines, strict=True)
        try:
            header = next(table, None)
            if header is None:
                return
            # Spreadsheets put a byte order mark before the first letter.
            header[0] = header[0].removeprefix("\ufeff")
            _check_columns(header, reading, path=path)
            for cells in table:
                where = f"{path}, line {table.line_num}"
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise LossesError(f"{where}: has {len(cells)} cells, and the header names {len(header)} columns.")
                yield dict(zip(header, cells, strict=True)), where
        except (csv.Error, UnicodeDecodeError) as error:
            raise LossesError(f"{path}, line {table.line_num + 1}: is not CSV in UTF-8 ({error}).") from error


def _json_rows(path: str, reading: Reading[object]) -> Iterator[_Values]:
    with open_input(path) as raw:
        for number, line in numbered_lines(raw, path=path):
            where = f"{path}, line {number}"
            try:
                values = strict_json.loads(line)
            except strict_json.StrictJSONError as error:
                raise LossesError(f"{where}: {error}.") from error
            if not isinstance(values, dict):
                raise LossesError(f"{where}: expected an object with {reading.needs}.")
            yield values, where


def _parquet_rows(path: str, reading: Reading[object]) -> Iterator[_Values]:
    # Imported here because it is slow to import.
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with (
            open_input(path) as raw,
            pyarrow.parquet.ParquetFile(raw, page_checksum_verification=True, pre_buffer=False) as file,
        ):
            names = file.schema_arrow.names
            _check_columns(names, reading, path=path)
            columns = [name for name in names if name in reading.columns]
            # An Arrow thread that releases Python memory during interpreter shutdown aborts the process.
            for batch in file.iter_batches(_BATCH, columns=columns, use_threads=False):
                for values in batch.to_pylist():
                    number += 1
                    yield values, f"{path}, row {number}"
    except LossesError:
        raise
    # Values without a Python object, such as dates after the year 9999, raise these too.
    except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            # An error of the disk, and not of the file's content.
            raise
        raise LossesError(
            f"{path}: damaged Parquet data after row {number} ({' '.join(str(error).split())})."
        ) from error


def _check_columns(names: Sequence[str], reading: Reading[object], *, path: str) -> None:
    """Refuses a table that lacks a needed column or has one twice."""
    twice = next((name for name, count in collections.Counter(names).items() if count > 1), None)
    if twice is not None:
        raise LossesError(f"{path}: has two columns named {twice!r}. Rename or drop one of them.")
    missing = [name for name in reading.columns if name not in names and name not in reading.optional]
    if missing:
        raise LossesError(
            f"{path}: has no column {' and no column '.join(missing)}, only {', '.join(names)}. A table of "
            f"{reading.kind} has {reading.needs}, and the columns that --group_key and --cluster_key name."
        )


def _text_rows(path: str, reading: Reading[object]) -> Iterator[_Values]:
    assert reading.of_line is not None, "others have no reader of plain text"
    _check_columns([reading.of_line], reading, path=path)
    with open_input(path) as raw:
        for number, line in numbered_lines(raw, path=path):
            where = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise LossesError(f"{where}: is not text in UTF-8 ({error}).") from error
            if text:
                yield {reading.of_line: text}, where


_READERS: Mapping[str, Callable[[str, Reading[object]], Iterator[_Values]]] = {
    r"\.csv(\.gz)?": _csv_rows,
    r"\.jsonl(\.gz)?": _json_rows,
    r"\.parquet": _parquet_rows,
}


def _reader(path: str, reading: Reading[object]) -> Callable[[str, Reading[object]], Iterator[_Values]]:
    for suffix, reader in _READERS.items():
        if re.search(suffix + r"\Z", path):
            return reader
    if reading.of_line is not None and re.search(r"\.txt(\.gz)?\Z", path):
        return _text_rows
    text = "" if reading.of_line is None else ", .txt"
    raise LossesError(
        f"{path}: its suffix tells no format of {reading.kind} (.csv, .jsonl{text}, each also with .gz; .parquet). "
        "Rename it."
    )


_MOST_NAMES = 5
_LONGEST_VALUE = 80


def value_in_words(value: object) -> str:
    """Returns a value of a file as Python shows it; a long one is cut.

    >>> value_in_words("a" * 100)[-3:], value_in_words(0.5)
    ('aa…', '0.5')
    """
    return shortened(repr(value), _LONGEST_VALUE)


def named(names: Collection[str], kind: str) -> str:
    """Returns the number of names, and the first few.

    Args:
      names: At least one.
      kind: Noun for one of them.

    >>> named(["a", "b"], "id"), named(list("abcdefg"), "id")
    ("2 ids ('a', 'b')", "7 ids ('a', 'b', 'c', 'd', 'e', ...)")
    """
    first = ", ".join(repr(name) for name in itertools.islice(names, _MOST_NAMES))
    return f"{counted(len(names), kind)} ({first}{', ...' if len(names) > _MOST_NAMES else ''})"


@dataclasses.dataclass(frozen=True, slots=True)
class LossRow:
    """The loss of one example under one setting.

    Attributes:
      id: Id of the example.
      setting: The setting.
      loss: The loss.
      cost: Cost of the setting on the example; None if the row has none.
      group: Group of the example; None if groups are not requested.
      cluster: Cluster of the example; None if clusters are not requested.
    """

    id: str
    setting: str
    loss: float
    cost: float | None = None
    group: str | None = None
    cluster: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowReading:
    """How to read rows of losses.

    Attributes:
      lowest: Smallest possible loss: 0, or -1 if losses are signed.
      group_key: Column with the group; None if groups are not requested.
      cluster_key: Column with the cluster; None if clusters are not requested.
    """

    lowest: float = 0.0
    group_key: str | None = None
    cluster_key: str | None = None

    kind: ClassVar[str] = "losses"
    needs: ClassVar[str] = "id, setting and loss"
    optional: ClassVar[tuple[str, ...]] = ("cost",)
    of_line: ClassVar[None] = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        keys = (self.group_key, self.cluster_key)
        return ("id", "setting", "loss", "cost", *(key for key in keys if key is not None))

    def row(self, values: Mapping[str, Any], *, where: str) -> LossRow:
        """Returns the loss in a row.

        Args:
          values: By column; numbers may be texts, as in CSV.
          where: File and row, for messages.

        Raises:
          LossesError: If a column is missing, or a value has the wrong type; names file and row.
        """
        check_there(values, self, where=where)
        loss = _number(values["loss"])
        if not self.lowest <= loss <= 1:
            hint = " For losses in [-1, 1] pass --loss=signed." if -1 <= loss < self.lowest else ""
            got = value_in_words(values["loss"])
            raise LossesError(f"{where}: the loss must be a number in [{self.lowest:g}, 1], got {got}.{hint}")
        cost = None
        if values.get("cost") not in (None, ""):
            cost = _number(values["cost"])
            if not (math.isfinite(cost) and cost >= 0):
                raise LossesError(
                    f"{where}: the cost must be a finite number of at least 0, got {value_in_words(values['cost'])}."
                )
        return LossRow(
            name_of(values["id"], "id", where=where),
            name_of(values["setting"], "setting", where=where),
            loss,
            cost,
            None if self.group_key is None else name_of(values[self.group_key], self.group_key, where=where),
            None if self.cluster_key is None else name_of(values[self.cluster_key], self.cluster_key, where=where),
        )


def check_there(values: Mapping[str, Any], reading: Reading[object], *, where: str) -> None:
    """Refuses a row without a value in a column that every row needs.

    Raises:
      LossesError: If a value is missing; names file and row.
    """
    missing = [name for name in reading.columns if name not in reading.optional and values.get(name) in (None, "")]
    if missing:
        raise LossesError(
            f"{where}: has no {' and no '.join(missing)}. Every row needs {reading.needs}, and the columns that "
            "--group_key and --cluster_key name."
        )


def name_of(value: object, column: str, *, where: str) -> str:
    """Returns a name: a text unchanged, or a number in JSON notation.

    Raises:
      LossesError: If it is neither, is not finite, or is a text that no file can hold.
    """
    if isinstance(value, str):
        if "\0" in value:
            raise LossesError(f"{where}: {column} {value_in_words(value)} holds {NUL_CHARACTER}")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise LossesError(
                    f"{where}: {column} {value_in_words(value)} is not Unicode text: {NO_UTF_8}"
                ) from error
        if value:
            return value
    # True is an int in Python, and an int may be too large for a float.
    elif (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    ):
        return repr(value)
    raise LossesError(f"{where}: {column} must be a text that is not empty, or a number, got {value_in_words(value)}.")


def _number(value: object) -> float:
    """Returns a number; NaN for anything else."""
    if isinstance(value, str):
        try:
            return written_float(value)
        except ValueError:
            return math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return math.nan
