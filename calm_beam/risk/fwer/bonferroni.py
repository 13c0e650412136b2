"""Bonferroni's correction: the simplest procedure, and the yardstick for the others."""

import numpy as np
from numpy.typing import ArrayLike

from .arguments import require_arguments
from .result import FwerResult


def bonferroni_test(p_values: ArrayLike, *, epsilon: float) -> FwerResult:
    """Returns the hypotheses whose p-values are at most epsilon divided by their number.

    Controls the FWER at epsilon however the p-values depend on each other, in any order (union bound). Finer grids cost
    power, which fixed sequence testing avoids.

    Args:
      p_values: shape (..., thresholds), each in [0, 1].
      epsilon: Allowed probability of any false rejection, in (0, 1).

    Returns:
      Rejected hypotheses; all are tested.

    Raises:
      ValueError: If `p_values` has no axis or holds NaN or values outside [0, 1], or `epsilon` is out of range.

    Source: Angelopoulos et al. (2021), Learn then Test, sec. on Bonferroni correction; Dunn (1961).

    >>> bonferroni_test([0.04, 0.01, 0.02, 0.5], epsilon=0.05).rejected
    array([False,  True, False, False])
    """
    checked = require_arguments(p_values, epsilon=epsilon)
    rejected = checked <= epsilon / max(checked.shape[-1], 1)
    return FwerResult(rejected=rejected, tested=np.ones_like(rejected))
