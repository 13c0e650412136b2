"""Betting in one fixed order, with bets that learn from the examples before: the p-value of Waudby-Smith and Ramdas."""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk import elementary
from calm_beam.risk.elementary import log_floor
from calm_beam.risk.evidence import Evidence
from calm_beam.risk.losses import LOSS_SCALE, to_signed_fixed_point

from .method import PValueMethod, require_n_and_delta, rounded_up

# Bets are tuned for a decision at the level 0.05; this is minus its logarithm. The p-value is valid at every other
# level too. Tuned to the level in use it proves no more on the whole; `star_bets`, which aims at it, does.
_TUNED_FOR = 2.995732273553991
# Share of the largest bet that cannot lose everything.
_LARGEST_SHARE = 0.75
_LOSSES_AT_A_TIME = 100_000


def wsr_p_value(losses: ArrayLike, *, delta: float) -> np.ndarray:
    """Returns the betting p-value of "the mean loss exceeds delta" from n losses in [-1, 1], one per threshold.

    A bettor multiplies its capital by 1 + bet (delta - D) on every example, where the bet may depend on the examples
    before. If the mean of D exceeds delta the capital is a supermartingale, so by Ville's inequality 1 / (its largest
    value) is a p-value. The order has to be settled before the losses are seen.

    Args:
      losses: shape (n, ...), each in [-1, 1], in betting order.
      delta: Risk tolerance, in (0, 1).

    Returns:
      Shape (...), values in (0, 1], rounded up.

    Raises:
      ValueError: If a loss or `delta` is out of range or NaN, or there are no examples.

    Source: Waudby-Smith and Ramdas (2023), "Estimating means of bounded random variables by betting": the capital
    process, one-sided, with predictable plug-in empirical Bernstein bets for a fixed n; Ville (1939).

    >>> wsr_p_value(np.tile([[0.0, 0.1], [-0.1, 0.1]], (50, 1)), delta=0.1).round(5)
    array([1.e-05, 1.e+00])
    """
    fixed = to_signed_fixed_point(losses)
    if fixed.ndim < 1:
        raise ValueError("losses must have shape (n, ...), got a single number.")
    return _of_table(fixed, delta=delta)


def _of_table(fixed_losses: np.ndarray, *, delta: float) -> np.ndarray:
    """Returns the p-values of `wsr_p_value` from losses in units of 2^-32; shape (n, ...), int64."""
    n, delta = require_n_and_delta(fixed_losses.shape[0], delta)
    columns = fixed_losses.reshape(n, -1)
    p_values = np.empty(columns.shape[1])
    # Some columns at a time: each needs several intermediate arrays of its own size.
    width = max(1, _LOSSES_AT_A_TIME // n)
    for start in range(0, columns.shape[1], width):
        losses = columns[:, start : start + width] / LOSS_SCALE
        # Logarithms are rounded down to integers, whose sums are exact.
        growth = log_floor(1 + _bets(losses, delta=delta) * (delta - losses))
        log_wealth = np.maximum(0, np.cumsum(growth, axis=0).max(axis=0))
        p_values[start : start + width] = rounded_up(elementary.exp(-(log_wealth / LOSS_SCALE)))
    return p_values.reshape(fixed_losses.shape[1:])


def _bets(losses: np.ndarray, *, delta: float) -> np.ndarray:
    """Returns the bet on each example, computed from those before it; shape (n, columns)."""
    n = len(losses)
    # Before the first example: the moments of a coin of risk delta.
    seen = np.arange(2, n + 2)[:, None]
    # `cumsum` adds from the first to the last, by definition, so every machine rounds alike.
    means = (delta + np.cumsum(losses, axis=0)) / seen
    deviations = losses - means
    variances = (delta * (1 - delta) + np.cumsum(deviations * deviations, axis=0)) / seen
    before = np.concatenate([np.full_like(variances[:1], delta * (1 - delta)), variances[:-1]])
    return np.minimum(np.sqrt(2 * _TUNED_FOR / (n * before)), _LARGEST_SHARE / (1 - delta))


def _p_values(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    assert evidence.table is not None
    return _of_table(evidence.table, delta=delta)


WSR = PValueMethod(name="wsr", takes_signed=True, statistics=lambda _: (), needs_table=True, p_values=_p_values)
