"""Exact totals over a calibration set: what workers send each other."""

import dataclasses
import operator
from typing import Self

import numpy as np

from calm_beam.risk.clusters import means_up

_INT64_MAX = int(np.iinfo(np.int64).max)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RiskTotals:
    """The number of units seen (examples, or clusters of them) and exact sums of integers made of their losses.

    So are the losses of the examples of one cluster summed, of which the mean is its loss.

    What a row sums is up to the caller: see `calm_beam.risk.statistics`. Merging is exactly associative and
    commutative, with `zero` as its unit, so the totals do not depend on how the calibration set was sharded, ordered or
    retried. Values compare, hash and pickle by content; the arrays are read-only.

    Attributes:
      n: Number of units.
      sums: shape (rows, thresholds), int64; with leading axes, several of these.

    >>> totals = RiskTotals.of(np.array([[[1, 2]], [[3, 5]]])).merge(RiskTotals.of(np.array([[[0, -1]]])))
    >>> totals.n, totals.sums
    (3, array([[4, 6]]))
    """

    n: int
    sums: np.ndarray

    def __post_init__(self) -> None:
        n = operator.index(self.n)
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}.")
        given = np.asarray(self.sums)
        if given.dtype != np.int64:
            raise TypeError(f"sums must be int64 (see to_fixed_point), got dtype {given.dtype}.")
        if given.ndim < 2:
            raise ValueError(f"sums must have shape (rows, thresholds), got {given.shape}.")
        # A copy of our own, so that nobody changes a value that has been compared, hashed or sent.
        owned = given.copy()
        owned.setflags(write=False)
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "sums", owned)

    @classmethod
    def zero(cls, *, rows: int, thresholds: int) -> Self:
        """Returns the totals of no units.

        Args:
          rows: Number of rows, at least 1.
          thresholds: Number of thresholds, at least 1.

        Returns:
          Totals with n = 0 and sums of shape (rows, thresholds).

        Raises:
          ValueError: If either number is below 1.

        Source: ours.
        """
        for name, count in (("rows", rows), ("thresholds", thresholds)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}.")
        return cls(n=0, sums=np.zeros((rows, thresholds), dtype=np.int64))

    @classmethod
    def of(cls, values: np.ndarray) -> Self:
        """Returns the totals of some units.

        Args:
          values: shape (units, rows, thresholds), int64.

        Raises:
          ValueError: If the shape is another one.
          TypeError: If the values are not int64.
          OverflowError: If a sum may leave the int64 range.

        Source: CALM Algorithm 1 (the sum inside the empirical average).
        """
        if values.ndim != 3:
            raise ValueError(f"values must have shape (units, rows, thresholds), got {values.shape}.")
        largest = max(int(values.max(initial=0)), -int(values.min(initial=0)))
        if largest * len(values) > _INT64_MAX:
            raise OverflowError(f"the sum of {len(values)} values up to {largest} overflows int64.")
        return cls(n=len(values), sums=values.sum(axis=0))

    def merge(self, other: Self) -> Self:
        """Returns the totals of both sets of units together.

        Args:
          other: Totals over the same rows and thresholds, of other units.

        Returns:
          New totals, with the counts and the sums added exactly.

        Raises:
          ValueError: If the shapes differ.
          OverflowError: If a sum leaves the int64 range: beyond two billion units of loss 1.

        Source: ours.
        """
        if other.sums.shape != self.sums.shape:
            raise ValueError(
                f"other.sums has shape {other.sums.shape}, these totals have {self.sums.shape} (rows, thresholds). "
                "Only totals over the same objectives and grid can be added."
            )
        merged, has_overflowed = added(self.sums, other.sums)
        if has_overflowed.any():
            index = tuple(np.argwhere(has_overflowed)[0].tolist())
            raise OverflowError(
                f"sums{list(index)} overflows int64 at n = {self.n + other.n}: {int(self.sums[index])} + "
                f"{int(other.sums[index])}. Use a smaller calibration set."
            )
        return type(self)(n=self.n + other.n, sums=merged)

    def mean_up(self) -> np.ndarray:
        """Returns the means of losses, rounded up to a multiple of 2^-32; the shape of `sums`, int64.

        >>> RiskTotals(n=2, sums=np.array([[3, -3]])).mean_up()
        array([[ 2, -1]])
        """
        return means_up(self.sums, np.asarray(self.n))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RiskTotals):
            return NotImplemented
        return self.n == other.n and np.array_equal(self.sums, other.sums)

    def __hash__(self) -> int:
        return hash((self.n, self.sums.shape, self.sums.tobytes()))

    def __reduce__(self) -> tuple[object, ...]:
        # Through the constructor, since numpy forgets on the way that an array is read-only.
        return (_restore, (type(self), self.n, self.sums))


def added(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sum of two int64 arrays of one shape, and where it has left the int64 range.

    Source: ours.
    """
    merged = first + second
    # Two's complement: the sum of two numbers of one sign overflows exactly if it has the other sign.
    return merged, ((first ^ merged) & (second ^ merged)) < 0


def _restore(cls: type[RiskTotals], n: int, sums: np.ndarray) -> RiskTotals:
    return cls(n=n, sums=sums)
