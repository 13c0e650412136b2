"""A mixture of constant bets against the null: for signed losses, with sums that merge in any order."""

import types

import numpy as np
from numpy.typing import ArrayLike

from calm_beam.risk import elementary
from calm_beam.risk.elementary import log_capital
from calm_beam.risk.evidence import Evidence, LogCapital
from calm_beam.risk.losses import LOSS_SCALE, to_signed_fixed_point

from .method import PValueMethod, require_n_and_delta, rounded_up

# Each bettor's stake, as a share of the largest that cannot lose everything, and its part of the starting capital;
# fixed before any data are seen. Against losses of 0 and 1 with a risk of c delta a share of 1 - c grows fastest, and
# a larger one where losses vary less: the largest stakes decide on hundreds of examples, those of 0.1 and 0.3 on
# thousands. On a million examples, risks so close to delta are detected that only small stakes grow; keeping some costs
# the others a tenth of their capital. docs/decisions/069-stakes-of-the-mixture.md has the comparison.
BETS = types.MappingProxyType({0.01: 0.05, 0.03: 0.05, 0.1: 0.3, 0.3: 0.25, 0.6: 0.1, 0.95: 0.25})


def signed_mixture_p_value(losses: ArrayLike, *, delta: float) -> np.ndarray:
    """Returns the p-value of "the mean loss exceeds delta" from n losses in [-1, 1], one per threshold.

    Bettor k stakes eta_k on every example in turn, and multiplies its capital by 1 + eta_k (delta - D). If the mean of
    D exceeds delta no bettor gains in expectation, so all of them together, having started with a capital of 1, end
    with a capital W of expectation at most 1, and by Markov's inequality 1 / W is a p-value, whatever the order.

    Unlike Hoeffding's bounds this takes signed losses: examples on which early exits do better compensate
    those on which they do worse, as Definition 2 of the paper intends.

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
    """Returns min(1, 1 / W), where W is the bettors' total capital.

    The capital of every bettor is a product of factors, each of expectation at most 1 given the past. So W is a
    supermartingale under the null, and by Ville's inequality the least of the p-values after 1, 2, 3, ... examples is a
    p-value too: it may be tested at any time, and decoding may stop as soon as it is small enough.

    Args:
      log_capitals: shape (bettors, ...), int64: for each of `BETS`, the sum of `log_capital` over the examples.

    Returns:
      Shape (...), values in (0, 1], rounded up.

    Source: Ville (1939); Ramdas et al. (2023), "Game-theoretic statistics and safe anytime-valid inference".
    """
    logarithms, wealth = _wealth(log_capitals)
    return rounded_up(elementary.exp(-logarithms) / wealth)


def mixture_log_capital(log_capitals: np.ndarray) -> np.ndarray:
    """Returns log W for display, not for decisions; arguments and shape as in `mixture_p_value`."""
    logarithms, wealth = _wealth(log_capitals)
    return np.asarray(logarithms + elementary.log(wealth))


def _wealth(log_capitals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the largest log capital, and W divided by that capital."""
    # Dividing by a power of two is exact, also below, while the largest capital is less than e^708.
    logarithms = log_capitals / LOSS_SCALE
    richest = logarithms.max(axis=0)
    wealth = np.zeros(richest.shape)
    for logarithm, start in zip(logarithms, BETS.values(), strict=True):
        wealth = wealth + start * elementary.exp(logarithm - richest)
    return richest, wealth


def _bets(delta: float) -> tuple[LogCapital, ...]:
    return tuple(LogCapital(delta=delta, share=share) for share in BETS)


def _p_values(evidence: Evidence, delta: float, _: float) -> np.ndarray:
    return mixture_p_value(_capitals(evidence, delta))


def _log_capital(evidence: Evidence, delta: float) -> np.ndarray:
    return mixture_log_capital(_capitals(evidence, delta))


def _capitals(evidence: Evidence, delta: float) -> np.ndarray:
    return np.stack([evidence.sums[bet] for bet in _bets(delta)])


SIGNED_MIXTURE = PValueMethod(
    name="signed_mixture", takes_signed=True, statistics=_bets, p_values=_p_values, log_capital=_log_capital
)
