"""What every procedure returns."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FwerResult:
    """Which hypotheses were looked at, and which were rejected, in testing order.

    Leading axes, if any, are separate calibrations, each tested by itself.

    Attributes:
      rejected: shape (..., thresholds), bool. Thresholds found safe. None at all is a result too: never exit.
      tested: shape (..., thresholds), bool. Thresholds whose p-values the decision rests on; all rejected ones are.
    """

    rejected: np.ndarray
    tested: np.ndarray

    def __post_init__(self) -> None:
        assert self.rejected.shape == self.tested.shape
        assert not (self.rejected & ~self.tested).any()

    def last_rejected(self) -> np.ndarray:
        """Returns the index of the last rejected hypothesis: with descending thresholds, the lowest that is safe.

        Returns:
          Shape (...), int; -1 where none is rejected.

        Source: CALM Algorithm 1 (the last rejected threshold is returned).

        >>> FwerResult(rejected=np.array([True, False, True]), tested=np.ones(3, bool)).last_rejected()
        array(2)
        """
        indices = np.arange(self.rejected.shape[-1])
        return np.asarray(np.max(np.where(self.rejected, indices, -1), axis=-1, initial=-1))
