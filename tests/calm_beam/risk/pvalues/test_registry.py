"""The p-values that a manifest may name: their needs, and their values on given losses, for and against a risk."""

import math
import re

import numpy as np
import pytest
from scipy import stats

from calm_beam.risk.evidence import Evidence, EvidenceError, IsFraction, LogCapital, Loss, SquaredLoss
from calm_beam.risk.losses import LOSS_SCALE
from calm_beam.risk.pvalues import (
    P_VALUES,
    empirical_bernstein_p_value,
    exact_binomial_p_value,
    excess_p_values,
    hoeffding_bentkus_p_value,
    hoeffding_p_value,
    p_values_of,
    signed_mixture_p_value,
    star_bets_p_value,
    wsr_p_value,
)
from tests.validity.suite import draws, most_misses
from tests.validity.worlds import World, beta_steep, coin, ternary

# Multiples of 1/8 have exact sums.
_LOSSES = np.random.default_rng(4).integers(0, 3, size=(60, 5)) / 8


def test_names() -> None:
    """The registry holds these names and cannot be changed."""
    assert list(P_VALUES) == [
        "hoeffding",
        "hoeffding_bentkus",
        "exact_binomial",
        "empirical_bernstein",
        "signed_mixture",
        "wsr",
        "star_bets",
    ]
    with pytest.raises(TypeError, match="does not support item assignment"):
        P_VALUES["clt"] = P_VALUES["wsr"]  # type: ignore[index]


def test_needs() -> None:
    """Only what a p-value needs is gathered: sums of one kind or two, one for every bet, or a table."""
    needs = {name: method.statistics(0.1) for name, method in P_VALUES.items()}
    assert needs["hoeffding"] == needs["hoeffding_bentkus"] == (Loss(),)
    assert needs["exact_binomial"] == (Loss(), IsFraction())
    assert needs["empirical_bernstein"] == (Loss(), SquaredLoss())
    assert [(bet.delta, bet.share) for bet in needs["signed_mixture"] if isinstance(bet, LogCapital)] == [
        (0.1, share) for share in (0.01, 0.03, 0.1, 0.3, 0.6, 0.95)
    ]
    assert needs["wsr"] == needs["star_bets"] == ()
    assert [name for name, method in P_VALUES.items() if method.needs_table] == ["wsr", "star_bets"]
    assert [name for name, method in P_VALUES.items() if method.takes_signed] == ["signed_mixture", "wsr", "star_bets"]


@pytest.mark.parametrize("name", P_VALUES)
def test_any_evidence_gives_one_p_value_per_threshold(name: str) -> None:
    """Values are in [0, 1]; no loss at all is better evidence than loss at delta's level."""
    method = P_VALUES[name]
    coins = np.random.default_rng(0).random((400, 1)) < [0.0, 0.1, 0.9]
    fixed = coins.astype(np.int64) * LOSS_SCALE
    sums = {statistic: statistic.values(fixed).sum(axis=0) for statistic in method.statistics(0.2)}
    evidence = Evidence(n=400, sums=sums, table=fixed if method.needs_table else None)
    p_values = method.p_values(evidence, 0.2, 0.05)
    assert p_values.shape == (3,)
    assert 0 <= p_values[0] < p_values[1] < 0.05
    assert p_values[2] > 0.9


def test_every_registered_p_value_is_what_its_function_gives() -> None:
    """The registered name and the function of that name agree to the last digit."""
    coins = (_LOSSES > 0.1).astype(float)
    sums, squares = _LOSSES.sum(axis=0), (_LOSSES**2).sum(axis=0)
    expected = {
        "hoeffding": hoeffding_p_value(sums, n=60, delta=0.3),
        "hoeffding_bentkus": hoeffding_bentkus_p_value(sums, n=60, delta=0.3),
        "exact_binomial": exact_binomial_p_value(coins.sum(axis=0), n=60, delta=0.3),
        "empirical_bernstein": empirical_bernstein_p_value(sums, squares, n=60, delta=0.3),
        "signed_mixture": signed_mixture_p_value(_LOSSES, delta=0.3),
        "wsr": wsr_p_value(_LOSSES, delta=0.3),
        "star_bets": star_bets_p_value(_LOSSES, delta=0.3, epsilon=0.05),
    }
    assert expected.keys() == P_VALUES.keys()
    for name, values in expected.items():
        losses = coins if name == "exact_binomial" else _LOSSES
        assert p_values_of(losses, p_value=name, delta=0.3).tolist() == values.tolist()


@pytest.mark.parametrize("name", P_VALUES)
def test_other_axes_are_left_alone(name: str) -> None:
    """Several calibrations at once give the values of each alone."""
    losses = np.random.default_rng(6).integers(0, 2, size=(20, 3, 4)).astype(float)
    together = p_values_of(losses, p_value=name, delta=0.6)
    assert together.shape == (3, 4)
    for place in np.ndindex(3, 4):
        assert p_values_of(losses[:, *place], p_value=name, delta=0.6) == together[place]


def test_what_cannot_be_tested_is_refused() -> None:
    """Fractions for a binomial test, no losses, and losses outside the range are errors."""
    with pytest.raises(EvidenceError, match="exact_binomial is for losses of 0 and 1 only"):
        p_values_of([[0.5]], p_value="exact_binomial", delta=0.1)
    with pytest.raises(ValueError, match=re.escape("losses must have shape (n, ...) with n at least 1, got (0, 2).")):
        p_values_of(np.zeros((0, 2)), p_value="wsr", delta=0.1)
    with pytest.raises(ValueError, match=re.escape("losses[0] must be in [0, 1], got -0.5.")):
        p_values_of([-0.5], p_value="hoeffding", delta=0.1)
    with pytest.raises(ValueError, match=re.escape("losses[0] must be in [-1, 1], got nan.")):
        p_values_of([math.nan], p_value="signed_mixture", delta=0.1)


def test_coins_give_the_upper_binomial_tail() -> None:
    """For losses of 0 and 1 the exact p-value is the probability at delta of at least as many losses."""
    sums = np.arange(31)
    losses = (np.arange(30)[:, None] < sums).astype(float)
    found = excess_p_values(losses, p_value="exact_binomial", delta=0.2)
    assert found == pytest.approx(stats.binom.sf(sums - 1, 30, 0.2), rel=1e-12)


@pytest.mark.parametrize("name", [name for name in P_VALUES if P_VALUES[name].takes_signed])
def test_signed_losses_are_reversed_around_delta(name: str) -> None:
    """Large losses are evidence, small ones are none; without their sign, the same data show less."""
    losses = np.tile([[0.5, -0.5], [0.1, -0.1]], (100, 1))
    high, low = excess_p_values(losses, p_value=name, delta=0.1, is_signed=True)
    # A p-value that aims at a level of 5 % first is not as far beyond it.
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
    """At a risk of delta a p-value of at most 0.05 occurs in at most a share 0.05 of all sets."""
    false = np.zeros(2, int)
    for losses in draws(world, replications=2000):
        p_values = excess_p_values(losses, p_value=name, delta=world.delta, is_signed=world.is_signed)
        false += (p_values <= 0.05).sum(axis=0)
    assert false[0] <= most_misses(2000, 0.05)
    assert false[1] <= false[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", P_VALUES)
def test_risks_far_above_delta_are_found(name: str) -> None:
    """A risk of three times delta is mostly found with 300 examples."""
    losses = np.asarray(np.random.default_rng(2).uniform(size=(300, 200)) < 0.3, dtype=np.float64)
    assert (excess_p_values(losses, p_value=name, delta=0.1) <= 0.05).mean() > 0.9


@pytest.mark.parametrize(("is_signed", "loss", "low"), [(False, -0.5, 0), (True, 1.5, -1), (False, math.nan, 0)])
def test_losses_outside_are_refused(is_signed: bool, loss: float, low: int) -> None:
    """A loss that is NaN or out of range is named as given, not as reversed."""
    with pytest.raises(ValueError, match=re.escape(f"losses[0] must be in [{low}, 1], got {loss}.")):
        excess_p_values([loss], p_value="wsr", delta=0.1, is_signed=is_signed)
