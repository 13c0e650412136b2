"""Tests of power and of the number of examples that it takes."""

import math
import re

import numpy as np
import pytest
from scipy import stats

from calm_beam.risk.pvalues import P_VALUES
from calm_beam.risk.sample_size import (
    SUM_P_VALUES,
    beta_losses,
    coin_losses,
    exact_power,
    examples_needed,
    resampled_losses,
    simulated_power,
)


@pytest.mark.parametrize("p_value", SUM_P_VALUES)
@pytest.mark.parametrize(("n", "risk", "delta"), [(1, 0.1, 0.5), (40, 0.05, 0.2), (137, 0.02, 0.06), (500, 0.07, 0.1)])
def test_exact_power_is_the_binomial_sum(p_value: str, n: int, risk: float, delta: float) -> None:
    """Power is the probability of all sums that are accepted, added up one by one."""
    sums = np.arange(n + 1)
    accepted = SUM_P_VALUES[p_value](sums, n=n, delta=delta) <= 0.05  # type: ignore[arg-type]
    expected = stats.binom.pmf(sums[accepted], n, risk).sum()
    assert exact_power(p_value, n=n, risk=risk, delta=delta, epsilon=0.05) == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.parametrize("p_value", SUM_P_VALUES)
def test_simulated_power_agrees_with_the_exact_one(p_value: str) -> None:
    """Within four standard errors the simulation gives what the formula does."""
    settings = {"n": 300, "delta": 0.1, "epsilon": 0.05}
    exact = exact_power(p_value, risk=0.05, **settings)  # type: ignore[arg-type]
    simulated = simulated_power(p_value, coin_losses(0.05), replications=2000, seed=1, **settings)  # type: ignore[arg-type]
    assert simulated == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 2000) + 1e-12)


def test_power_at_delta_is_the_level() -> None:
    """At a risk of delta what is called power is the chance of an error, and at most epsilon."""
    for p_value in SUM_P_VALUES:
        assert exact_power(p_value, n=700, risk=0.1, delta=0.1, epsilon=0.05) <= 0.05


def test_a_risk_of_nothing_needs_the_least() -> None:
    """Without any loss, n examples suffice once (1 - delta)^n is at most epsilon: 59 at 5 and 5 %."""
    powers = [exact_power("exact_binomial", n=n, risk=0.0, delta=0.05, epsilon=0.05) for n in (58, 59)]
    assert powers == [0.0, 1.0]


@pytest.mark.parametrize("p_value", P_VALUES)
def test_simulation_is_reproducible(p_value: str) -> None:
    """The seed decides everything; another one gives other sets."""
    settings = {"n": 150, "delta": 0.1, "epsilon": 0.05, "replications": 300}
    powers = [
        simulated_power(p_value, coin_losses(0.04), seed=seed, **settings)  # type: ignore[arg-type]
        for seed in (3, 3, 4)
    ]
    assert powers[0] == powers[1]
    assert 0 <= powers[0] <= 1


def test_a_larger_set_extends_a_smaller_one() -> None:
    """With one seed, the first losses of every set are the same, whatever n."""
    short, long = (beta_losses(0.1, std=0.1)(np.random.default_rng((5, 0)), (n, 50)) for n in (20, 40))
    assert np.array_equal(short, long[:20])


@pytest.mark.parametrize(("risk", "delta"), [(0.0, 0.1), (0.03, 0.1), (0.07, 0.1), (0.2, 0.4)])
@pytest.mark.parametrize("p_value", SUM_P_VALUES)
def test_examples_needed_by_trying_all(p_value: str, risk: float, delta: float) -> None:
    """Beyond the number that is found the power is enough for a tooth of the saw and more; the search skips little."""

    def power_at(n: int) -> float:
        return exact_power(p_value, n=n, risk=risk, delta=delta, epsilon=0.05)

    window = math.ceil(1 / delta)
    needed = examples_needed(power_at, power=0.9, window=window, at_most=10_000)
    assert needed is not None
    powers = [power_at(n) for n in range(1, 2 * needed + window + 2)]
    assert min(powers[needed - 1 :]) >= 0.9
    # From here on the power was enough for good: the search may find nothing better.
    last_failure = max((n for n, power in enumerate(powers, start=1) if power < 0.9), default=0)
    assert last_failure < needed <= last_failure + 1 + window


@pytest.mark.parametrize("threshold", [1, 2, 3, 17, 64, 99, 100])
def test_monotone_power_is_bisected(threshold: int) -> None:
    """Where power is monotone and needs no window, the least number is found."""
    assert examples_needed(lambda n: float(n >= threshold), power=0.9, window=0, at_most=100) == threshold


def test_too_many_examples_are_given_up() -> None:
    """Beyond the limit the answer is None."""
    assert examples_needed(lambda n: float(n >= 101), power=0.9, window=0, at_most=100) is None


def test_losses_have_their_moments() -> None:
    """Coins, betas and resampled losses have the mean and the deviation that were asked for."""
    rng = np.random.default_rng(9)
    coins = coin_losses(0.3)(rng, (500, 400))
    assert set(np.unique(coins)) == {0.0, 1.0}
    assert coins.mean() == pytest.approx(0.3, abs=0.005)
    betas = beta_losses(0.1, std=0.25)(rng, (500, 400))
    assert (betas.mean(), betas.std()) == pytest.approx((0.1, 0.25), abs=0.003)
    resampled = resampled_losses([-0.5, 0.0, 0.25])(rng, (500, 400))
    assert set(np.unique(resampled)) == {-0.5, 0.0, 0.25}
    assert resampled.mean() == pytest.approx(-0.25 / 3, abs=0.005)


@pytest.mark.parametrize("std", [0.0, -0.1, 0.301, 0.5, math.nan])
def test_deviations_that_cannot_be_are_refused(std: float) -> None:
    """No losses in [0, 1] with mean 0.1 deviate by more than coins do."""
    message = f"loss_std must be above 0 and below 0.3, which losses of 0 and 1 have at risk 0.1; got {std:g}."
    with pytest.raises(ValueError, match=re.escape(message)):
        beta_losses(0.1, std=std)


def test_bad_pilots_are_refused() -> None:
    """A pilot has losses, all in [-1, 1]."""
    with pytest.raises(ValueError, match=re.escape("pilot must hold at least one loss.")):
        resampled_losses([])
    with pytest.raises(ValueError, match=re.escape("pilot[1] must be in [-1, 1], got 2.0.")):
        resampled_losses([0.5, 2.0])
