"""Exact totals of the losses over a calibration set: what workers send each other."""

import dataclasses
import operator
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.fixed_point import LOSS_SCALE, loss_sum_upper, to_fixed_point

_INT64_MAX = int(np.iinfo(np.int64).max)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RiskTotals:
    """The number of examples seen and the exact sums of their losses.

    An objective is a (consistency, metric) pair: every tolerance delta and level epsilon reuses its sums. Merging is
    exactly associative and commutative, with `zero` as its unit, so the totals do not depend on how the calibration
    set was sharded, ordered or retried. Values compare, hash and pickle by content; the arrays are read-only.

    Attributes:
      n: Number of examples.
      loss_sums: shape (objectives, thresholds), int64. Sums of losses in units of 2^-32, each in [0, n * LOSS_SCALE].

    >>> totals = RiskTotals.zero(objectives=1, thresholds=2).add([[0.5, 1.0]]).add([[0.0, 0.5]])
    >>> totals.n, totals.empirical_risk()
    (2, array([[0.25, 0.75]]))
    """

    n: int
    loss_sums: np.ndarray

    def __post_init__(self) -> None:
        n = operator.index(self.n)
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}.")
        given = np.asarray(self.loss_sums)
        if given.dtype != np.int64:
            raise TypeError(f"loss_sums must be int64 (see to_fixed_point), got dtype {given.dtype}.")
        if given.ndim != 2:
            raise ValueError(f"loss_sums must have shape (objectives, thresholds), got {given.shape}.")
        if given.size and (int(given.min()) < 0 or int(given.max()) > n * LOSS_SCALE):
            raise ValueError(
                f"loss_sums must be in [0, {n * LOSS_SCALE}] for n = {n} examples, "
                f"got values in [{given.min()}, {given.max()}]."
            )
        # A copy of our own, so that nobody changes a value that has been compared, hashed or sent.
        owned = given.copy()
        owned.setflags(write=False)
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "loss_sums", owned)

    @classmethod
    def zero(cls, *, objectives: int, thresholds: int) -> Self:
        """Returns the totals of no examples.

        Args:
          objectives: Number of (consistency, metric) pairs, at least 1.
          thresholds: Number of thresholds, at least 1.

        Returns:
          Totals with n = 0 and sums of shape (objectives, thresholds).

        Raises:
          ValueError: If either number is below 1.

        Source: ours.
        """
        for name, count in (("objectives", objectives), ("thresholds", thresholds)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}.")
        return cls(n=0, loss_sums=np.zeros((objectives, thresholds), dtype=np.int64))

    def add(self, losses: ArrayLike) -> Self:
        """Returns the totals with one more example.

        Args:
          losses: shape (objectives, thresholds), each in [0, 1].

        Returns:
          New totals with n + 1 examples.

        Raises:
          ValueError: If the shape differs, or a loss is NaN or outside [0, 1].
          OverflowError: If a sum leaves the int64 range.

        Source: CALM Algorithm 1 (the sum inside the empirical average).
        """
        return self._plus(1, to_fixed_point(losses), name="losses")

    def merge(self, other: "RiskTotals") -> Self:
        """Returns the totals of both sets of examples together.

        Args:
          other: Totals over the same objectives and thresholds, of other examples.

        Returns:
          New totals, with the counts and the sums added exactly.

        Raises:
          ValueError: If the shapes differ.
          OverflowError: If a sum leaves the int64 range.

        Source: ours.
        """
        return self._plus(other.n, other.loss_sums, name="other.loss_sums")

    def empirical_risk(self) -> np.ndarray:
        """Returns the mean loss of every objective at every threshold.

        Returns:
          Shape (objectives, thresholds), float64, each in [0, 1].

        Raises:
          ValueError: If there are no examples.

        Source: CALM, text after Eq. 9 (the empirical average).
        """
        if self.n == 0:
            raise ValueError("empirical_risk needs at least one example, got n = 0. Is the calibration set empty?")
        return np.asarray(loss_sum_upper(self.loss_sums) / self.n)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RiskTotals):
            return NotImplemented
        return self.n == other.n and np.array_equal(self.loss_sums, other.loss_sums)

    def __hash__(self) -> int:
        return hash((self.n, self.loss_sums.shape, self.loss_sums.tobytes()))

    def __reduce__(self) -> tuple[object, ...]:
        # Through the constructor, since numpy forgets on the way that an array is read-only.
        return (_restore, (type(self), self.n, self.loss_sums))

    def _plus(self, n: int, fixed_point_sums: np.ndarray, *, name: str) -> Self:
        if fixed_point_sums.shape != self.loss_sums.shape:
            raise ValueError(
                f"{name} has shape {fixed_point_sums.shape}, these totals have {self.loss_sums.shape} "
                "(objectives, thresholds). Only totals over the same objectives and grid can be added."
            )
        # Both sums are >= 0, so the true sum leaves int64 exactly where one exceeds the room left by the other. As no
        # partial sum exceeds the whole, every order and every merge tree of the same examples overflows alike.
        is_too_large = self.loss_sums > _INT64_MAX - fixed_point_sums
        if is_too_large.any():
            place = tuple(int(i) for i in np.argwhere(is_too_large)[0])
            raise OverflowError(
                f"loss_sums[{place[0]}, {place[1]}] overflows int64 at n = {self.n + n}: "
                f"{int(self.loss_sums[place])} + {int(fixed_point_sums[place])}. "
                f"The sums hold {_INT64_MAX // LOSS_SCALE} examples of loss 1; use a smaller calibration set."
            )
        return type(self)(n=self.n + n, loss_sums=self.loss_sums + fixed_point_sums)


def _restore(cls: type[RiskTotals], n: int, loss_sums: np.ndarray) -> RiskTotals:
    return cls(n=n, loss_sums=loss_sums)
