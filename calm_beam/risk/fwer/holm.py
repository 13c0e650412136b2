"""Holm's procedure: no order needed, and never worse than Bonferroni's."""

import numpy as np
from numpy.typing import ArrayLike

from .arguments import require_arguments
from .result import FwerResult


def holm_test(p_values: ArrayLike, *, epsilon: float) -> FwerResult:
    """Returns what Holm's step-down procedure rejects.

    The least p-value has to be at most epsilon / K for K thresholds, the next epsilon / (K - 1), and so on to the first
    that is not. Controls the FWER at epsilon however the p-values depend on each other, in any order.

    Args:
      p_values: shape (..., thresholds), each in [0, 1].
      epsilon: Allowed probability of any false rejection, in (0, 1).

    Returns:
      Rejected hypotheses; all are tested, since every p-value has a say in the order.

    Raises:
      ValueError: If `p_values` has no axis or holds NaN or values outside [0, 1], or `epsilon` is out of range.

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.

    >>> holm_test([0.04, 0.01, 0.02, 0.5], epsilon=0.05).rejected
    array([False,  True, False, False])
    """
    checked = require_arguments(p_values, epsilon=epsilon)
    size = checked.shape[-1]
    order = np.argsort(checked, axis=-1, kind="stable")
    passes = np.take_along_axis(checked, order, axis=-1) <= epsilon / (size - np.arange(size))
    rejected = np.zeros(checked.shape, dtype=bool)
    np.put_along_axis(rejected, order, np.logical_and.accumulate(passes, axis=-1), axis=-1)
    return FwerResult(rejected=rejected, tested=np.ones_like(rejected))
