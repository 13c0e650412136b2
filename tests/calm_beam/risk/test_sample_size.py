"""Power, the number of examples that it takes, and the stop of sequential calibrations in known worlds."""

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from scipy import stats

from calm_beam.risk import sample_size
from calm_beam.risk.losses import to_signed_fixed_point
from calm_beam.risk.pvalues import P_VALUES, p_values_of
from calm_beam.risk.pvalues.signed_mixture import BETS, signed_mixture_p_value
from calm_beam.risk.sample_size import (
    COIN_P_VALUES,
    beta_losses,
    coin_examples_needed,
    coin_losses,
    coin_p_value,
    exact_power,
    expected_stop,
    looks_at,
    resampled_losses,
    simulated_examples_needed,
    simulated_power,
)
from tests.sampling import sampled

_TEST: dict[str, Any] = {"delta": 0.1, "epsilon": 0.05}


@pytest.mark.parametrize("p_value", COIN_P_VALUES)
@pytest.mark.parametrize(("n", "risk", "delta"), [(1, 0.1, 0.5), (40, 0.05, 0.2), (137, 0.02, 0.06), (500, 0.07, 0.1)])
def test_exact_power_is_the_binomial_sum(p_value: str, n: int, risk: float, delta: float) -> None:
    """Power is the probability of all sums that are accepted, added up one by one."""
    accepted = [ones for ones in range(n + 1) if coin_p_value(p_value, ones, n=n, delta=delta) <= 0.05]
    expected = stats.binom.pmf(accepted, n, risk).sum()
    assert exact_power(p_value, n=n, risk=risk, delta=delta, epsilon=0.05) == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.parametrize("p_value", COIN_P_VALUES)
def test_simulated_power_agrees_with_the_exact_one(p_value: str) -> None:
    """Within four standard errors the simulation gives what the formula does."""
    settings = {"n": 300, "delta": 0.1, "epsilon": 0.05}
    exact = exact_power(p_value, risk=0.05, **settings)  # type: ignore[arg-type]
    simulated = simulated_power(p_value, coin_losses(0.05), replications=2000, seed=1, **settings)  # type: ignore[arg-type]
    assert simulated == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 2000) + 1e-12)


def test_power_at_delta_is_the_level() -> None:
    """At a risk of delta, power is the probability of an error, and at most epsilon."""
    for p_value in COIN_P_VALUES:
        assert exact_power(p_value, n=700, risk=0.1, delta=0.1, epsilon=0.05) <= 0.05


def test_a_risk_of_nothing_needs_the_least() -> None:
    """Without any loss, n examples suffice once (1 - delta)^n is at most epsilon: 59 at 5 and 5 %."""
    powers = [exact_power("exact_binomial", n=n, risk=0.0, delta=0.05, epsilon=0.05) for n in (58, 59)]
    assert powers == [0.0, 1.0]


@pytest.mark.parametrize("p_value", P_VALUES)
def test_simulation_is_reproducible(p_value: str) -> None:
    """The seed decides the result; another one gives other sets."""
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


@pytest.mark.parametrize("p_value", COIN_P_VALUES)
def test_p_values_of_coins_are_those_of_their_losses(p_value: str) -> None:
    """Counting ones gives the p-value that a calibration computes from the losses themselves, bit for bit."""
    for n, ones, delta in ((1, 0, 0.3), (7, 7, 0.9), (40, 2, 0.1), (300, 12, 0.1)):
        losses = np.arange(n)[:, None] < ones
        assert coin_p_value(p_value, ones, n=n, delta=delta) == p_values_of(losses * 1.0, p_value=p_value, delta=delta)


def _needed_by_trying_all(
    p_value: str, *, risk: float, delta: float, epsilon: float, power: float, at_most: int
) -> int | None:
    """Returns the number after the last one with too little power."""
    last_failure, largest_accepted = 0, -1
    for n in range(1, at_most + 1):
        # The number accepted at one size is accepted at the next.
        while coin_p_value(p_value, largest_accepted + 1, n=n, delta=delta) <= epsilon:
            largest_accepted += 1
        if stats.binom.cdf(largest_accepted, n, risk) < power:
            last_failure = n
    return last_failure + 1 if last_failure < at_most else None


@pytest.mark.parametrize(
    ("risk", "delta"),
    sampled([(0.0, 0.1), (0.03, 0.1), (0.06, 0.1), (0.25, 0.4), (0.5, 0.7), (0.0, 0.95), (0.9, 0.95)], keep=(0, 1, 3)),
)
@pytest.mark.parametrize("p_value", COIN_P_VALUES)
def test_examples_needed_by_trying_all(p_value: str, risk: float, delta: float) -> None:
    """The result is the least number from which on the power is enough everywhere, as found by trying all."""
    # No power equals a possible probability: a tie would depend on the last digit.
    for epsilon, power in ((0.05, 0.9), (0.01, 0.6), (0.8, 0.13)):
        asked = {"risk": risk, "delta": delta, "epsilon": epsilon, "power": power, "at_most": 300}
        assert coin_examples_needed(p_value, **asked) == _needed_by_trying_all(p_value, **asked)  # type: ignore[arg-type]


def test_teeth_that_rise_unevenly() -> None:
    """Close to delta the ends of teeth do not rise evenly; the number is right there too."""
    asked = {"risk": 0.485, "delta": 0.5, "epsilon": 0.3, "power": 0.5, "at_most": 2000}
    found = coin_examples_needed("hoeffding", **asked)  # type: ignore[arg-type]
    assert found == _needed_by_trying_all("hoeffding", **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("p_value", COIN_P_VALUES)
@pytest.mark.parametrize(("risk", "delta"), [(1e-4, 1e-3), (1e-5, 1e-4), (1e-8, 1e-7), (0.0999, 0.1)])
def test_few_p_values_are_computed(p_value: str, risk: float, delta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any small delta and close guess, about a thousand p-values give the number."""
    computed: list[int] = []

    def counted(name: str, ones: int, *, n: int, delta: float) -> float:
        computed.append(n)
        return coin_p_value(name, ones, n=n, delta=delta)

    monkeypatch.setattr(sample_size, "coin_p_value", counted)
    coin_examples_needed(p_value, risk=risk, delta=delta, epsilon=0.05, power=0.9, at_most=10_000_000)
    assert len(computed) < 1200
    assert max(computed) <= 10_000_000


def test_too_many_examples_are_given_up() -> None:
    """Beyond the limit the answer is None."""
    asked = {"risk": 0.0, "delta": 0.05, "epsilon": 0.05, "power": 0.9}
    assert coin_examples_needed("exact_binomial", **asked, at_most=59) == 59
    assert coin_examples_needed("exact_binomial", **asked, at_most=58) is None
    simulation = {"delta": 0.05, "epsilon": 0.05, "power": 0.9, "replications": 100, "seed": 0}
    losses = coin_losses(0.0)
    assert simulated_examples_needed("exact_binomial", losses, **simulation, at_most=59) == 59  # type: ignore[arg-type]
    assert simulated_examples_needed("exact_binomial", losses, **simulation, at_most=58) is None  # type: ignore[arg-type]


def test_simulation_finds_what_it_says() -> None:
    """The simulated power is enough at the result, and not at a number smaller by 1 %."""
    losses = beta_losses(0.05, std=0.1)
    simulation = {"delta": 0.1, "epsilon": 0.05, "replications": 220, "seed": 3}
    found = simulated_examples_needed("wsr", losses, power=0.8, at_most=5000, **simulation)  # type: ignore[arg-type]
    assert found is not None
    assert simulated_power("wsr", losses, n=found, **simulation) >= 0.8  # type: ignore[arg-type]
    below = min(found - 1, int(0.99 * found))
    assert simulated_power("wsr", losses, n=below, **simulation) < 0.8  # type: ignore[arg-type]


def test_losses_have_their_moments() -> None:
    """Coins, betas and resampled losses have the requested mean and deviation."""
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
    """Losses in [0, 1] with mean 0.1 cannot deviate by more than coins do."""
    message = f"loss_std must be above 0 and below 0.3, which losses of 0 and 1 have at risk 0.1; got {std:g}."
    with pytest.raises(ValueError, match=re.escape(message)):
        beta_losses(0.1, std=std)


def test_bad_pilots_are_refused() -> None:
    """A pilot has losses, all in [-1, 1]."""
    with pytest.raises(ValueError, match=re.escape("pilot must hold at least one loss.")):
        resampled_losses([])
    with pytest.raises(ValueError, match=re.escape("pilot[1] must be in [-1, 1], got 2.0.")):
        resampled_losses([0.5, 2.0])


def _columns(*risks: float, examples: int = 1000) -> np.ndarray:
    """Returns losses of 0 and 1, of which a share is 1 at each threshold."""
    losses = np.zeros((examples, len(risks)))
    for column, risk in enumerate(risks):
        losses[: round(risk * examples), column] = 1
    return to_signed_fixed_point(losses)


def _first_proof(examples: int) -> int:
    """Returns the number of examples without any loss after which the p-value is small enough."""
    p_values = [float(signed_mixture_p_value(np.zeros((n, 1)), delta=0.1)[0]) for n in range(1, examples)]
    return 1 + next(index for index, p_value in enumerate(p_values) if p_value <= 0.05)


def test_without_losses_the_proof_comes_at_a_known_example() -> None:
    """Without losses every calibration stops where the p-value reaches epsilon."""
    needed = _first_proof(200)
    found = expected_stop(_columns(0.0), looks=range(1, 201), **_TEST)
    assert found.place == 0
    assert found.shares == (needed / 200,) * 3
    assert sum(BETS.values()) == pytest.approx(1)


def test_the_last_threshold_that_is_proved_decides() -> None:
    """Thresholds above delta are never proved, and none after them is, however safe."""
    looks = looks_at(5000, first=20)
    found = expected_stop(_columns(0.0, 0.05, 0.2, 0.0), looks=looks, **_TEST)
    assert found.place == 1
    assert found.shares is not None
    safer = expected_stop(_columns(0.0), looks=looks, **_TEST)
    assert safer.shares is not None
    assert safer.shares[0] < found.shares[0] < 1


def test_what_cannot_be_proved_saves_nothing() -> None:
    """With a risk above delta, or too few examples, there is no threshold and no share."""
    for losses, looks in ((_columns(0.2), (5000,)), (_columns(0.0), (3,))):
        found = expected_stop(losses, looks=looks, **_TEST)
        assert (found.place, found.shares) == (-1, None)


def test_closer_to_delta_takes_more_examples() -> None:
    """A risk closer to delta takes more examples, and the interval contains the median."""
    medians = []
    for risk in (0.01, 0.03, 0.05, 0.07):
        found = expected_stop(_columns(risk), looks=looks_at(50_000, first=500), **_TEST)
        assert found.shares is not None
        median, low, high = found.shares
        assert low <= median <= high
        medians.append(median)
    assert medians == sorted(medians)
    assert medians[0] < medians[-1]


def test_one_seed_gives_one_answer() -> None:
    """One seed gives one result; another gives nearly the same."""
    looks = looks_at(2000, first=100)
    first, again, other = (expected_stop(_columns(0.05), looks=looks, seed=seed, **_TEST) for seed in (0, 0, 1))
    assert first == again
    assert first.shares is not None
    assert other.shares is not None
    assert other.shares[0] == pytest.approx(first.shares[0], rel=0.25)


def test_looks_end_with_all_examples() -> None:
    """Looks ascend to all examples, are few, and follow by at most 5 % or one round."""
    for examples, first in ((1, 1), (10, 20), (1000, 7), (10**9, 1000)):
        looks = looks_at(examples, first=first)
        assert looks[-1] == examples
        assert all(
            before < after <= max(before + first, math.ceil(1.05 * before))
            for before, after in itertools.pairwise(looks)
        )
        assert len(looks) < 400
