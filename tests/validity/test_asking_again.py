"""The error rate of a promise picked from several plans on the same losses, after seeing them.

Every threshold has a risk of exactly delta here, so every acceptance is an error. Each way of asking again is compared
with the first plan alone, which errs as often as epsilon allows. docs/guarantee.md has these figures.
"""

import numpy as np
import pytest
from scipy import stats

from calm_beam.risk.fwer import fixed_sequence_test
from calm_beam.risk.pvalues import exact_binomial_p_value

from .methods import registered_p_values
from .suite import draws, most_misses
from .worlds import World, bimodal, coin

pytestmark = pytest.mark.slow

_REPLICATIONS = 2000
_EPSILON = 0.05
_MOST = most_misses(_REPLICATIONS, _EPSILON)


def _p_values(name: str, losses: np.ndarray, world: World) -> np.ndarray:
    found = registered_p_values(name, losses, delta=world.delta)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("world", "low", "high"),
    [
        (World(name="coin", n=500, delta=0.1, shares=(1.0,), marginal=coin), 0.18, 0.28),
        (World(name="bimodal", n=500, delta=0.2, shares=(1.0,), marginal=bimodal), 0.18, 0.28),
    ],
    ids=lambda value: value.name if isinstance(value, World) else "",
)
def test_the_best_of_ten_orders_errs(world: World, low: float, high: float) -> None:
    """`wsr` asked again with nine other seeds errs in about a quarter of all calibrations, and with one seed in 5 %."""
    rng = np.random.default_rng(3)
    first = best = 0
    for losses in draws(world, replications=_REPLICATIONS):
        p_values = np.array([_p_values("wsr", rng.permutation(losses), world) for _ in range(10)])[..., 0]
        first += int((p_values[0] <= _EPSILON).sum())
        best += int((p_values.min(axis=0) <= _EPSILON).sum())
    assert first <= _MOST
    assert low < best / _REPLICATIONS < high, best / _REPLICATIONS


@pytest.mark.parametrize(("correlation", "low", "high"), [(0.8, 0.25, 0.33), (0.5, 0.36, 0.45), (0.0, 0.5, 0.6)])
def test_a_coarser_grid_errs(correlation: float, low: float, high: float) -> None:
    """A grid of 20 without the failed thresholds proves a wrong one more often, the more their losses differ."""
    world = World(name="grid", n=500, delta=0.1, shares=(1.0,) * 20, marginal=coin, correlation=correlation)
    first = coarser = 0
    for losses in draws(world, replications=_REPLICATIONS):
        p_values = _p_values("exact_binomial", losses, world)
        first += int(fixed_sequence_test(p_values, epsilon=_EPSILON).rejected.any(axis=-1).sum())
        # A user who has seen the p-values leaves out the thresholds above the one with the least.
        coarser += int((p_values.min(axis=-1) <= _EPSILON).sum())
    assert first <= _MOST
    assert low < coarser / _REPLICATIONS < high, coarser / _REPLICATIONS


@pytest.mark.parametrize(("looks", "low", "high"), [(1, 0.03, 0.05), (10, 0.13, 0.145), (50, 0.23, 0.245)])
def test_overwriting_with_more_examples_errs(looks: int, low: float, high: float) -> None:
    """Calibrating again after every 100 examples until something is proved errs more with every look (exact)."""
    delta, step = 0.05, 100
    total = looks * step
    # For losses of 0 and 1: the chance of each sum of losses, among calibrations that have proved nothing yet.
    open_still, accepted = np.array([1.0]), 0.0
    for n in range(step, total + 1, step):
        open_still = np.convolve(open_still, stats.binom.pmf(np.arange(step + 1), step, delta))
        p_values = exact_binomial_p_value(np.arange(n + 1.0), n=n, delta=delta)
        accepted += float(open_still[p_values <= _EPSILON].sum())
        open_still = np.where(p_values <= _EPSILON, 0, open_still)
    assert low < accepted < high, accepted
