"""What a p-value is computed from: exact sums over the examples, or every single loss in a fixed order.

What is summed are integers made of one loss, so that sums merge exactly in any order. Each p-value names the statistics
that it needs (see `calm_beam.risk.pvalues.method`), and workers sum those only.

Some p-values bet on the examples one after the other. The order is fixed before any loss is known. It must not depend
on the losses, nor on how work was split: we sort by a salted hash of each unit's key.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self

import numpy as np

from calm_beam.errors import CalmBeamError
from calm_beam.risk.elementary import log_capital
from calm_beam.risk.fixed_point import LOSS_SCALE, loss_sum_upper, squares_upper

_GIB = 2**30
# What any machine can hold, next to the copies that sending and sorting it take.
MOST_BYTES = _GIB


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

    def upper(self, statistic: Statistic) -> np.ndarray:
        """Returns the sums of a statistic of losses as float64, rounded up; shape (settings,)."""
        return loss_sum_upper(self.sums[statistic])

    def risks(self) -> np.ndarray:
        """Returns the mean losses, shape (settings,); 0 where there are no units."""
        return np.asarray(self.upper(Loss()) / max(1, self.n))

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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class BettingTable:
    """Losses of units (examples, or clusters of them) with the keys by which they are sorted.

    Merging is associative and commutative in `in_order`, and equality compares that.

    Attributes:
      chunks: Pairs of sort keys, shape (units, 2), uint64, and losses, shape (units, objectives, thresholds), int64.
    """

    chunks: tuple[tuple[np.ndarray, np.ndarray], ...] = ()

    def __post_init__(self) -> None:
        size = sum(losses.nbytes for _, losses in self.chunks)
        if size > MOST_BYTES:
            units = sum(len(losses) for _, losses in self.chunks)
            raise EvidenceError(
                f"the losses of {units} examples take {size / _GIB:.1f} GiB, and p-value wsr keeps up to "
                f"{MOST_BYTES / _GIB:g} GiB of them in memory. Take signed_mixture, which keeps sums only, or fewer "
                "thresholds."
            )

    @classmethod
    def of(cls, keys: Sequence[str], fixed_losses: np.ndarray, *, salt: str) -> Self:
        """Returns the table of some units.

        Args:
          keys: One per unit, distinct over the whole calibration set: ids of examples, or names of clusters.
          fixed_losses: shape (units, objectives, thresholds), int64 in units of 2^-32.
          salt: Decides the order; fixed before any loss is known.
        """
        assert len(keys) == len(fixed_losses)
        return cls(chunks=((_sort_keys(keys, salt=salt), fixed_losses),))

    def merge(self, other: Self) -> Self:
        """Returns the table of both sets of units together.

        Raises:
          EvidenceError: If it would be too large.
        """
        chunks: list[tuple[np.ndarray, np.ndarray]] = []
        for chunk in self.chunks + other.chunks:
            # Each is longer than the next, so that there are few of them and every loss is copied few times.
            while chunks and len(chunks[-1][0]) <= len(chunk[0]):
                chunk = _joined([chunks.pop(), chunk])
            chunks.append(chunk)
        return dataclasses.replace(self, chunks=tuple(chunks))

    def in_order(self) -> np.ndarray:
        """Returns the losses in betting order; shape (units, objectives, thresholds), int64."""
        keys, losses = _joined(self.chunks)
        return np.asarray(losses[_sorted(keys)])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BettingTable):
            return NotImplemented
        if not (self.chunks and other.chunks):
            return not (self.chunks or other.chunks)
        return np.array_equal(self.in_order(), other.in_order())

    def __hash__(self) -> int:
        return hash(sum(len(losses) for _, losses in self.chunks))


def betting_order(keys: Sequence[str], *, salt: str) -> np.ndarray:
    """Returns the indices of units in the order in which `BettingTable` has their losses; shape (units,), int64.

    Args:
      keys: As in `BettingTable.of`.
      salt: As there.
    """
    return _sorted(_sort_keys(keys, salt=salt))


def _sort_keys(keys: Sequence[str], *, salt: str) -> np.ndarray:
    hashed = b"".join(hashlib.sha256(f"{salt}\n{key}".encode()).digest()[:16] for key in keys)
    return np.frombuffer(hashed, ">u8").reshape(-1, 2).astype(np.uint64)


def _sorted(keys: np.ndarray) -> np.ndarray:
    return np.lexsort((keys[:, 1], keys[:, 0]))


def _joined(chunks: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([keys for keys, _ in chunks]), np.concatenate([losses for _, losses in chunks])
