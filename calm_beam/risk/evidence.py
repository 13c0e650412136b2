"""What a p-value is computed from."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from calm_beam.errors import CalmBeamError
from calm_beam.risk.fixed_point import loss_sum_upper
from calm_beam.risk.statistics import Loss, Statistic


class EvidenceError(CalmBeamError, ValueError):
    """The losses that were found do not allow the p-value that was planned."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """What was gathered about one loss under every setting, such as every threshold of a grid.

    Attributes:
      n: Number of independent units: examples, or clusters of them.
      sums: For each statistic that was asked for, its sums; shape (settings,), int64.
      table: Losses in betting order, shape (n, settings), int64 in units of 2^-32; None unless it was asked for.
    """

    n: int
    sums: Mapping[Statistic, np.ndarray]
    table: np.ndarray | None = None

    @classmethod
    def of(cls, fixed_losses: np.ndarray, statistics: Iterable[Statistic], *, table: np.ndarray | None = None) -> Self:
        """Returns the evidence of losses that are at hand.

        Args:
          fixed_losses: shape (units, settings), int64 in units of 2^-32.
          statistics: What is summed over the units.
          table: As in the class.
        """
        sums = {statistic: statistic.values(fixed_losses).sum(axis=0) for statistic in statistics}
        return cls(n=len(fixed_losses), sums=sums, table=table)

    @property
    def loss_sums(self) -> np.ndarray:
        """Exact sums of losses in units of 2^-32; shape (settings,), int64."""
        return self.sums[Loss()]

    def risks(self) -> np.ndarray:
        """Returns the mean losses, shape (settings,); 0 where there are no units."""
        return np.asarray(loss_sum_upper(self.loss_sums) / max(1, self.n))

    def merge(self, other: Self) -> Self:
        """Returns the evidence of both sets of units together, of sums alone."""
        assert self.table is None, "single losses are put in order where all of them are known"
        assert other.table is None
        return type(self)(n=self.n + other.n, sums={name: sums + other.sums[name] for name, sums in self.sums.items()})

    @classmethod
    def side_by_side(cls, parts: Sequence[Self]) -> Self:
        """Returns the evidence of several grids of settings as one grid, of sums alone; all are of the same units."""
        first = parts[0]
        return cls(n=first.n, sums={name: np.concatenate([part.sums[name] for part in parts]) for name in first.sums})
