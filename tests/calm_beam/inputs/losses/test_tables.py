"""Losses in CSV, JSON lines and Parquet, and errors for files without any."""

import gzip
import json
import pathlib
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from calm_beam.inputs.examples import DataError
from calm_beam.inputs.losses.tables import LossRow, RowReading, read_rows, table_files
from calm_beam.risk.testing import LossesError
from tests.calm_beam.inputs.losses.builders import coin_rows, row_values, write_csv

_ALL = RowReading(group_key="group", cluster_key="cluster")


def _write(path: pathlib.Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_all_formats_give_the_same_rows(tmp_path: pathlib.Path) -> None:
    """The same table as CSV, JSON lines and Parquet, also compressed, gives the same losses."""
    rows = coin_rows(20)
    values = [row_values(row) for row in rows]
    lines = "".join(json.dumps(value) + "\n" for value in values)
    write_csv(tmp_path / "a.csv", rows)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    _write(tmp_path / "a.jsonl", lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), tmp_path / "a.parquet")
    files = table_files([str(tmp_path / "a.*"), str(tmp_path / "a.csv")], _ALL)
    assert len(files) == 5
    for path in files:
        assert list(read_rows(path, _ALL)) == rows, path


def test_columns_that_nobody_asks_for_are_not_read(tmp_path: pathlib.Path) -> None:
    """Without keys of groups and clusters a row has neither; a missing cost is None."""
    path = _write(tmp_path / "a.csv", "\ufeffsetting,loss,id,note\n0.9,0.25,7,x\n")
    assert list(read_rows(path, RowReading())) == [LossRow("7", "0.9", 0.25)]


def test_numbers_are_names_too(tmp_path: pathlib.Path) -> None:
    """Ids and settings that are numbers in JSON have their JSON text as names."""
    path = _write(tmp_path / "a.jsonl", '{"id": 3, "setting": 0.5, "loss": 1}\n{"id": 4, "setting": 2, "loss": 0}\n')
    assert [(row.id, row.setting) for row in read_rows(path, RowReading())] == [("3", "0.5"), ("4", "2")]


_GOOD = "id,setting,loss\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "", "a.csv: holds no losses"),
        ("a.csv", _GOOD, "a.csv: holds no losses"),
        ("a.csv", "id,setting\n1,2\n", "has no column loss, only id, setting"),
        ("a.csv", "id,id,setting,loss\n1,1,2,0\n", "has two columns named 'id'"),
        ("a.csv", _GOOD + "1,x\n", "a.csv, line 2: has 2 cells, and the header names 3 columns"),
        ("a.csv", _GOOD + "1,x,0\n,x,0\n", "a.csv, line 3: has no id"),
        ("a.csv", _GOOD + "1,x,high\n", r"line 2: the loss must be a number in \[0, 1\], got 'high'"),
        ("a.csv", _GOOD + "1,x,0_1\n", "got '0_1'"),
        ("a.csv", _GOOD + "1,x,nan\n", r"the loss must be a number in \[0, 1\], got 'nan'"),
        ("a.csv", _GOOD + "1,x,1.5\n", r"the loss must be a number in \[0, 1\], got '1.5'"),
        ("a.csv", _GOOD + "1,x,-0.5\n", r"got '-0.5'. For losses in \[-1, 1\] pass --loss=signed."),
        ("a.csv", "id,setting,loss,cost\n1,x,0,-1\n", "the cost must be a finite number of at least 0, got '-1'"),
        ("a.csv", _GOOD + '1,"x,0\n', "is not CSV in UTF-8"),
        ("a.jsonl", '{"id": 1, "setting": "x", "loss": 0}\nnothing\n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: expected an object with id, setting and loss"),
        ("a.jsonl", '{"id": 1, "id": 2, "setting": "x", "loss": 0}\n', 'key "id" occurs twice'),
        ("a.jsonl", '{"id": true, "setting": "x", "loss": 0}\n', "id must be a text that is not empty, or a number"),
        ("a.jsonl", '{"id": "\\ud800", "setting": "x", "loss": 0}\n', "is not Unicode text"),
        ("a.jsonl", '{"id": "a\\u0000", "setting": "x", "loss": 0}\n', "holds"),
        ("a.jsonl", '{"id": 1, "setting": "x", "loss": true}\n', "the loss must be a number"),
        ("a.jsonl", '{"id": 1, "setting": "x", "loss": null}\n', "line 1: has no loss"),
        (
            "a.jsonl",
            f'{{"id": 1, "setting": "x", "loss": {10**400}}}\n',
            r"the loss must be a number in \[0, 1\], got 1000",
        ),
        ("a.jsonl", '{"id": 1, "setting": "x", "loss": "1_0e-1_0"}\n', "got '1_0e-1_0'"),
        ("a.jsonl", '{"id": 1, "setting": "x", "loss": "٠"}\n', "got '٠'"),
        ("a.jsonl", '{"id": 1, "setting": "x", "loss": "1\u00a0"}\n', "the loss must be a number"),
        ("a.jsonl", '{"id": 1, "setting": "x", "loss": 0, "cost": "1_0"}\n', "the cost must be a finite number"),
        ("a.jsonl", '{"id": 1, "setting": "x", "loss": 0, "cost": "١٠"}\n', "the cost must be a finite number"),
        ("a.csv", "id,setting,loss,cost\n1,x,0,0_1\n", "the cost must be a finite number of at least 0, got '0_1'"),
        ("a.csv", _GOOD + "1,x,٠.١\n", "got '٠.١'"),
        ("a.parquet", "PAR1 but no more", "damaged Parquet data"),
    ],
)
def test_what_is_no_table_of_losses(tmp_path: pathlib.Path, name: str, text: str, message: str) -> None:
    """Errors have file and row."""
    path = _write(tmp_path / name, text)
    with pytest.raises(LossesError, match=message):
        list(read_rows(path, RowReading()))


def test_ids_that_are_no_float(tmp_path: pathlib.Path) -> None:
    """An integer that is too large for a float may be a name."""
    path = _write(tmp_path / "a.jsonl", f'{{"id": {10**400}, "setting": 5, "loss": 0}}\n')
    assert next(read_rows(path, RowReading())).id == str(10**400)


def test_dates_that_python_lacks(tmp_path: pathlib.Path) -> None:
    """A date far beyond the year 9999 in place of an id is reported as damage."""
    column = pyarrow.array([2**31 - 1], pyarrow.int32()).cast(pyarrow.date32())
    table = pyarrow.table({"id": column, "setting": ["x"], "loss": [0.0]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(LossesError, match="damaged Parquet data after row 0"):
        list(read_rows(str(tmp_path / "a.parquet"), RowReading()))


def test_long_cells(tmp_path: pathlib.Path) -> None:
    """An unused column may hold a book."""
    path = _write(tmp_path / "a.csv", f"id,setting,loss,prompt\n1,x,0,{'b' * 200_000}\n")
    assert next(read_rows(path, RowReading())).loss == 0


def test_damaged_gzip(tmp_path: pathlib.Path) -> None:
    """A file that was cut is an error, not the end of the data."""
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"id,setting,loss\n" + b"1,x,0\n" * 1000)[:-12])
    with pytest.raises(DataError, match="damaged gzip data after line"):
        list(read_rows(str(path), RowReading()))


def test_bytes_that_are_no_text(tmp_path: pathlib.Path) -> None:
    """Bytes that are not UTF-8 are named with their line."""
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,setting,loss\n\xff,x,0\n")
    with pytest.raises(LossesError, match="line 2: is not CSV in UTF-8"):
        list(read_rows(str(path), RowReading()))


@pytest.mark.parametrize(("name", "message"), [("a.txt", "tells no format of losses"), ("none.csv", "no such file")])
def test_files_that_cannot_be_losses(tmp_path: pathlib.Path, name: str, message: str) -> None:
    """A suffix without a format, and a pattern that matches nothing, are errors."""
    _write(tmp_path / "a.txt", "x")
    with pytest.raises((LossesError, DataError), match=message):
        table_files([str(tmp_path / name)], _ALL)


@pytest.mark.parametrize("value", [float("inf"), [1], None, {}])
def test_costs_of_parquet_are_checked(tmp_path: pathlib.Path, value: Any) -> None:
    """A null is no cost; a value that is not a number is an error."""
    path = tmp_path / "a.parquet"
    row = {"id": "1", "setting": "x", "loss": 0.0, "cost": value}
    if value == {}:
        row["cost"] = {"usd": 1}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    if value is None:
        assert next(read_rows(str(path), RowReading())).cost is None
    else:
        with pytest.raises(LossesError, match="row 1: the cost must be"):
            list(read_rows(str(path), RowReading()))
