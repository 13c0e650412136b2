"""The Hoeffding-Bentkus bound as a p-value: the paper's, and the default for losses in [0, 1]."""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from ._arguments import require_loss_sum
from ._binomial import binomial_cdf


def hoeffding_bentkus_p_value(loss_sum: ArrayLike, *, n: int, delta: float) -> np.ndarray:
    """Returns the Hoeffding-Bentkus p-value of "the risk exceeds delta", one per threshold.

    The lesser of two bounds on the lower tail of a mean, both decreasing in the risk under test, so that their
    minimum is one valid p-value: min(1, exp(-n KL(R, delta)), e P(Bin(n, delta) <= ceil(sum))), where R is the mean
    loss and KL the divergence between coins of bias R and delta. By Pinsker's inequality never above Hoeffding's.

    Args:
      loss_sum: shape (thresholds,). Sum of the n losses at each threshold, each in [0, n]. Give the exact sum (as
        `loss_sum_upper` does), not n times a rounded mean: the ceiling of the latter is often one too high, and
        may be one too low, which is not valid.
      n: Number of calibration examples, at least 1.
      delta: Risk tolerance, in (0, 1).

    Returns:
      Shape (thresholds,), values in [0, 1]. Non-decreasing in `loss_sum`; 1 once the mean reaches delta.

    Raises:
      TypeError: If `n` is not an integer.
      ValueError: If `n`, `delta` or any entry of `loss_sum` is out of range or NaN.

    Source: CALM, footnote to Eq. 9 ("we use the more powerful Hoeffding-Bentkus bound"); Bates et al. (2021), sec.
    "Hoeffding-Bentkus"; Angelopoulos et al. (2021), Proposition 2, where our delta is alpha.

    >>> hoeffding_bentkus_p_value(np.array([70.0, 80.0, 90.0, 100.0]), n=1000, delta=0.1).round(4)
    array([0.0016, 0.0479, 0.4301, 1.    ])
    """
    sums, n, delta = require_loss_sum(loss_sum, n=n, delta=delta)
    mean = sums / n
    hoeffding = np.exp(-n * _bernoulli_kl(np.minimum(mean, delta), delta))
    bentkus = math.e * binomial_cdf(np.ceil(sums), n, delta)
    # From delta on this is 1 by itself: KL is then 0, and the Bentkus half at least e / 2, since the median of
    # Bin(n, delta) is at most ceil(n delta).
    return np.asarray(np.minimum(1.0, np.minimum(hoeffding, bentkus)))


def _bernoulli_kl(mean: np.ndarray, delta: float) -> np.ndarray:
    """Returns KL(Bernoulli(mean) || Bernoulli(delta)), for mean <= delta, to full relative accuracy.

    The textbook form adds two terms that nearly cancel when the mean is close to delta, and n multiplies what is left
    of their rounding errors. With mean = delta (1 + t) and 1 - mean = (1 - delta) (1 + s) the linear parts cancel on
    paper instead, and both terms that remain are positive.
    """
    gap = mean - delta
    return delta * _xlogx_excess(gap / delta) + (1.0 - delta) * _xlogx_excess(-gap / (1.0 - delta))


def _xlogx_excess(t: np.ndarray) -> np.ndarray:
    """Returns (1 + t) log(1 + t) - t for t >= -1, which is t^2 / 2 near 0 and 1 at -1 (where 0 log 0 = 0)."""
    direct = special.xlog1py(1.0 + t, t) - t
    # The series sum over k >= 2 of (-t)^k / (k (k - 1)); its first term left out is below 1e-18 of the first kept.
    small = np.clip(t, -0.01, 0.01)
    series = np.zeros_like(small)
    for k in range(10, 1, -1):
        series = 1.0 / (k * (k - 1)) - small * series
    return np.asarray(np.where(np.abs(t) < 0.01, small**2 * series, direct))
