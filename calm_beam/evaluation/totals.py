"""Exact totals over many random parts of one set of examples at once: for repeated splits into calibration and test."""

import dataclasses
from typing import Self

import numpy as np

from calm_beam.risk.totals import added

# Integers below this are float64s, so that a sum of integers that stays below it is exact in any order of addition.
_EXACT = 2**53


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PartTotals:
    """For each trial, the number of units in its part and exact sums over them; merging is exact in any order.

    Attributes:
      counts: shape (trials,), int64.
      sums: shape (trials, rows, thresholds), int64.
    """

    counts: np.ndarray
    sums: np.ndarray

    @classmethod
    def zero(cls, *, trials: int, rows: int, thresholds: int) -> Self:
        """Returns the totals of no units."""
        return cls(counts=np.zeros(trials, np.int64), sums=np.zeros((trials, rows, thresholds), np.int64))

    @classmethod
    def of(cls, values: np.ndarray, is_in_part: np.ndarray) -> Self:
        """Returns the totals of some units.

        Args:
          values: shape (units, rows, thresholds), int64: what is summed, as for `RiskTotals.of`.
          is_in_part: shape (units, trials), bool: which units each trial's part holds.

        Raises:
          ValueError: If the numbers of units differ.
          OverflowError: If the largest value times the number of units is 2^53 or more; give fewer units at a time.
        """
        if len(values) != len(is_in_part):
            raise ValueError(f"values are of {len(values)} units, is_in_part of {len(is_in_part)}.")
        largest = max(int(values.max(initial=0)), -int(values.min(initial=0)))
        if largest * len(values) >= _EXACT:
            raise OverflowError(
                f"the sum of {len(values)} values up to {largest} may pass 2^53. Add fewer units at a time."
            )
        # As products of float matrices, which are ten times as fast as those of integers, and as exact here. One for
        # each row: matrix libraries give larger ones to several threads, which is slow where workers share the cores.
        by_row = is_in_part.T.astype(np.float64) @ np.moveaxis(values, 1, 0).astype(np.float64)
        return cls(
            counts=is_in_part.sum(axis=0, dtype=np.int64),
            sums=np.ascontiguousarray(np.moveaxis(by_row, 0, 1).astype(np.int64)),
        )

    def merge(self, other: Self) -> Self:
        """Returns the totals of both sets of units together.

        Raises:
          ValueError: If they are over other numbers of trials, rows or thresholds.
          OverflowError: If a sum leaves the int64 range.
        """
        if other.sums.shape != self.sums.shape:
            raise ValueError(f"other.sums has shape {other.sums.shape}, these totals have {self.sums.shape}.")
        merged, has_overflowed = added(self.sums, other.sums)
        if has_overflowed.any():
            raise OverflowError("a sum overflows int64. Use a smaller calibration set.")
        return type(self)(counts=self.counts + other.counts, sums=merged)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PartTotals):
            return NotImplemented
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.sums, other.sums)

    def __hash__(self) -> int:
        return hash((self.counts.tobytes(), self.sums.tobytes()))
