"""p-values for the null "the risk at this threshold exceeds delta", from the sum of n losses in [0, 1].

Each is valid for any i.i.d. losses in [0, 1]: under the null, P(p <= u) <= u for every u. Which one is used has to
be settled before the losses are seen; the least of several p-values is not a p-value.
"""

import math
import operator
import types
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy import special


class PValue(Protocol):
    """What every function in `P_VALUES` looks like."""

    def __call__(self, loss_sum: ArrayLike, *, n: int, delta: float) -> np.ndarray:
        """Returns one p-value per threshold; see `hoeffding_p_value`."""
        ...


def hoeffding_p_value(loss_sum: ArrayLike, *, n: int, delta: float) -> np.ndarray:
    """Returns the Hoeffding p-value of "the risk exceeds delta", one per threshold.

    A small value is evidence that the threshold is safe. Valid for any i.i.d. losses in [0, 1],
    however they are distributed. Never tighter than Hoeffding-Bentkus, and far looser near risk 0.

    Args:
      loss_sum: shape (thresholds,). Sum of the n losses at each threshold, each in [0, n].
      n: Number of calibration examples, at least 1.
      delta: Risk tolerance, in (0, 1).

    Returns:
      Shape (thresholds,), values in [0, 1]. Non-decreasing in `loss_sum`; 1 once the mean reaches delta.

    Raises:
      TypeError: If `n` is not an integer.
      ValueError: If `n`, `delta` or any entry of `loss_sum` is out of range or NaN.

    Source: CALM Eq. 9 (Hoeffding p-value); Hoeffding (1963), Theorem 1.

    >>> hoeffding_p_value(np.array([60.0, 80.0, 100.0]), n=1000, delta=0.1).round(3)
    array([0.041, 0.449, 1.   ])
    """
    sums, n, delta = _require_arguments(loss_sum, n=n, delta=delta)
    slack = np.maximum(0.0, delta - sums / n)
    return np.asarray(np.exp(-2.0 * n * slack**2))


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
    sums, n, delta = _require_arguments(loss_sum, n=n, delta=delta)
    mean = sums / n
    hoeffding = np.exp(-n * _bernoulli_kl(np.minimum(mean, delta), delta))
    bentkus = math.e * _binomial_cdf(np.ceil(sums), n, delta)
    # From delta on this is 1 by itself: KL is then 0, and the Bentkus half at least e / 2, since the median of
    # Bin(n, delta) is at most ceil(n delta).
    return np.asarray(np.minimum(1.0, np.minimum(hoeffding, bentkus)))


P_VALUES: Mapping[str, PValue] = types.MappingProxyType(
    {"hoeffding": hoeffding_p_value, "hoeffding_bentkus": hoeffding_bentkus_p_value}
)


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


def _binomial_cdf(successes: np.ndarray, n: int, probability: float) -> np.ndarray:
    """Returns P(Bin(n, probability) <= successes), accurate in relative terms far into the tail.

    We take the complement of the incomplete beta function in `probability` itself: `betainc` in 1 - probability loses
    digits to that subtraction, and `bdtr` is off by 0.3 % at n = 10^7. This form is right to 1e-14 there.
    """
    # At n successes the second parameter would be 0.
    failures = np.maximum(n - successes, 1.0)
    return np.asarray(np.where(successes >= n, 1.0, special.betaincc(successes + 1.0, failures, probability)))


def _require_arguments(loss_sum: ArrayLike, *, n: int, delta: float) -> tuple[np.ndarray, int, float]:
    """Returns the arguments with their types made plain, having checked their ranges."""
    try:
        count = operator.index(n)
    except TypeError:
        raise TypeError(f"n must be an integer, got {n!r}.") from None
    if count < 1:
        raise ValueError(f"n must be at least 1, got {count}. Is the calibration set empty?")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}. Tolerances are fractions: for 5 % pass delta=0.05.")
    sums = np.asarray(loss_sum, dtype=np.float64)
    is_inside = (sums >= 0) & (sums <= count)
    if not is_inside.all():
        place = tuple(int(i) for i in np.argwhere(~is_inside)[0])
        where = f"loss_sum[{', '.join(map(str, place))}]" if place else "loss_sum"
        raise ValueError(
            f"{where} must be in [0, {count}] for n = {count}, got {float(sums[place])}. "
            "It is the sum of n losses in [0, 1], not their mean."
        )
    return sums, count, float(delta)
