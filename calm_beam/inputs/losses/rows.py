"""One loss of a sweep, as a row of a file has it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from calm_beam.inputs.examples import NO_UTF_8, NUL_CHARACTER
from calm_beam.risk.setting_sums import LossesError
from calm_beam.text import written_float

from .shown import value_in_words
from .tables import Reading


@dataclasses.dataclass(frozen=True, slots=True)
class LossRow:
    """The loss of one example under one setting.

    Attributes:
      id: Of the example.
      setting: The setting.
      loss: How much it loses.
      cost: What the setting costs on it; None where the row does not say.
      group: Group of the example; None where nobody asks.
      cluster: Cluster of the example; None where nobody asks.
    """

    id: str
    setting: str
    loss: float
    cost: float | None = None
    group: str | None = None
    cluster: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowReading:
    """How rows are read.

    Attributes:
      lowest: Least loss there can be: 0, or -1 where losses are signed.
      group_key: Column that names the group; None: groups are not asked for.
      cluster_key: Column that names the cluster; None: neither are clusters.
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
        """The columns that are looked at."""
        keys = (self.group_key, self.cluster_key)
        return ("id", "setting", "loss", "cost", *(key for key in keys if key is not None))

    def row(self, values: Mapping[str, Any], *, where: str) -> LossRow:
        """Returns the loss in a row.

        Args:
          values: By column; numbers may be texts, as CSV has them.
          where: File and row, for messages.

        Raises:
          LossesError: If a column is missing, or a value is not of its kind; names file and row.
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
      LossesError: If there is none; names file and row.
    """
    missing = [name for name in reading.columns if name not in reading.optional and values.get(name) in (None, "")]
    if missing:
        raise LossesError(
            f"{where}: has no {' and no '.join(missing)}. Every row needs {reading.needs}, and the columns that "
            "--group_key and --cluster_key name."
        )


def name_of(value: object, column: str, *, where: str) -> str:
    """Returns a name: a text as it is, a number as JSON writes it.

    Raises:
      LossesError: If it is neither, not finite, or a text that no file can hold.
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
    # True is an integer to Python, and an integer may be too large for a float.
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
