"""Repeated random splits of one set of examples into a calibration and a test part, with everything summed in one pass.

Every independent unit (an example, or a cluster of them) draws for every trial whether it belongs to the calibration
part, by itself: from a hash of the seed and its key. So membership needs no list of all units and does not depend on
sharding or order, and equal data split equally whatever measure decoded them. The share is that of the expected sizes;
actual ones vary like a binomial (at 5,000 units and 80 %: 4,000 +- 28). That voids nothing: sizes and losses are
independent, so that, whatever the sizes, both parts are i.i.d. draws, independent of each other, and each test knows
its own n. An exact 80 : 20 would need all keys sorted for every trial.

The trials of one set share its units: they are not independent of each other.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Self

import numpy as np

from calm_beam.manifest import Objective
from calm_beam.outputs.layout import Layout
from calm_beam.outputs.totals import CalibrationTotals
from calm_beam.risk.evidence import Evidence
from calm_beam.risk.totals import RiskTotals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    """How a set is split.

    Attributes:
      trials: Number of splits, at least 1.
      calibration_share: Chance of a unit to be in the calibration part, in (0, 1).
      seed: Decides all splits; those of fewer trials are the first of more.
    """

    trials: int
    calibration_share: float
    seed: int

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"trials must be at least 1, got {self.trials}.")
        if not 0 < self.calibration_share < 1:
            raise ValueError(
                f"calibration_share must be in (0, 1), got {self.calibration_share}. It is a fraction: for 80 % pass "
                "0.8."
            )

    def parts(self, keys: Sequence[str]) -> np.ndarray:
        """Returns which units are in each trial's calibration part, and in the whole set.

        Args:
          keys: One per unit, distinct over the set.

        Returns:
          shape (units, trials + 1), bool; the last column is True.
        """
        size = 8 * self.trials
        drawn = b"".join(hashlib.shake_256(f"{self.seed}\n{key}".encode()).digest(size) for key in keys)
        uniform = np.frombuffer(drawn, ">u8").reshape(len(keys), self.trials)
        is_in_calibration = uniform < np.uint64(round(self.calibration_share * 2**64))
        return np.column_stack([is_in_calibration, np.ones(len(keys), bool)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitTotals:
    """Sums over the calibration part of every trial and over the whole set; merging is exact in any order.

    Attributes:
      whole: Of the whole set, without losses: tells that every example was counted, and once.
      losses: Sums of the layout's rows; as parts, those of the splits and then the whole set.
      counts: Sums of counts over outputs, the full model's first; as parts, the same.
      units: Number of units in each of these parts, as sums of ones: one row, one threshold.
    """

    whole: CalibrationTotals
    losses: RiskTotals
    counts: RiskTotals
    units: RiskTotals

    @classmethod
    def zero(cls, layout: Layout, splits: Splits, *, count_rows: int) -> Self:
        """Returns the sums over no units."""
        parts = splits.trials + 1
        return cls(
            whole=CalibrationTotals.zero(layout),
            losses=RiskTotals.zero(parts=parts, rows=len(layout.rows), thresholds=layout.thresholds),
            counts=RiskTotals.zero(parts=parts, rows=count_rows, thresholds=1 + layout.thresholds),
            units=RiskTotals.zero(parts=parts, rows=1, thresholds=1),
        )

    @classmethod
    def of_units(
        cls,
        keys: Sequence[str],
        fixed_losses: np.ndarray,
        *,
        counts: np.ndarray,
        layout: Layout,
        splits: Splits,
        scored: int | None = None,
    ) -> Self:
        """Returns the sums over some units; of the whole set nothing but how many examples they are of.

        Args:
          keys: One per unit: ids of examples, or names of clusters.
          fixed_losses: shape (units, objectives, thresholds), int64 in units of 2^-32.
          counts: shape (units, count rows, 1 + thresholds), int64.
          layout: What is summed of the losses.
          splits: How units are split.
          scored: Number of examples that the units are of; None if each is one.
        """
        parts = splits.parts(keys)
        scored = len(keys) if scored is None else scored
        return cls(
            whole=dataclasses.replace(CalibrationTotals.zero(layout), scored=scored),
            losses=RiskTotals.of_parts(layout.values(fixed_losses), parts),
            counts=RiskTotals.of_parts(counts, parts),
            units=RiskTotals.of_parts(np.ones((len(keys), 1, 1), np.int64), parts),
        )

    def merge(self, other: Self) -> Self:
        """Returns the sums over both sets of units together."""
        return type(self)(
            whole=self.whole.merge(other.whole),
            losses=self.losses.merge(other.losses),
            counts=self.counts.merge(other.counts),
            units=self.units.merge(other.units),
        )

    @property
    def sizes(self) -> np.ndarray:
        """Number of units in the calibration part of each trial, and then in the whole set; shape (trials + 1,)."""
        return np.asarray(self.units.sums[:, 0, 0])

    def calibration_part(self, trial: int, objective: Objective) -> Evidence:
        """Returns what the calibration part of a trial tells of a loss; of the whole set for the last trial, -1."""
        return self._evidence(objective, n=self.sizes[trial], sums=self.losses.sums[trial])

    def test_part(self, trial: int, objective: Objective) -> Evidence:
        """Returns what the rest of the set tells of a loss."""
        sizes, sums = self.sizes, self.losses.sums
        return self._evidence(objective, n=sizes[-1] - sizes[trial], sums=sums[-1] - sums[trial])

    def test_counts(self, trial: int) -> np.ndarray:
        """Returns the counts over outputs of a trial's test part; shape (count rows, 1 + thresholds), int64."""
        return np.asarray(self.counts.sums[-1] - self.counts.sums[trial])

    def whole_counts(self) -> np.ndarray:
        """Returns the counts over all outputs; shape (count rows, 1 + thresholds), int64."""
        return np.asarray(self.counts.sums[-1])

    def _evidence(self, objective: Objective, *, n: np.int64, sums: np.ndarray) -> Evidence:
        return Evidence(n=int(n), sums=self.whole.layout.sums_of(objective, sums))
