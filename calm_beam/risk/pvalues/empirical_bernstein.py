"""The empirical Bernstein bound, inverted into a p-value: adapts to losses of small variance."""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk.elementary import gap
from calm_beam.risk.evidence import Evidence, Loss, SquaredLoss

from .method import PValueMethod, exp_upper, require_loss_sum, require_sums


def empirical_bernstein_p_value(loss_sum: ArrayLike, square_sum: ArrayLike, *, n: int, delta: float) -> np.ndarray:
    """Returns the empirical Bernstein p-value of "the risk exceeds delta", one per threshold.

    With probability at least 1 - u the risk is at most R + sqrt(2 V log(2 / u) / n) + 7 log(2 / u) / (3 (n - 1)), where
    R is the mean loss and V the sample variance. The p-value is the u at which this bound meets delta.

    Args:
      loss_sum: shape (..., thresholds). Sum of the n losses at each threshold, each in [0, n].
      square_sum: The same shape. Sum of the squares of those losses. Larger sums are valid too, and less powerful: the
        p-value does not fall as they grow.
      n: Number of calibration examples, at least 1. With a single example the p-value is 1.
      delta: Risk tolerance, in (0, 1).

    Returns:
      The same shape, values in (0, 1], rounded up; 1 once the mean reaches delta.

    Raises:
      TypeError: If `n` is not an integer.
      ValueError: If `n`, `delta`, any entry of `loss_sum` or of `square_sum` is out of range or NaN, the shapes differ,
        or the squares are too small for the losses.

    Source: Maurer and Pontil (2009), "Empirical Bernstein Bounds and Sample-Variance Penalization", Theorem 4, where
    our u is delta.

    >>> empirical_bernstein_p_value([70, 80, 100], [35, 40, 50], n=1000, delta=0.1).round(4)
    array([0.0106, 0.1285, 1.    ])
    """
    sums, n, delta = require_loss_sum(loss_sum, n=n, delta=delta)
    meaning = "It is the sum of the squares of n losses in [0, 1]."
    squares = require_sums(square_sum, n=n, name="square_sum", meaning=meaning)
    if squares.shape != sums.shape:
        raise ValueError(f"square_sum has shape {squares.shape}, loss_sum {sums.shape}: they must be alike.")
    is_too_small = squares * n < sums * sums * (1 - 1e-9)
    if is_too_small.any():
        index = tuple(int(i) for i in np.argwhere(is_too_small)[0])
        raise ValueError(
            f"square_sum must be at least loss_sum^2 / n, got {float(squares[index])} for a loss_sum of "
            f"{float(sums[index])} and n = {n}. {meaning}"
        )
    if n == 1:
        return np.ones(sums.shape)
    # The difference loses at most a few units in the last place of the squares; adding them makes it err upwards.
    spread = np.maximum(0.0, squares - sums * sums / n) + 4 * np.finfo(np.float64).eps * squares
    variance = spread / (n - 1)
    slack = np.maximum(0.0, -gap(sums, n=n, delta=delta)) / n
    # The bound is R + b x + a x^2 with x = sqrt(log(2 / u)); this form of the root cancels nothing.
    a, b = 7 / (3 * (n - 1)), np.sqrt(2 * variance / n)
    x = 2 * slack / (b + np.sqrt(b * b + 4 * a * slack) + np.finfo(np.float64).tiny)
    return exp_upper(-(x * x), factor=2.0)


def _p_values(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    squares = evidence.upper(SquaredLoss())
    return empirical_bernstein_p_value(evidence.upper(Loss()), squares, n=evidence.n, delta=delta)


EMPIRICAL_BERNSTEIN = PValueMethod(
    name="empirical_bernstein", statistics=lambda _: (Loss(), SquaredLoss()), p_values=_p_values
)
