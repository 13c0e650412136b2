"""p-values of signed losses: what a bettor against the null has won.

A mixture of constant bets needs sums only, which merge in any order. The two others bet in one fixed order: that of
Waudby-Smith and Ramdas with bets that learn from the examples before, STaR-Bets with bets that aim at a planned level
by the last example.
"""

import types

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk import elementary
from calm_beam.risk.elementary import log_capital, log_floor
from calm_beam.risk.fixed_point import LOSS_SCALE, to_signed_fixed_point

from ._contract import require_n_and_delta, rounded_up

# Each bettor's stake, as a share of the largest that cannot lose everything, and its part of the starting capital;
# fixed before any data are seen. Against losses of 0 and 1 with a risk of c delta a share of 1 - c grows fastest, and
# a larger one where losses vary less: the largest stakes decide on hundreds of examples, those of 0.1 and 0.3 on
# thousands. On a million, risks so close to delta can be told from it that only small stakes grow; keeping some costs
# the others a tenth of their capital. docs/measurements.md says what they were compared with.
BETS = types.MappingProxyType({0.01: 0.05, 0.03: 0.05, 0.1: 0.3, 0.3: 0.25, 0.6: 0.1, 0.95: 0.25})
# Bets are tuned for a decision at the level 0.05, of which this is minus the logarithm. The p-value is valid at every
# other one too.
_TUNED_FOR = 2.995732273553991
# Share of the largest bet that cannot lose everything.
_LARGEST_WSR_SHARE = 0.75
_LOSSES_AT_A_TIME = 100_000
# Examples that the moments of a coin of risk delta count for, before any is seen.
_PRIOR = 20
# Share of the largest bet that cannot lose everything: so close to 1 that small sets without a loss prove enough.
_LARGEST_STAR_SHARE = 1 - 2.0**-10


def signed_mixture_p_value(losses: ArrayLike, *, delta: float) -> np.ndarray:
    """Returns the p-value of "the mean loss exceeds delta" from n losses in [-1, 1], one per threshold.

    Bettor k stakes eta_k on every example in turn, and multiplies its capital by 1 + eta_k (delta - D). If the mean of
    D exceeds delta no bettor gains in expectation, so all of them together, having started with a capital of 1, end
    with a capital W of expectation at most 1, and by Markov's inequality 1 / W is a p-value, whatever the order.

    Unlike Hoeffding's bounds this takes signed losses as they are: examples on which early exits do better pay for
    those on which they do worse, which is what Definition 2 of the paper asks for.

    Args:
      losses: shape (..., n, thresholds), each in [-1, 1].
      delta: Risk tolerance, in (0, 1).

    Returns:
      Shape (..., thresholds), values in (0, 1], rounded up.

    Raises:
      ValueError: If a loss or `delta` is out of range or NaN, or there are no examples.

    Source: the capital process of Waudby-Smith and Ramdas (2023), "Estimating means of bounded random variables by
    betting", one-sided, with constant bets; a mixture of such processes is one again (Robbins' method of mixtures).

    >>> signed_mixture_p_value(np.tile([[0.0, 0.1], [-0.1, 0.1]], (20, 1)), delta=0.1).round(3)
    array([0.011, 1.   ])
    """
    fixed = to_signed_fixed_point(losses)
    if fixed.ndim < 2:
        raise ValueError(f"losses must have shape (..., n, thresholds), got {fixed.shape}.")
    require_n_and_delta(fixed.shape[-2], delta)
    capitals = [log_capital(fixed, delta=delta, share=share).sum(axis=-2) for share in BETS]
    return mixture_p_value(np.stack(capitals))


def mixture_p_value(log_capitals: np.ndarray) -> np.ndarray:
    """Returns min(1, 1 / W), where W is what the bettors have together.

    The capital of every bettor is a product of factors, each of expectation at most 1 whatever came before. So W is a
    supermartingale under the null, and by Ville's inequality the least of the p-values after 1, 2, 3, ... examples is a
    p-value too: it may be looked at at any time, and decoding may stop whenever it is small enough.

    Args:
      log_capitals: shape (bettors, ...), int64: for each of `BETS`, the sum of `log_capital` over the examples.

    Returns:
      Shape (...), values in (0, 1], rounded up.

    Source: Ville (1939); Ramdas et al. (2023), "Game-theoretic statistics and safe anytime-valid inference".
    """
    logarithms, wealth = _wealth(log_capitals)
    return rounded_up(elementary.exp(-logarithms) / wealth)


def mixture_log_capital(log_capitals: np.ndarray) -> np.ndarray:
    """Returns log W, to be looked at, and not to decide by; arguments and shape as in `mixture_p_value`."""
    logarithms, wealth = _wealth(log_capitals)
    return np.asarray(logarithms + elementary.log(wealth))


def _wealth(log_capitals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the largest log capital, and W divided by that capital."""
    # Dividing by a power of two is exact, and where the richest has less than e^708, so is all below.
    logarithms = log_capitals / LOSS_SCALE
    richest = logarithms.max(axis=0)
    wealth = np.zeros(richest.shape)
    for logarithm, start in zip(logarithms, BETS.values(), strict=True):
        wealth = wealth + start * elementary.exp(logarithm - richest)
    return richest, wealth


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
    return wsr_of_table(fixed, delta=delta)


def wsr_of_table(fixed_losses: np.ndarray, *, delta: float) -> np.ndarray:
    """Returns what `wsr_p_value` does, given losses in units of 2^-32; shape (n, ...), int64."""
    n, delta = require_n_and_delta(fixed_losses.shape[0], delta)
    columns = fixed_losses.reshape(n, -1)
    p_values = np.empty(columns.shape[1])
    # Some columns at a time: each takes several intermediate arrays of its own size.
    width = max(1, _LOSSES_AT_A_TIME // n)
    for start in range(0, columns.shape[1], width):
        losses = columns[:, start : start + width] / LOSS_SCALE
        # Logarithms are rounded down to integers, whose sums are exact.
        growth = log_floor(1 + _wsr_bets(losses, delta=delta) * (delta - losses))
        log_wealth = np.maximum(0, np.cumsum(growth, axis=0).max(axis=0))
        p_values[start : start + width] = rounded_up(elementary.exp(-(log_wealth / LOSS_SCALE)))
    return p_values.reshape(fixed_losses.shape[1:])


def _wsr_bets(losses: np.ndarray, *, delta: float) -> np.ndarray:
    """Returns the bet on each example, made of those before it alone; shape (n, columns)."""
    n = len(losses)
    # Before the first example: what a coin of risk delta would show.
    seen = np.arange(2, n + 2)[:, None]
    # Running sums go from the first to the last, by definition, so that every machine rounds them alike.
    means = (delta + np.cumsum(losses, axis=0)) / seen
    deviations = losses - means
    variances = (delta * (1 - delta) + np.cumsum(deviations * deviations, axis=0)) / seen
    before = np.concatenate([np.full_like(variances[:1], delta * (1 - delta)), variances[:-1]])
    return np.minimum(np.sqrt(2 * _TUNED_FOR / (n * before)), _LARGEST_WSR_SHARE / (1 - delta))


def star_bets_p_value(losses: ArrayLike, *, delta: float, epsilon: float) -> np.ndarray:
    """Returns the STaR-Bets p-value of "the mean loss exceeds delta" from n losses in [-1, 1], one per threshold.

    A bettor multiplies its capital by 1 + bet (delta - D) on every example, where the bet may depend on the examples
    before. If the mean of D exceeds delta the capital is a supermartingale, so by Ville's inequality 1 / (its largest
    value) is a p-value, at epsilon and at every other level. The order and epsilon have to be settled before the losses
    are seen: they decide the bets.

    Before each example the bettor asks how far its capital is from 1 / epsilon, and how many examples are left: it bets
    what gets there by the last one with the least luck. So it is bold where it lags behind, which `wsr` with its one
    goal for all examples is not. Where it got there it goes on to 1 / epsilon^2, and so forth; its largest capital
    counts. Procedures that divide epsilon among thresholds, such as `holm`, look at levels that it does not aim at, and
    gain less.

    Args:
      losses: shape (n, ...), each in [-1, 1], in betting order.
      delta: Risk tolerance, in (0, 1).
      epsilon: Level that the test is planned at, in (0, 1).

    Returns:
      Shape (...), values in (0, 1], rounded up.

    Raises:
      ValueError: If a loss, `delta` or `epsilon` is out of range or NaN, or there are no examples.

    Source: Voráček and Orabona (2025), "STaR-Bets: Sequential Target-Recalculating Bets for Tighter Confidence
    Intervals": the target and the horizon that are left decide the bet. The moments, about delta and to the third, are
    ours; Ville (1939).

    >>> star_bets_p_value(np.tile([[0.0, 0.1], [-0.1, 0.1]], (50, 1)), delta=0.1, epsilon=0.05).round(5)
    array([2.e-05, 1.e+00])
    """
    fixed = to_signed_fixed_point(losses)
    if fixed.ndim < 1:
        raise ValueError("losses must have shape (n, ...), got a single number.")
    return star_bets_of_table(fixed, delta=delta, epsilon=epsilon)


def star_bets_of_table(fixed_losses: np.ndarray, *, delta: float, epsilon: float) -> np.ndarray:
    """Returns what `star_bets_p_value` does, given losses in units of 2^-32; shape (n, ...), int64."""
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
        bets = _star_bets(
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
    """Returns by how much the log capital has to grow to the next multiple of the goal that it never reached."""
    reached = np.floor(highest / (goal * LOSS_SCALE))
    return np.asarray((reached + 1) * goal - log_wealth / LOSS_SCALE)


def _star_bets(growth: np.ndarray, second: np.ndarray, skew: np.ndarray, *, delta: float) -> np.ndarray:
    """Returns the bets that grow as fast as they have to with the least distance of the mean loss below delta.

    With moments s2 and s3 of D - delta, and a mean of -g, a bet b grows by b g - b^2 s2 / 2 - b^3 s3 / 3 per example.
    That is `growth` at the least g where b^2 s2 / 2 + 2 b^3 s3 / 3 is. Without s3 the solution is the square root of
    2 growth / s2; with it, one step of an iteration is close enough, since any bet is valid.

    Args:
      growth: What the log capital has to gain per example.
      second: s2.
      skew: s3 / s2, at most 1 - delta. Where it is negative, it counts as 0.
      delta: Risk tolerance.
    """
    plain = np.sqrt(2 * growth / second)
    bent = plain / np.sqrt(1 + 4 / 3 * np.maximum(skew, 0.0) * plain)
    return np.asarray(np.minimum(bent, _LARGEST_STAR_SHARE / (1 - delta)))
