"""The risk table as text."""

import csv
import dataclasses
import io
import pathlib
from collections.abc import Callable

import pytest

from calm_beam.calibration.result import RiskRow, read_risk_table, risk_table_text, write_risk_table

_ROW = RiskRow(
    consistency="risk",
    metric="my.scores:chrf",
    loss="relu",
    delta=0.1,
    epsilon=0.05,
    threshold=1 / 3,
    n=7,
    loss_sum=2**53 + 1,
    risk=0.1 + 0.2,
    p_value=5e-324,
    tested=True,
    rejected=False,
    layers=3.9625,
)


def test_header_and_lines() -> None:
    """The header names every field except those of groups and variants, of which there are none."""
    text = risk_table_text([_ROW])
    header, line, end = text.split("\n")
    assert header == "consistency,metric,loss,delta,epsilon,threshold,n,loss_sum,risk,p_value,tested,rejected,layers"
    assert line.startswith(
        "risk,my.scores:chrf,relu,0.1,0.05,0.3333333333333333,7,9007199254740993,0.30000000000000004,"
    )
    assert end == ""


def test_numbers_read_back() -> None:
    """Every value reads back unchanged: floats to the last bit, integers beyond 2^53, booleans as true and false."""
    (read,) = csv.DictReader(io.StringIO(risk_table_text([_ROW])))
    truth = {"true": True, "false": False}
    parsers: dict[type, Callable[[str], object]] = {str: str, float: float, int: int, bool: lambda text: truth[text]}
    for name, text in read.items():
        value = getattr(_ROW, name)
        assert parsers[type(value)](text) == value


def test_values_with_commas_are_quoted() -> None:
    """A comma in a metric's name does not shift the columns."""
    (read,) = csv.DictReader(io.StringIO(risk_table_text([dataclasses.replace(_ROW, metric='m:f,"x"')])))
    assert read["metric"] == 'm:f,"x"'
    assert read["layers"] == "3.9625"


def test_file_is_whole_or_absent(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed write leaves the old file and no temporary one."""
    path = tmp_path / "risk_table.csv"
    write_risk_table(path, [_ROW])
    assert path.read_text(encoding="utf-8") == risk_table_text([_ROW])

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "write_text", fail)
        with pytest.raises(OSError, match="No space left"):
            write_risk_table(path, [_ROW, _ROW])
    assert path.read_text(encoding="utf-8") == risk_table_text([_ROW])
    assert [child.name for child in tmp_path.iterdir()] == ["risk_table.csv"]


def test_a_table_is_read_back(tmp_path: pathlib.Path) -> None:
    """A written table reads back to the last digit; an invalid line is named with its number."""
    path = tmp_path / "risk_table.csv"
    rows = (_ROW, dataclasses.replace(_ROW, tested=False, rejected=True, metric='a "quoted", name'))
    write_risk_table(path, rows)
    assert read_risk_table(path, RiskRow) == rows
    text = risk_table_text([_ROW])
    for broken in (text.replace("true,false", "true,perhaps"), text.replace(",3.9625", "")):
        path.write_text(broken, encoding="utf-8")
        with pytest.raises(ValueError, match=r"risk_table\.csv, line 2: is not a row of a risk table"):
            read_risk_table(path, RiskRow)
