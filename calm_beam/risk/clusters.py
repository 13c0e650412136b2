"""Losses of examples that belong together: averaged, since the cluster is what is drawn independently.

Questions on one paragraph, or turns of one conversation, resemble each other. Counted one by one they would feign more
independent draws than there were, and the bound would not hold.
"""

import dataclasses
from typing import Self

import numpy as np


def means_up(sums: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns means of losses, rounded up to a multiple of 2^-32.

    Args:
      sums: Any shape, int64 in units of 2^-32.
      sizes: Of how many losses, at least 1; of a shape that broadcasts to it.
    """
    # Integer division rounds down, so that of the negated sum rounds up.
    return np.asarray(-(-sums // sizes))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ClusterLosses:
    """Sums over the examples of one cluster; merging is exact, associative and commutative.

    Attributes:
      size: Number of examples.
      sums: Sums of losses, any shape, int64 in units of 2^-32.
    """

    size: int
    sums: np.ndarray

    def merge(self, other: Self) -> Self:
        """Returns the sums over both parts of the cluster."""
        return type(self)(size=self.size + other.size, sums=self.sums + other.sums)

    def mean(self) -> np.ndarray:
        """Returns the mean losses, rounded up to a multiple of 2^-32; the shape of `sums`, int64.

        >>> ClusterLosses(size=2, sums=np.array([3, -3])).mean()
        array([ 2, -1])
        """
        return means_up(self.sums, np.asarray(self.size))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterLosses):
            return NotImplemented
        return self.size == other.size and np.array_equal(self.sums, other.sums)

    def __hash__(self) -> int:
        return hash((self.size, self.sums.tobytes()))
