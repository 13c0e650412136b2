"""Betting in one fixed order, with bets that aim at a planned level by the last example: STaR-Bets."""

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk import elementary
from calm_beam.risk.elementary import log_floor
from calm_beam.risk.evidence import Evidence
from calm_beam.risk.losses import LOSS_SCALE, to_signed_fixed_point

from .method import PValueMethod, require_n_and_delta, rounded_up

# Weight of the prior moments, those of a coin of risk delta, in examples.
_PRIOR = 20
# Share of the largest bet that cannot lose everything: close enough to 1 that small sets without a loss prove enough.
_LARGEST_SHARE = 1 - 2.0**-10


def star_bets_p_value(losses: ArrayLike, *, delta: float, epsilon: float) -> np.ndarray:
    """Returns the STaR-Bets p-value of "the mean loss exceeds delta" from n losses in [-1, 1], one per threshold.

    A bettor multiplies its capital by 1 + bet (delta - D) on every example, where the bet may depend on the examples
    before. If the mean of D exceeds delta the capital is a supermartingale, so by Ville's inequality 1 / (its largest
    value) is a p-value, at epsilon and at every other level. The order and epsilon have to be settled before the losses
    are seen: they decide the bets.

    Before each example the bettor computes how far its capital is from 1 / epsilon and how many examples are left, and
    places the bet that gets there by the last one with the least luck. So it bets more after falling behind, unlike
    `wsr` with its one goal for all examples. Once it gets there the goal is 1 / epsilon^2, and so forth; its largest
    capital counts. Procedures that divide epsilon among thresholds, such as `holm`, test at levels that it does not aim
    at, and gain less.

    Args:
      losses: shape (n, ...), each in [-1, 1], in betting order.
      delta: Risk tolerance, in (0, 1).
      epsilon: Level that the test is planned at, in (0, 1).

    Returns:
      Shape (...), values in (0, 1], rounded up.

    Raises:
      ValueError: If a loss, `delta` or `epsilon` is out of range or NaN, or there are no examples.

    Source: Voráček and Orabona (2025), "STaR-Bets: Sequential Target-Recalculating Bets for Tighter Confidence
      Intervals": the remaining target and horizon decide the bet. The moments, about delta and to the third, are ours;
      Ville (1939).

    >>> star_bets_p_value(np.tile([[0.0, 0.1], [-0.1, 0.1]], (50, 1)), delta=0.1, epsilon=0.05).round(5)
    array([2.e-05, 1.e+00])
    """
    fixed = to_signed_fixed_point(losses)
    if fixed.ndim < 1:
        raise ValueError("losses must have shape (n, ...), got a single number.")
    return _of_table(fixed, delta=delta, epsilon=epsilon)


def _of_table(fixed_losses: np.ndarray, *, delta: float, epsilon: float) -> np.ndarray:
    """Returns the p-values of `star_bets_p_value` from losses in units of 2^-32; shape (n, ...), int64."""
    n, delta = require_n_and_delta(fixed_losses.shape[0], delta)
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon must be in (0, 1), got {epsilon}. It is a fraction: for 5 % pass epsilon=0.05.")
    goal = -float(elementary.log(epsilon))
    columns = fixed_losses.reshape(n, -1)
    log_wealth = np.zeros(columns.shape[1], np.int64)
    highest = log_wealth.copy()
    # Sums of the second and third powers of D - delta.
    squares = np.full(columns.shape[1], _PRIOR * delta * (1 - delta))
    cubes = squares * (1 - 2 * delta)
    for place, losses in enumerate(columns):
        bets = _bets(
            _missing_growth(log_wealth, highest, goal=goal) / (n - place),
            squares / (_PRIOR + place),
            cubes / squares,
            delta=delta,
        )
        excess = losses / LOSS_SCALE - delta
        # Logarithms are rounded down to integers, whose sums are exact.
        log_wealth += log_floor(1 - bets * excess)
        np.maximum(highest, log_wealth, out=highest)
        squared = excess * excess
        squares += squared
        cubes += squared * excess
    p_values = rounded_up(elementary.exp(-(highest / LOSS_SCALE)))
    return np.asarray(p_values.reshape(fixed_losses.shape[1:]))


def _missing_growth(log_wealth: np.ndarray, highest: np.ndarray, *, goal: float) -> np.ndarray:
    """Returns the growth of log capital to the next multiple of the goal that was never reached."""
    reached = np.floor(highest / (goal * LOSS_SCALE))
    return np.asarray((reached + 1) * goal - log_wealth / LOSS_SCALE)


def _bets(growth: np.ndarray, second: np.ndarray, skew: np.ndarray, *, delta: float) -> np.ndarray:
    """Returns the bets that grow at a given rate with the smallest distance of the mean loss below delta.

    With moments s2 and s3 of D - delta, and a mean of -g, a bet b grows by b g - b^2 s2 / 2 - b^3 s3 / 3 per example.
    That is `growth` at the least g where b^2 s2 / 2 + 2 b^3 s3 / 3 is. Without s3 the solution is the square root of
    2 growth / s2; with it, one step of an iteration is close enough, since any bet is valid.

    Args:
      growth: Growth of the log capital needed per example.
      second: s2.
      skew: s3 / s2, at most 1 - delta. Negative values count as 0.
      delta: Risk tolerance.
    """
    plain = np.sqrt(2 * growth / second)
    bent = plain / np.sqrt(1 + 4 / 3 * np.maximum(skew, 0.0) * plain)
    return np.asarray(np.minimum(bent, _LARGEST_SHARE / (1 - delta)))


def _p_values(evidence: Evidence, delta: float, epsilon: float) -> np.ndarray:
    assert evidence.table is not None
    return _of_table(evidence.table, delta=delta, epsilon=epsilon)


STAR_BETS = PValueMethod(
    name="star_bets", takes_signed=True, statistics=lambda _: (), needs_table=True, p_values=_p_values
)
