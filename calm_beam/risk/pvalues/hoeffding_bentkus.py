"""The Hoeffding-Bentkus bound as a p-value: the paper's, and the default for losses in [0, 1]."""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk import elementary
from calm_beam.risk.elementary import binomial_cdf, binomial_deviance, gap
from calm_beam.risk.evidence import Evidence, Loss

from .method import LEAST, PValueMethod, require_loss_sum, rounded_up

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


def _p_values(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    return hoeffding_bentkus_p_value(evidence.upper(Loss()), n=evidence.n, delta=delta)


HOEFFDING_BENTKUS = PValueMethod(name="hoeffding_bentkus", statistics=lambda _: (Loss(),), p_values=_p_values)
