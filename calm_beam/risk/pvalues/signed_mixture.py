"""A mixture of constant bets against the null: for signed losses, with sums that merge in any order."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from calm_beam.risk.fixed_point import LOSS_SCALE, to_signed_fixed_point
from calm_beam.risk.log_capital import log_capital

from ._arguments import require_n_and_delta

# Shares of the largest bet that cannot lose everything; fixed before any data are seen.
BET_SHARES = (0.1, 0.3, 0.6)


def signed_mixture_p_value(losses: ArrayLike, *, delta: float) -> np.ndarray:
    """Returns the p-value of "the mean loss exceeds delta" from n losses in [-1, 1], one per threshold.

    Bettor k stakes the share eta_k on every example in turn, and multiplies its capital by 1 + eta_k (delta - D). If the
    mean of D exceeds delta no bettor gains in expectation, so the mean capital W of all has expectation at most 1, and
    by Markov's inequality 1 / W is a p-value. The order of the examples does not matter.

    Unlike Hoeffding's bounds this takes signed losses as they are: those on which early exits do better pay for those on
    which they do worse, which is what Definition 2 of the paper asks for.

    Args:
      losses: shape (..., n, thresholds), each in [-1, 1].
      delta: Risk tolerance, in (0, 1).

    Returns:
      Shape (..., thresholds), values in (0, 1].

    Raises:
      ValueError: If a loss or `delta` is out of range or NaN, or there are no examples.

    Source: the test martingales of Waudby-Smith and Ramdas (2023), "Estimating means of bounded random variables by
    betting", Proposition 2, with constant bets and their mixture (their sec. 4.5), one-sided.

    >>> signed_mixture_p_value(np.tile([[0.0, 0.1], [-0.1, 0.1]], (50, 1)), delta=0.1).round(5)
    array([2.3e-04, 1.0e+00])
    """
    fixed = to_signed_fixed_point(losses)
    if fixed.ndim < 2:
        raise ValueError(f"losses must have shape (..., n, thresholds), got {fixed.shape}.")
    n, delta = require_n_and_delta(fixed.shape[-2], delta)
    capitals = [log_capital(fixed, delta=delta, share=share).sum(axis=-2) for share in BET_SHARES]
    return mixture_p_value(np.stack(capitals))


def mixture_p_value(log_capitals: np.ndarray) -> np.ndarray:
    """Returns min(1, 1 / W), where W is the mean capital of the bettors.

    Args:
      log_capitals: shape (bettors, ...), int64: sums of `log_capital` over the examples.

    Returns:
      Shape (...), values in (0, 1].
    """
    log_wealth = special.logsumexp(log_capitals / LOSS_SCALE, axis=0) - np.log(len(log_capitals))
    return np.asarray(np.exp(-np.maximum(0.0, log_wealth)))
