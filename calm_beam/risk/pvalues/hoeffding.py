"""Hoeffding's bound as a p-value: the paper's first choice, and the loosest."""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.elementary import gap
from calm_beam.risk.evidence import Evidence, Loss

from .method import PValueMethod, exp_upper, require_loss_sum


def hoeffding_p_value(loss_sum: ArrayLike, *, n: int, delta: float) -> np.ndarray:
    """Returns the Hoeffding p-value of "the risk exceeds delta", one per threshold.

    A small value is evidence that the threshold is safe. Valid for any i.i.d. losses in [0, 1],
    however they are distributed. Never tighter than Hoeffding-Bentkus, and far looser near risk 0.

    Args:
      loss_sum: shape (thresholds,). Sum of the n losses at each threshold, each in [0, n].
      n: Number of calibration examples, at least 1.
      delta: Risk tolerance, in (0, 1).

    Returns:
      Shape (thresholds,), values in (0, 1], rounded up. Non-decreasing in `loss_sum`; 1 once the mean reaches delta.

    Raises:
      TypeError: If `n` is not an integer.
      ValueError: If `n`, `delta` or any entry of `loss_sum` is out of range or NaN.

    Source: CALM Eq. 9 (Hoeffding p-value); Hoeffding (1963), Theorem 1.

    >>> hoeffding_p_value(np.array([60.0, 80.0, 100.0]), n=1000, delta=0.1).round(3)
    array([0.041, 0.449, 1.   ])
    """
    sums, n, delta = require_loss_sum(loss_sum, n=n, delta=delta)
    below = np.maximum(0.0, -gap(sums, n=n, delta=delta))
    return exp_upper(-2.0 * below * below / n)


def _p_values(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    return hoeffding_p_value(evidence.upper(Loss()), n=evidence.n, delta=delta)


HOEFFDING = PValueMethod(name="hoeffding", statistics=lambda _: (Loss(),), p_values=_p_values)
