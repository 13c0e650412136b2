"""Simulations of the guarantee itself: many calibration sets whose true risks are known in closed form.

Each world draws the losses of `n` examples at a grid of thresholds in testing order. The risks grow along the grid
and meet delta exactly at `_FIRST_NULL`, the hardest case for a test at level epsilon; rejecting there, or further
down, is a miss. The share of misses must not exceed epsilon by more than chance explains.
"""

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from calm_beam.risk.fixed_point import loss_sum_upper, to_fixed_point
from calm_beam.risk.fwer import fixed_sequence_test
from calm_beam.risk.pvalues import hoeffding_bentkus_p_value, hoeffding_p_value

_EPSILON = 0.05
_TRIALS = 4000
# The multiples of delta that the risks along the grid are.
_RISK_SHARES = np.array([0.0, 0.25, 0.6, 1.0, 1.2])
_FIRST_NULL = 3

_P_VALUES = {"hoeffding": hoeffding_p_value, "hoeffding_bentkus": hoeffding_bentkus_p_value}

# Takes (rng, n, delta), returns losses of shape (n, thresholds) with risks delta * _RISK_SHARES.
World = Callable[[np.random.Generator, int, float], np.ndarray]


def _bernoulli(rng: np.random.Generator, n: int, delta: float) -> np.ndarray:
    """Losses 0 or 1, as of exact match; the same examples fail first at every threshold."""
    return (rng.uniform(size=(n, 1)) < delta * _RISK_SHARES).astype(np.float64)


def _beta(rng: np.random.Generator, n: int, delta: float) -> np.ndarray:
    """Losses spread over (0, 1), as of ROUGE; one factor per example, so thresholds are strongly dependent."""
    top = delta * _RISK_SHARES.max()
    # A Beta(2 m, 2 (1 - m)) variable has mean m; scaled by at most 1 it stays in [0, 1].
    factor = rng.beta(2 * top, 2 * (1 - top), size=(n, 1))
    return factor * (_RISK_SHARES / _RISK_SHARES.max())


def _independent_bernoulli(rng: np.random.Generator, n: int, delta: float) -> np.ndarray:
    """Losses 0 or 1, drawn anew for every threshold."""
    return (rng.uniform(size=(n, _RISK_SHARES.size)) < delta * _RISK_SHARES).astype(np.float64)


_WORLDS = {"bernoulli": _bernoulli, "beta": _beta, "independent_bernoulli": _independent_bernoulli}


def _clt_p_value(losses: np.ndarray, delta: float) -> np.ndarray:
    """The p-value that a normal approximation would give: not valid, and the reason for all of this."""
    n = losses.shape[0]
    scale = losses.std(axis=0, ddof=1) / np.sqrt(n)
    # Without any loss the estimated deviation is 0 as well, and the approximation is certain of itself.
    z = np.divide(losses.mean(axis=0) - delta, scale, out=np.full(scale.shape, -np.inf), where=scale > 0)
    return np.asarray(stats.norm.cdf(z))


def _num_misses(world: World, p_values_of: Callable[[np.ndarray], np.ndarray], *, n: int, delta: float) -> int:
    """Returns in how many trials a threshold whose risk is not below delta was accepted."""
    rng = np.random.default_rng(20220714)
    misses = 0
    for _ in range(_TRIALS):
        result = fixed_sequence_test(p_values_of(world(rng, n, delta)), epsilon=_EPSILON)
        misses += result.rejected[_FIRST_NULL]
    return misses


def _as_in_production(
    p_value: Callable[..., np.ndarray], *, n: int, delta: float
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns losses -> p-values by way of the fixed-point sums."""
    return lambda losses: p_value(loss_sum_upper(to_fixed_point(losses).sum(axis=0)), n=n, delta=delta)


# At most this many misses: the upper end of a two-sided 99.9 % interval around epsilon.
_MOST_MISSES = int(stats.binom.ppf(0.9995, _TRIALS, _EPSILON))


@pytest.mark.slow
@pytest.mark.parametrize("world", _WORLDS.values(), ids=_WORLDS.keys())
@pytest.mark.parametrize("p_value", _P_VALUES.values(), ids=_P_VALUES.keys())
@pytest.mark.parametrize(("n", "delta"), [(200, 0.02), (100, 0.5), (1000, 0.1)])
def test_misses_stay_within_epsilon(world: World, p_value: Callable[..., np.ndarray], n: int, delta: float) -> None:
    """A threshold at risk delta is accepted in at most a share epsilon of all calibration sets."""
    assert _num_misses(world, _as_in_production(p_value, n=n, delta=delta), n=n, delta=delta) <= _MOST_MISSES


@pytest.mark.slow
def test_the_test_has_power() -> None:
    """The bound is not kept by accepting nothing: at n = 1000 most runs accept a risk of 0.6 delta."""
    n, delta = 1000, 0.1
    p_values_of = _as_in_production(hoeffding_bentkus_p_value, n=n, delta=delta)
    rng = np.random.default_rng(20220714)
    runs = [fixed_sequence_test(p_values_of(_beta(rng, n, delta)), epsilon=_EPSILON) for _ in range(500)]
    assert np.mean([run.last_rejected() == _FIRST_NULL - 1 for run in runs]) > 0.5


@pytest.mark.slow
def test_normal_approximation_is_caught() -> None:
    """The same simulation refuses a CLT p-value: at n = 100, delta = 0.02 it sees no loss in 13 % of all sets."""
    misses = _num_misses(_bernoulli, lambda losses: _clt_p_value(losses, 0.02), n=100, delta=0.02)
    assert misses > 2 * _MOST_MISSES
