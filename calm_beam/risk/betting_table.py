"""Every single loss, to be put in an order that was fixed before any of them was known.

Some p-values bet on the examples one after the other. Their order must not depend on the losses, nor on how work was
split: we sort by a salted hash of each unit's key.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Self

import numpy as np

from calm_beam.risk.evidence import EvidenceError

_GIB = 2**30
# What any machine can hold, next to the copies that sending and sorting it take.
MOST_BYTES = _GIB


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
