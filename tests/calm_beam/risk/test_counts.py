"""The interval of a share, against its definition, and the effect of another engine on a promise."""

import numpy as np
import pytest
from scipy import stats
from scipy.stats import binom

from calm_beam.risk.counts import binomial_interval, differing_upper, epsilon_elsewhere


@pytest.mark.parametrize(("count", "trials"), [(0, 50), (1, 50), (3, 50), (25, 50), (50, 50), (0, 1)])
def test_the_ends_leave_half_of_the_error_on_each_side(count: int, trials: int) -> None:
    """At each end, the count or a more extreme one has a probability of 2.5 %; 0 and 1 are ends by themselves."""
    low, high = binomial_interval(count, trials)
    assert low == 0 if count == 0 else stats.binom.sf(count - 1, trials, low) == pytest.approx(0.025)
    assert high == 1 if count == trials else stats.binom.cdf(count, trials, high) == pytest.approx(0.025)


def test_impossible_counts() -> None:
    """More successes than trials are refused."""
    with pytest.raises(ValueError, match=r"count must be in 0\.\.trials, got 3 of 2"):
        binomial_interval(3, 2)


@pytest.mark.parametrize(("prompts", "upper"), [(1000, 0.00299), (100, 0.0295), (1, 0.95)])
def test_nothing_that_differed_is_no_proof(prompts: int, upper: float) -> None:
    """For 0 in n, the bound is 1 - 0.05^(1/n): 0.3 % of 1,000 prompts."""
    assert differing_upper(0, prompts) == pytest.approx(1 - 0.05 ** (1 / prompts))
    assert differing_upper(0, prompts) == pytest.approx(upper, abs=5e-4)


def test_the_bound_of_q_is_right_with_its_probability() -> None:
    """The bound of q holds with its probability for any true share, over all possible counts."""
    counts = np.arange(201)
    bounds = np.array([differing_upper(int(count), 200) for count in counts])
    for true_share in (0.001, 0.01, 0.3, 0.9):
        assert binom.pmf(counts[bounds >= true_share], 200, true_share).sum() >= 0.95


def test_an_epsilon_of_five_percent_may_become_twenty_four() -> None:
    """At n = 5,000 and delta 5 %, with 0 differences in 1,000 prompts, an epsilon of 5 % may become 24 %."""
    q = differing_upper(0, 1000)
    assert epsilon_elsewhere(q, delta=0.05, epsilon=0.05, n=5000) == pytest.approx(0.242, abs=1e-3)


def test_it_is_what_a_simulation_finds() -> None:
    """It agrees with a simulation: losses of risk delta - q, tested by the exact binomial test."""
    delta, q, n = 0.1, 0.01, 2000
    sums = np.random.default_rng(0).binomial(n, delta - q, 20_000)
    accepted = (binom.cdf(sums, n, delta) <= 0.05).mean()
    assert epsilon_elsewhere(q, delta=delta, epsilon=0.05, n=n) == pytest.approx(accepted, abs=0.01)


def test_without_a_difference_the_promise_stands() -> None:
    """Without a difference the promise holds, and with more differing outputs it is broken more often, up to always."""
    found = [epsilon_elsewhere(q, delta=0.05, epsilon=0.05, n=1000) for q in (0, 0.001, 0.01, 0.05, 1)]
    assert found[0] <= 0.05
    assert found == sorted(found)
    assert found[-1] == 1
    # So few units prove nothing, whatever their losses are.
    assert epsilon_elsewhere(0.05, delta=0.05, epsilon=0.05, n=10) == 0


@pytest.mark.parametrize(("differing", "prompts", "level"), [(-1, 5, 0.9), (6, 5, 0.9), (0, 0, 0.9), (0, 5, 1.0)])
def test_numbers_out_of_range_are_refused(differing: int, prompts: int, level: float) -> None:
    """Numbers out of range are refused with their values."""
    with pytest.raises(ValueError, match="must be in"):
        differing_upper(differing, prompts, level=level)
    with pytest.raises(ValueError, match="must be in range"):
        epsilon_elsewhere(-0.1, delta=0.1, epsilon=0.1, n=1)
