"""The fallback procedure: a fixed sequence that goes on after a failure, with what is left of epsilon."""

import math

import numpy as np
from numpy.typing import ArrayLike

from .arguments import require_arguments
from .result import FwerResult

# Weights such as 20 times 0.05 add up to 1 only almost.
_ROUNDING = 1e-12


def fallback_test(p_values: ArrayLike, *, epsilon: float, weights: ArrayLike | None = None) -> FwerResult:
    """Returns what the fallback procedure rejects.

    Each hypothesis brings its weight times epsilon. One that is rejected hands all it was tested at to the next; one
    that is not keeps it, and the next is tested at its own share alone. With all the weight on the first this is fixed
    sequence testing; with the weight on several starting points it rejects at least what `multi_start_test` does.
    Controls the FWER at epsilon however the p-values depend on each other, if order and weights were fixed before the
    losses were seen.

    Args:
      p_values: shape (..., thresholds), each in [0, 1], in testing order.
      epsilon: Allowed probability of any false rejection, in (0, 1).
      weights: shape (thresholds,), each at least 0, adding up to at most 1. None divides 1 evenly.

    Returns:
      Rejected hypotheses; all with a positive share were tested.

    Raises:
      ValueError: If `weights` has another shape, is negative or NaN or adds up to more than 1; if `p_values` has no
        axis or holds NaN or values outside [0, 1]; if `epsilon` is out of range.

    Source: Wiens (2003), a fixed sequence Bonferroni procedure; Wiens and Dmitrienko (2005), the fallback procedure.

    >>> fallback_test([0.01, 0.03, 0.9, 0.04, 0.01], epsilon=0.05).rejected
    array([ True, False, False, False,  True])
    """
    checked = require_arguments(p_values, epsilon=epsilon)
    size = checked.shape[-1]
    shares = np.full(size, 1.0 / max(size, 1)) if weights is None else _checked_weights(weights, size)
    rejected = np.zeros(checked.shape, dtype=bool)
    tested = np.zeros(checked.shape, dtype=bool)
    handed_on = np.zeros(checked.shape[:-1])
    for index, share in enumerate(shares):
        weight = np.minimum(handed_on + share, 1.0)
        tested[..., index] = weight > 0
        rejected[..., index] = (weight > 0) & (checked[..., index] <= epsilon * weight)
        handed_on = np.where(rejected[..., index], weight, 0.0)
    return FwerResult(rejected=rejected, tested=tested)


def _checked_weights(weights: ArrayLike, size: int) -> np.ndarray:
    checked = np.asarray(weights, dtype=np.float64)
    if checked.shape != (size,):
        raise ValueError(f"weights must have one entry per threshold, shape ({size},), got {checked.shape}.")
    # Asked this way round because every comparison with NaN is false.
    if not (checked >= 0).all() or not math.fsum(checked) <= 1 + _ROUNDING:
        raise ValueError(f"weights must be at least 0 and add up to at most 1, got {checked.tolist()}.")
    return checked
