"""What is summed over the examples: integers made of one loss, so that sums merge exactly in any order.

Each p-value names the statistics that it needs (see `calm_beam.risk.pvalues.registry`), and workers sum those only.
"""

import dataclasses
from typing import Protocol

import numpy as np

from calm_beam.risk.fixed_point import LOSS_SCALE, squares_upper
from calm_beam.risk.log_capital import log_capital


class Statistic(Protocol):
    """A function of one loss; hashable, and equal to another exactly if it computes the same."""

    def values(self, fixed_losses: np.ndarray) -> np.ndarray:
        """Returns the statistic of every loss.

        Args:
          fixed_losses: Any shape, int64 in units of 2^-32, each in [-LOSS_SCALE, LOSS_SCALE].

        Returns:
          The same shape, int64.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss itself, in units of 2^-32."""

    def values(self, fixed_losses: np.ndarray) -> np.ndarray:
        """Returns the losses; see `Statistic.values`."""
        return fixed_losses


@dataclasses.dataclass(frozen=True)
class SquaredLoss:
    """The square of a loss in [0, 1], in units of 2^-32, rounded up."""

    def values(self, fixed_losses: np.ndarray) -> np.ndarray:
        """Returns the squares; see `Statistic.values`."""
        return squares_upper(fixed_losses)


@dataclasses.dataclass(frozen=True)
class IsFraction:
    """1 where the loss is neither 0 nor 1, else 0."""

    def values(self, fixed_losses: np.ndarray) -> np.ndarray:
        """Returns ones and zeros; see `Statistic.values`."""
        return np.asarray((fixed_losses != 0) & (fixed_losses != LOSS_SCALE), np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogCapital:
    """By how much the log capital of a constant bet grows, in units of 2^-32, rounded down.

    Attributes:
      delta: Risk tolerance that is bet against, in (0, 1).
      share: Share of the largest bet, in (0, 1).
    """

    delta: float
    share: float

    def values(self, fixed_losses: np.ndarray) -> np.ndarray:
        """Returns the growth; see `Statistic.values`."""
        return log_capital(fixed_losses, delta=self.delta, share=self.share)
