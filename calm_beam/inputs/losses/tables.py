"""Tables in files: CSV, JSON lines or Parquet; of one column, also plain text with a value a line."""

import collections
import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from calm_beam.inputs.csv_cells import allow_long_cells
from calm_beam.inputs.examples import numbered_lines
from calm_beam.inputs.files import matching_files
from calm_beam.risk.setting_sums import LossesError
from calm_beam.storage import open_input, strict_json

_BATCH = 4096
_Row = TypeVar("_Row", covariant=True)
# A row by column, and which row it is.
_Values = tuple[Mapping[str, Any], str]


class Reading(Protocol[_Row]):
    """What a table holds, and how its rows are read."""

    @property
    def kind(self) -> str:
        """What its rows are, for messages."""
        ...

    @property
    def needs(self) -> str:
        """What every row has to say, for messages."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are looked at."""
        ...

    @property
    def optional(self) -> tuple[str, ...]:
        """Those of them that need not be there."""
        ...

    @property
    def of_line(self) -> str | None:
        """The column that plain text has alone; None where plain text is no such table."""
        ...

    def row(self, values: Mapping[str, Any], *, where: str) -> _Row:
        """Returns what is in a row, by column; `where` says which row it is, for messages."""
        ...


def table_files(patterns: Sequence[str], reading: Reading[object]) -> tuple[str, ...]:
    """Returns the files that patterns name, sorted, each once.

    Args:
      patterns: Paths or globs, local or on Cloud Storage.
      reading: What they are to hold.

    Raises:
      LossesError: If the suffix of one tells no format.
      DataError: If a pattern matches no file: none is passed over silently.
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
            # What spreadsheets put before the first letter.
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
    # Here, since importing it takes long.
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
            # A thread of Arrow's that lets go of Python's memory while the interpreter ends aborts the process.
            for batch in file.iter_batches(_BATCH, columns=columns, use_threads=False):
                for values in batch.to_pylist():
                    number += 1
                    yield values, f"{path}, row {number}"
    except LossesError:
        raise
    # Of values that Python has no object for, such as dates after the year 9999, these come too.
    except (pyarrow.ArrowException, ValueError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            # Of the disk, and not of what is on it.
            raise
        raise LossesError(
            f"{path}: damaged Parquet data after row {number} ({' '.join(str(error).split())})."
        ) from error


def _check_columns(names: Sequence[str], reading: Reading[object], *, path: str) -> None:
    """Refuses a table without the columns that are needed, or with one of them twice."""
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
