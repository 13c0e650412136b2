"""The binomial test, exact if every loss is 0 or 1."""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.elementary import binomial_cdf
from calm_beam.risk.evidence import Evidence, EvidenceError, IsFraction, Loss

from .method import LEAST, PValueMethod, require_loss_sum


def exact_binomial_p_value(loss_sum: ArrayLike, *, n: int, delta: float) -> np.ndarray:
    """Returns the binomial p-value of "the risk exceeds delta", one per threshold: P(Bin(n, delta) <= sum).

    This is the tightest p-value for losses of 0 and 1, such as those of exact match. The Bentkus half of
    Hoeffding-Bentkus is e times it, which is the price of losses in between.

    Args:
      loss_sum: shape (..., thresholds). Number of the n losses that are 1, at each threshold; the others must be 0.
      n: Number of calibration examples, at least 1.
      delta: Risk tolerance, in (0, 1).

    Returns:
      The same shape, values in (0, 1], rounded up. Non-decreasing in `loss_sum`. Above delta it does not jump to 1, and
      need not: it is the test's exact size there.

    Raises:
      TypeError: If `n` is not an integer.
      ValueError: If `n`, `delta` or any entry of `loss_sum` is out of range or NaN, or a sum is not whole. (Whole sums
        do not prove that the losses are: callers must know that they are 0 or 1.)

    Source: Clopper and Pearson (1934); the distribution function decreases in the success probability, so its
    value at delta bounds it for every larger risk.

    >>> exact_binomial_p_value([70, 80, 90, 100], n=1000, delta=0.1).round(4)
    array([0.0006, 0.0176, 0.1582, 0.5266])
    """
    sums, n, delta = require_loss_sum(loss_sum, n=n, delta=delta)
    is_whole = sums == np.floor(sums)
    if not is_whole.all():
        raise ValueError(
            f"loss_sum must hold whole numbers, got {float(sums[~is_whole].flat[0])}. The binomial p-value is for "
            "losses of 0 and 1 only; for others use hoeffding_bentkus."
        )
    p_values: np.ndarray = np.maximum(binomial_cdf(sums, n, probability=delta), LEAST)
    return p_values


def _p_values(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    fractions = int(evidence.sums[IsFraction()].max())
    if fractions:
        raise EvidenceError(
            f"exact_binomial is for losses of 0 and 1 only, but at one threshold {fractions} of {evidence.n} losses "
            "lie in between. Take hoeffding_bentkus, or a metric such as exact_match."
        )
    return exact_binomial_p_value(evidence.upper(Loss()), n=evidence.n, delta=delta)


EXACT_BINOMIAL = PValueMethod(
    name="exact_binomial", takes_fractions=False, statistics=lambda _: (Loss(), IsFraction()), p_values=_p_values
)
