"""Tests of p-values for "the risk is at most delta"."""

import math
import re

import numpy as np
import pytest
from scipy import stats

from calm_beam.risk.excess import excess_p_values
from calm_beam.risk.pvalues import P_VALUES
from tests.validity.suite import draws, most_misses
from tests.validity.worlds import World, beta_steep, coin, ternary


def test_coins_give_the_upper_binomial_tail() -> None:
    """For losses of 0 and 1 the exact p-value is the chance of as many losses or more at delta."""
    sums = np.arange(31)
    losses = (np.arange(30)[:, None] < sums).astype(float)
    found = excess_p_values(losses, p_value="exact_binomial", delta=0.2)
    assert found == pytest.approx(stats.binom.sf(sums - 1, 30, 0.2), rel=1e-12)


@pytest.mark.parametrize("name", [name for name in P_VALUES if P_VALUES[name].takes_signed])
def test_signed_losses_are_reversed_around_delta(name: str) -> None:
    """Large losses are evidence, small ones are none; with the sign left out, the same data say less."""
    losses = np.tile([[0.5, -0.5], [0.1, -0.1]], (100, 1))
    high, low = excess_p_values(losses, p_value=name, delta=0.1, is_signed=True)
    # What aims at a level of 5 % first is not as far beyond it.
    assert high < (1e-5 if name == "star_bets" else 1e-6)
    assert low == 1


_WORLDS = (
    World(name="coin", n=60, delta=0.1, shares=(1.0, 0.9), marginal=coin),
    World(name="coin, delta 0.5", n=40, delta=0.5, shares=(1.0, 0.9), marginal=coin),
    World(name="coin, many", n=400, delta=0.05, shares=(1.0, 0.9), marginal=coin),
    World(name="beta", n=100, delta=0.1, shares=(1.0, 0.9), marginal=beta_steep),
    World(name="signed", n=150, delta=0.05, shares=(1.0, -1.0), marginal=ternary(0.1), is_signed=True),
)


_PAIRS = [(name, world) for name in P_VALUES for world in _WORLDS if name != "exact_binomial" or world.marginal is coin]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), _PAIRS, ids=[f"{name}, {world.name}" for name, world in _PAIRS])
def test_risks_up_to_delta_are_seldom_called_larger(name: str, world: World) -> None:
    """At a risk of delta a p-value of at most 0.05 comes in at most a share 0.05 of all sets."""
    false = np.zeros(2, int)
    for losses in draws(world, replications=2000):
        p_values = excess_p_values(losses, p_value=name, delta=world.delta, is_signed=world.is_signed)
        false += (p_values <= 0.05).sum(axis=0)
    assert false[0] <= most_misses(2000, 0.05)
    assert false[1] <= false[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", P_VALUES)
def test_risks_far_above_delta_are_found(name: str) -> None:
    """A risk of three times delta is found with 300 examples, mostly."""
    losses = np.asarray(np.random.default_rng(2).uniform(size=(300, 200)) < 0.3, dtype=np.float64)
    assert (excess_p_values(losses, p_value=name, delta=0.1) <= 0.05).mean() > 0.9


@pytest.mark.parametrize(("is_signed", "loss", "low"), [(False, -0.5, 0), (True, 1.5, -1), (False, math.nan, 0)])
def test_losses_outside_are_refused(is_signed: bool, loss: float, low: int) -> None:
    """A loss that is NaN or out of range is named as it was given, not as it was reversed."""
    with pytest.raises(ValueError, match=re.escape(f"losses[0] must be in [{low}, 1], got {loss}.")):
        excess_p_values([loss], p_value="wsr", delta=0.1, is_signed=is_signed)
