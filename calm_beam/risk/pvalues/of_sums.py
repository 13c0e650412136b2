"""p-values from sums of losses: Hoeffding's, Hoeffding-Bentkus, the binomial test and empirical Bernstein.

Hoeffding's is the paper's first choice, and the loosest; Hoeffding-Bentkus is the bound that the paper uses, and the
default for losses in [0, 1]. The binomial test is exact where every loss is 0 or 1. Empirical Bernstein adapts to
losses of small variance.
"""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk import elementary
from calm_beam.risk.elementary import binomial_cdf, binomial_deviance, gap
from calm_beam.risk.evidence import Evidence, EvidenceError, IsFraction, Loss, SquaredLoss

from .method import LEAST, PValueMethod, exp_upper, require_loss_sum, require_sums, rounded_up


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


def _hoeffding(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    return hoeffding_p_value(evidence.upper(Loss()), n=evidence.n, delta=delta)


HOEFFDING = PValueMethod(name="hoeffding", statistics=lambda _: (Loss(),), p_values=_hoeffding)


_E_UPPER = 2.7182818284590455


def hoeffding_bentkus_p_value(loss_sum: ArrayLike, *, n: int, delta: float) -> np.ndarray:
    """Returns the Hoeffding-Bentkus p-value of "the risk exceeds delta", one per threshold.

    It is the lesser of two bounds on the lower tail of a mean. Both decrease in the risk under test, so their
    minimum is one valid p-value: min(1, exp(-n KL(R, delta)), e P(Bin(n, delta) <= ceil(sum))), where R is the mean
    loss and KL the divergence between coins of bias R and delta. By Pinsker's inequality it is never above Hoeffding's.

    Args:
      loss_sum: shape (thresholds,). Sum of the n losses at each threshold, each in [0, n]. Give the exact sum (as
        `loss_sum_upper` does), not n times a rounded mean: the ceiling of the latter is often one too high, and
        may be one too low, which is not valid.
      n: Number of calibration examples, at least 1.
      delta: Risk tolerance, in (0, 1).

    Returns:
      Shape (thresholds,), values in (0, 1], rounded up. Non-decreasing in `loss_sum`; 1 once the mean reaches delta.

    Raises:
      TypeError: If `n` is not an integer.
      ValueError: If `n`, `delta` or any entry of `loss_sum` is out of range or NaN.

    Source: CALM, footnote to Eq. 9 ("we use the more powerful Hoeffding-Bentkus bound"); Bates et al. (2021), sec.
    "Hoeffding-Bentkus"; Angelopoulos et al. (2021), Proposition 2, where our delta is alpha.

    >>> hoeffding_bentkus_p_value(np.array([70.0, 80.0, 90.0, 100.0]), n=1000, delta=0.1).round(4)
    array([0.0016, 0.0479, 0.4301, 1.    ])
    """
    sums, n, delta = require_loss_sum(loss_sum, n=n, delta=delta)
    gaps = gap(sums, n=n, delta=delta)
    deviance = binomial_deviance(sums, gaps, n=n, probability=delta, complement=1 - delta)
    hoeffding = rounded_up(elementary.exp(-np.where(gaps < 0, deviance, 0.0)))
    bentkus = _E_UPPER * binomial_cdf(np.ceil(sums), n, probability=delta)
    # From delta on the minimum is at least 1 without clipping: KL is then 0, and the Bentkus half at least e / 2, since
    # the median of Bin(n, delta) is at most ceil(n delta).
    p_values: np.ndarray = np.clip(np.minimum(hoeffding, bentkus), LEAST, 1.0)
    return p_values


def _hoeffding_bentkus(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    return hoeffding_bentkus_p_value(evidence.upper(Loss()), n=evidence.n, delta=delta)


HOEFFDING_BENTKUS = PValueMethod(name="hoeffding_bentkus", statistics=lambda _: (Loss(),), p_values=_hoeffding_bentkus)


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


def _exact_binomial(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    fractions = int(evidence.sums[IsFraction()].max())
    if fractions:
        raise EvidenceError(
            f"exact_binomial is for losses of 0 and 1 only, but at one threshold {fractions} of {evidence.n} losses "
            "lie in between. Take hoeffding_bentkus, or a metric such as exact_match."
        )
    return exact_binomial_p_value(evidence.upper(Loss()), n=evidence.n, delta=delta)


EXACT_BINOMIAL = PValueMethod(
    name="exact_binomial",
    takes_fractions=False,
    statistics=lambda _: (Loss(), IsFraction()),
    p_values=_exact_binomial,
)


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


def _empirical_bernstein(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    squares = evidence.upper(SquaredLoss())
    return empirical_bernstein_p_value(evidence.upper(Loss()), squares, n=evidence.n, delta=delta)


EMPIRICAL_BERNSTEIN = PValueMethod(
    name="empirical_bernstein", statistics=lambda _: (Loss(), SquaredLoss()), p_values=_empirical_bernstein
)
