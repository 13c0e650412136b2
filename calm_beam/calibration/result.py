"""The result of a calibration: from totals to p-values, tests of the whole grid, thresholds and the risk table."""

import csv
import dataclasses
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from calm_beam.errors import CalmBeamError
from calm_beam.inputs.csv_cells import allow_long_cells, csv_line, text_of_cell, text_to_cell
from calm_beam.manifest import Calibration, Manifest, PathEntry, Plan, PlannedTest, Variant
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.risk.losses import loss_sum_upper
from calm_beam.risk.testing import TESTED_COLUMNS, TestedSetting, grid_tests
from calm_beam.storage import open_input, replacing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclasses.dataclass(frozen=True, kw_only=True)
class RiskRow(TestedSetting):
    """One line of the risk table: one threshold under one spec.

    Attributes:
      consistency: Kind of consistency.
      metric: Name of the metric.
      loss: Loss computed from its scores.
      delta: Risk tolerance.
      epsilon: Allowed probability of error.
      threshold: Exit threshold.
      layers: Mean decoder layers per token.
      group: Group of examples; None for all examples.
      tau: With several variants, the temperature of this one; None without a decaying schedule or without variants.
      min_exit_layer: The variant's lowest exit layer; None without variants.
      confidence: The variant's confidence measure; None without variants or if all have the same.
      exit_interval: The variant's distance between exit layers; None without variants or if all have the same.
      place: Position of variant and threshold on the tested path, from 1; None off it.
      choosing_p_value: The p-value by which the path was chosen, from units that tested nothing; None if no part chose.
      choosing_layers: Mean layers by which the path was chosen, over tokens of the same units.
      confirming_n: Number of holdout units that tested an accepted threshold again; None for all other thresholds, as
        are the following.
      confirming_loss_sum: Exact sum of their losses in units of 2^-32.
      confirming_risk: Their mean loss.
      confirming_p_value: Their p-value for "the risk exceeds delta".
      confirmed: Whether they found it safe, and all thresholds tested before it.
      near_ties: Examples whose output at this threshold, or the full model's, depended on a near tie; None if unknown.
      cost: Declared cost of a token at the layers that chose; None where cost is measured in layers.
    """

    consistency: str
    metric: str
    loss: str
    delta: float
    epsilon: float
    threshold: float
    layers: float
    group: str | None = None
    tau: float | None = None
    min_exit_layer: int | None = None
    confidence: str | None = None
    exit_interval: int | None = None
    place: int | None = None
    choosing_p_value: float | None = None
    choosing_layers: float | None = None
    confirming_n: int | None = None
    confirming_loss_sum: int | None = None
    confirming_risk: float | None = None
    confirming_p_value: float | None = None
    confirmed: bool | None = None
    near_ties: int | None = None
    cost: float | None = None

    @classmethod
    def columns(cls, rows: Sequence[Self]) -> tuple[str, ...]:
        """Returns the columns of a table in order; columns of groups, variants and so on only if rows use them."""
        found = ["consistency", "metric", "loss", "delta", "epsilon", "threshold", *TESTED_COLUMNS, "layers"]
        if any(row.group is not None for row in rows):
            found.append("group")
        if any(row.variant is not None for row in rows):
            found += ["tau", "min_exit_layer"]
            found += [name for name in ("confidence", "exit_interval") if any(getattr(row, name) for row in rows)]
            found.append("place")
        if any(row.choosing_p_value is not None for row in rows):
            found += ["choosing_p_value", "choosing_layers"]
        if any(row.confirmed is not None for row in rows):
            found += ["confirming_n", "confirming_loss_sum", "confirming_risk", "confirming_p_value", "confirmed"]
        if any(row.near_ties is not None for row in rows):
            found.append("near_ties")
        if any(row.cost is not None for row in rows):
            found.append("cost")
        return tuple(found)

    @property
    def variant(self) -> Variant | None:
        """The variant of the row; None without variants."""
        if self.min_exit_layer is None:
            return None
        return Variant(
            tau=self.tau,
            min_exit_layer=self.min_exit_layer,
            confidence=self.confidence,
            exit_interval=self.exit_interval,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrationOutcome:
    """The outcome of a calibration, before it is written.

    Attributes:
      manifest: The thresholds with their proof.
      rows: The risk table.
      failures: Id and reason of every example that counts with loss 1, sorted.
    """

    manifest: Manifest
    rows: tuple[RiskRow, ...]
    failures: tuple[tuple[str, str], ...]


def risk_rows(totals: CalibrationTotals, plan: Plan, *, num_layers: int) -> tuple[RiskRow, ...]:
    """Returns the risk of every threshold under every spec, with the result of its test.

    Args:
      totals: Over the whole calibration set, in the plan's layout.
      plan: The plan, fixed before any loss was seen.
      num_layers: Decoder depth.

    Raises:
      ValueError: If there are no examples.
      EvidenceError: If the losses do not allow a p-value that was planned.

    Source: CALM Algorithm 1 (calibration with fixed sequence testing).
    """
    tested = [test.after(1) for test in grid_tests([totals], plan.tests, hands_on=plan.hands_on)]
    return rows_of(totals, plan, tested=tested, num_layers=num_layers)


def rows_of(
    totals: CalibrationTotals, plan: Plan, *, tested: Sequence[Sequence[TestedSetting]], num_layers: int
) -> tuple[RiskRow, ...]:
    """Returns the rows of `risk_rows`, given the results of every spec's test."""
    rows: list[RiskRow] = []
    for spec, of_spec in zip(plan.tests, tested, strict=True):
        of_group = totals.of_group(spec.group)
        layers = of_group.mean_layers(num_layers)[1:]
        rows.extend(
            RiskRow(
                **vars(found),
                **asked_of(spec),
                threshold=threshold,
                layers=layers[index],
                near_ties=of_group.near_ties(index),
            )
            for index, (threshold, found) in enumerate(zip(plan.thresholds, of_spec, strict=True))
        )
    return tuple(rows)


def asked_of(test: PlannedTest | Calibration | RiskRow) -> dict[str, Any]:
    """Returns the columns of a risk table that identify a guarantee, with their values."""
    return {name: getattr(test, name) for name in ("consistency", "metric", "loss", "delta", "epsilon", "group")}


def choose_thresholds(
    rows: Sequence[RiskRow], plan: Plan, *, num_layers: int, full_cost: float | None = None
) -> tuple[Calibration, ...]:
    """Returns one manifest entry per spec: the lowest threshold found safe, and every threshold tested.

    Every rejected threshold is safe, so any of them may be chosen; the lowest exits earliest. With procedures that
    go on after a failure, thresholds above it need not have been rejected. On a path of several variants, the last
    point found safe is taken: where a part of the set chose the path, costs fall along it; otherwise the cheapest
    variant is last.

    Args:
      rows: From `risk_rows`, or `variant_rows`.
      plan: The plan given there.
      num_layers: Decoder depth, reported for "never exit".
      full_cost: Cost of a token of the full model, where rows have costs: a row that costs as much or more is not
        promised.
    """
    per_spec = len(rows) // len(plan.tests)
    # Rows are in the order of the grid.
    all_tested = [
        sorted((row for row in rows[start : start + per_spec] if row.tested), key=lambda row: row.place or 0)
        for start in range(0, len(rows), per_spec)
    ]
    levels = plan.tested_epsilons([[row.p_value for row in tested] for tested in all_tested])
    entries = []
    for spec, tested, level in zip(plan.tests, all_tested, levels, strict=True):
        path = [PathEntry.of(row) for row in tested]
        of_none: dict[str, Any] = {"threshold": None, "variant": None, "layers": num_layers, "risk": 0.0}
        last = next((row for row in reversed(tested) if row.rejected), None)
        if last is not None and last.cost is not None and full_cost is not None and last.cost >= full_cost:
            entries.append(Calibration(path=tuple(path), pays=False, **vars(spec), **of_none))
        else:
            entries.append(Calibration.of_tests(spec, path, level=level, **of_none))
    return tuple(entries)


def with_example_risks(
    calibrations: Sequence[Calibration], totals: Mapping[Variant | None, CalibrationTotals], plan: Plan
) -> tuple[Calibration, ...]:
    """Returns entries with the mean loss over examples added; unchanged where units are examples.

    Args:
      calibrations: From `choose_thresholds`.
      totals: Totals by variant; the key is None without variants.
      plan: The plan under which the totals were counted.
    """
    return tuple(
        entry
        if entry.threshold is None
        else dataclasses.replace(
            entry, example_risk=example_risk(totals[entry.variant], spec, plan.thresholds.index(entry.threshold))
        )
        for entry, spec in zip(calibrations, plan.tests, strict=True)
    )


def example_risk(totals: CalibrationTotals, spec: PlannedTest, place: int) -> float | None:
    """Returns the mean loss over examples at a threshold, given by index; None where units are examples."""
    found = totals.over_examples
    if found is None:
        return None
    return float(loss_sum_upper(found.sums[totals.layout.objectives.index(spec.objective), place]) / found.n)


def has_ended(calibrations: Sequence[Calibration]) -> bool:
    """Returns whether fixed sequence testing has failed in every entry, so that lower thresholds are not tested."""
    return all(not entry.path[-1].rejected for entry in calibrations)


class RiskTableError(CalmBeamError, ValueError):
    """A file that is not a risk table."""


_Row = TypeVar("_Row", bound="DataclassInstance")


class Row(Protocol):
    """A dataclass for the lines of a table: `RiskRow`, or `calm_beam.calibration.certification.SettingRow`."""

    @classmethod
    def columns(cls, rows: Sequence[Self]) -> tuple[str, ...]:
        """Returns the columns of a table of such rows, in their order."""
        ...


def risk_table_text(rows: Sequence[Row]) -> str:
    """Returns the table as CSV: a header, then one line per spec and threshold, or per test and setting.

    Numbers read back as the same float64; booleans are true and false; None is empty. Texts that a spreadsheet would
    take for a formula begin with an apostrophe.

    Args:
      rows: All of one kind.
    """
    names = (type(rows[0]) if rows else RiskRow).columns(rows)
    return "".join(
        csv_line(cells) for cells in [names, *([_cell(getattr(row, name)) for name in names] for row in rows)]
    )


def write_risk_table(path: str | os.PathLike[str], rows: Sequence[Row], *, replaces: str | None = None) -> None:
    """Writes the table atomically; `replaces` is as in `storage.replacing`."""
    with replacing(path, replaces=replaces) as temporary:
        temporary.write_text(risk_table_text(rows), encoding="utf-8")


def read_risk_table(path: str | os.PathLike[str], kind: type[_Row]) -> tuple[_Row, ...]:
    """Returns the rows of a file that `write_risk_table` wrote.

    Args:
      path: The file.
      kind: Dataclass of its rows.

    Raises:
      RiskTableError: If it is not such a file; says where.
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
    """Yields line number and unescaped text by column, for every line of a file of `write_risk_table`.

    Raises:
      RiskTableError: If it is not CSV, or not text; says where.
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
    # An empty group is the whole set.
    str | None: lambda text: text or None,
}


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return text_to_cell(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
