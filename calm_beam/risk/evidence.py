"""The evidence that p-values are computed from: exact sums over the examples, or every single loss in a fixed order.

Workers send each other totals over parts of a calibration set. The summands are integers computed from one loss, so
sums merge exactly in any order. Each p-value names the statistics that it needs (see `calm_beam.risk.pvalues.method`),
and workers sum those only. Sums of digests modulo 2^256 do not depend on the order of the set either: they are a
fingerprint of a set, added in batches.

Some p-values bet on the examples one after the other. The order is fixed before any loss is known. It must not depend
on the losses, nor on the sharding: we sort by a salted hash of each unit's key.
"""

import dataclasses
import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self

import numpy as np

from calm_beam.errors import CalmBeamError
from calm_beam.risk.elementary import log_capital
from calm_beam.risk.losses import LOSS_SCALE, loss_sum_upper, squares_upper

_GIB = 2**30
# Fits on any machine, together with the copies for sending and sorting.
MOST_BYTES = _GIB


class Statistic(Protocol):
    """A function of one loss; hashable, and equal to another one exactly if both compute the same."""

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
    """The growth of the log capital of a constant bet, in units of 2^-32, rounded down.

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
    """The losses do not allow the planned p-value."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """The evidence about one loss under every setting, such as every threshold of a grid.

    Attributes:
      n: Number of independent units: examples, or clusters of them.
      sums: Sums of each statistic that was asked for; shape (settings,), int64.
      table: Losses in betting order, shape (n, settings), int64 in units of 2^-32; None if not asked for.
    """

    n: int
    sums: Mapping[Statistic, np.ndarray]
    table: np.ndarray | None = None

    @classmethod
    def of(cls, fixed_losses: np.ndarray, statistics: Iterable[Statistic], *, table: np.ndarray | None = None) -> Self:
        """Returns the evidence from an array of losses.

        Args:
          fixed_losses: shape (units, settings), int64 in units of 2^-32.
          statistics: Statistics to sum over the units.
          table: Losses in betting order, as in the class.
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
        """Returns the evidence of both sets of units together, without tables."""
        assert self.table is None, "single losses are put in order where all of them are known"
        assert other.table is None
        return type(self)(n=self.n + other.n, sums={name: sums + other.sums[name] for name, sums in self.sums.items()})

    @classmethod
    def side_by_side(cls, parts: Sequence[Self]) -> Self:
        """Returns the evidence of several grids over the same units as one grid, without tables."""
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
            # Each chunk is longer than the next, so chunks are few and every loss is copied few times.
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
      keys: One per unit, distinct over the whole calibration set: ids of examples, or names of clusters.
      salt: Decides the order; fixed before any loss is known.
    """
    return _sorted(_sort_keys(keys, salt=salt))


def _sort_keys(keys: Sequence[str], *, salt: str) -> np.ndarray:
    hashed = b"".join(hashlib.sha256(f"{salt}\n{key}".encode()).digest()[:16] for key in keys)
    return np.frombuffer(hashed, ">u8").reshape(-1, 2).astype(np.uint64)


def _sorted(keys: np.ndarray) -> np.ndarray:
    return np.lexsort((keys[:, 1], keys[:, 0]))


def _joined(chunks: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([keys for keys, _ in chunks]), np.concatenate([losses for _, losses in chunks])


_INT64_MAX = int(np.iinfo(np.int64).max)
# Integers below this are float64s, so that a sum of integers that stays below it is exact in any order of addition.
_EXACT_IN_FLOAT = 2**53
MODULUS = 2**256
DIGEST_BYTES = 32
# A digest is eight numbers of 32 bits; sums of 2^32 of them still fit into 64.
_WORDS = np.dtype(">u4")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RiskTotals:
    """The number of units seen (examples, or clusters of them) and exact sums of integers computed from their losses.

    It also sums the losses of one cluster's examples, whose mean is the cluster's loss.

    The caller decides what a row sums: see `calm_beam.risk.evidence`. Merging is exactly associative and
    commutative, with `zero` as its unit, so the totals do not depend on how the calibration set was sharded, ordered or
    retried. Values compare, hash and pickle by content; the arrays are read-only.

    Attributes:
      n: Number of units.
      sums: shape (rows, thresholds), int64; leading axes hold several of these.

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
        # A private copy, so that callers cannot change a value that has been compared, hashed or sent.
        owned = given.copy()
        owned.setflags(write=False)
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "sums", owned)

    @classmethod
    def zero(cls, *, rows: int, thresholds: int, parts: int | None = None) -> Self:
        """Returns the totals of no units.

        Args:
          rows: Number of rows, at least 1.
          thresholds: Number of thresholds, at least 1.
          parts: Number of parts that are summed at once, as by `of_parts`; None for one sum over all units.

        Returns:
          Totals with n = 0 and sums of shape (rows, thresholds), or (parts, rows, thresholds).

        Raises:
          ValueError: If either number is below 1.

        Source: ours.
        """
        for name, count in (("rows", rows), ("thresholds", thresholds)):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}.")
        of_each = () if parts is None else (parts,)
        return cls(n=0, sums=np.zeros((*of_each, rows, thresholds), dtype=np.int64))

    @classmethod
    def of(cls, values: np.ndarray) -> Self:
        """Returns the totals of some units.

        Args:
          values: shape (units, rows, thresholds), int64.

        Raises:
          ValueError: If the shape is wrong.
          TypeError: If the values are not int64.
          OverflowError: If a sum may leave the int64 range.

        Source: CALM Algorithm 1 (the sum inside the empirical average).
        """
        if values.ndim != 3:
            raise ValueError(f"values must have shape (units, rows, thresholds), got {values.shape}.")
        largest = _largest(values)
        if largest * len(values) > _INT64_MAX:
            raise OverflowError(f"the sum of {len(values)} values up to {largest} overflows int64.")
        return cls(n=len(values), sums=values.sum(axis=0))

    @classmethod
    def of_parts(cls, values: np.ndarray, is_in_part: np.ndarray) -> Self:
        """Returns the sums over many parts of some units at once, as repeated random splits need them.

        Args:
          values: shape (units, rows, thresholds), int64.
          is_in_part: shape (units, parts), bool: which units each part holds.

        Returns:
          Totals whose n counts all of the units, and whose sums have shape (parts, rows, thresholds).

        Raises:
          ValueError: If the numbers of units differ.
          OverflowError: If the largest value times the number of units is 2^53 or more; give fewer units at a time.
        """
        if len(values) != len(is_in_part):
            raise ValueError(f"values are of {len(values)} units, is_in_part of {len(is_in_part)}.")
        largest = _largest(values)
        if largest * len(values) >= _EXACT_IN_FLOAT:
            raise OverflowError(
                f"the sum of {len(values)} values up to {largest} may pass 2^53. Add fewer units at a time."
            )
        # Products of float matrices are ten times as fast as those of integers, and exact here. One product for
        # each row: matrix libraries give larger ones to several threads, which is slow where workers share the cores.
        by_row = is_in_part.T.astype(np.float64) @ np.moveaxis(values, 1, 0).astype(np.float64)
        return cls(n=len(values), sums=np.ascontiguousarray(np.moveaxis(by_row, 0, 1).astype(np.int64)))

    def merge(self, other: Self) -> Self:
        """Returns the totals of both sets of units together.

        Args:
          other: Totals over the same rows and thresholds, of other units.

        Returns:
          New totals, with the counts and the sums added exactly.

        Raises:
          ValueError: If the shapes differ.
          OverflowError: If a sum leaves the int64 range, beyond two billion units of loss 1.

        Source: ours.
        """
        if other.sums.shape != self.sums.shape:
            raise ValueError(
                f"other.sums has shape {other.sums.shape}, these totals have {self.sums.shape} (rows, thresholds). "
                "Only totals over the same objectives and grid can be added."
            )
        merged = self.sums + other.sums
        # Two's complement: the sum of two numbers of one sign overflows exactly if it has the other sign.
        has_overflowed = ((self.sums ^ merged) & (other.sums ^ merged)) < 0
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
        # Through the constructor, since pickling loses numpy's read-only flag.
        return (_restore, (type(self), self.n, self.sums))


def means_up(sums: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns the mean losses of clusters of examples, rounded up to a multiple of 2^-32.

    Losses are averaged since clusters are what is drawn independently. Questions on one paragraph, or turns of one
    conversation, resemble each other: counted one by one they would feign more independent draws than there were, and
    the bound would not hold.

    Args:
      sums: Any shape, int64 in units of 2^-32: sums over each cluster.
      sizes: Sizes of the clusters, at least 1; of a shape that broadcasts to that of `sums`.
    """
    # Integer division rounds down, so dividing the negated sum rounds up.
    return np.asarray(-(-sums // sizes))


def _largest(values: np.ndarray) -> int:
    """Returns the largest magnitude; 0 if there are no values."""
    return max(int(values.max(initial=0)), -int(values.min(initial=0)))


def _restore(cls: type[RiskTotals], n: int, sums: np.ndarray) -> RiskTotals:
    return cls(n=n, sums=sums)


def sum_of_digests(digests: bytes) -> int:
    r"""Returns the sum of digests modulo 2^256, each a big-endian number.

    Args:
      digests: Concatenated digests of 32 bytes each; at most 2^32 of them.

    Source: ours.

    >>> sum_of_digests(bytes(31) + b"\x02" + b"\xff" * 32)
    1
    """
    words = np.frombuffer(digests, _WORDS).reshape(-1, DIGEST_BYTES // _WORDS.itemsize)
    total = 0
    for word in words.sum(axis=0, dtype=np.uint64).tolist():
        total = (total << 8 * _WORDS.itemsize) + word
    return total % MODULUS
