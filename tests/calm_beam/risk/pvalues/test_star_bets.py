"""Bets that aim at a level, against a loop that only ever looks back."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.risk.pvalues import exact_binomial_p_value, star_bets_p_value, wsr_p_value

_LOSS = st.integers(-(2**20), 2**20).map(lambda units: units / 2**20)
_DELTA = st.floats(min_value=0.01, max_value=0.9)
_EPSILON = st.floats(min_value=0.001, max_value=0.5)


def _by_hand(losses: list[float], delta: float, epsilon: float) -> float:
    """Returns the p-value of bets on one example after the other that use only earlier ones."""
    log_wealth = highest = 0.0
    seen, squares = 20, 20 * delta * (1 - delta)
    cubes = squares * (1 - 2 * delta)
    for left, loss in zip(range(len(losses), 0, -1), losses, strict=True):
        target = math.log(1 / epsilon)
        while target <= highest:
            target += math.log(1 / epsilon)
        bet = math.sqrt(2 * (target - log_wealth) / left / (squares / seen))
        bet /= math.sqrt(1 + 4 / 3 * max(0.0, cubes / squares) * bet)
        log_wealth += math.log1p(min(bet, (1 - 2**-10) / (1 - delta)) * (delta - loss))
        highest = max(highest, log_wealth)
        seen, squares, cubes = seen + 1, squares + (loss - delta) ** 2, cubes + (loss - delta) ** 3
    return math.exp(-highest)


@settings(max_examples=60, deadline=None)
@given(losses=st.lists(_LOSS, min_size=1, max_size=40), delta=_DELTA, epsilon=_EPSILON)
def test_agrees_with_a_loop(losses: list[float], delta: float, epsilon: float) -> None:
    """The p-value is one over the highest capital of a bettor who sees the examples one by one."""
    computed = float(star_bets_p_value(np.array(losses), delta=delta, epsilon=epsilon))
    # Bets depend on capitals that are rounded down to multiples of 2^-32.
    assert computed == pytest.approx(_by_hand(losses, delta, epsilon), rel=1e-4)


def test_a_bettor_never_goes_bankrupt() -> None:
    """The worst loss after the boldest bet leaves a thousandth of the capital, and the p-value is 1 at most."""
    losses = np.array([0.0] * 58 + [1.0, 0.0])
    assert 0.05 < float(star_bets_p_value(losses, delta=0.05, epsilon=0.05)) < 1
    assert float(star_bets_p_value(np.ones(100), delta=0.1, epsilon=0.05)) == 1


def test_no_loss_at_all_proves_what_it_can() -> None:
    """The exact test needs 59 examples without a loss, this one 60, and `wsr` 78."""
    assert float(exact_binomial_p_value(0.0, n=59, delta=0.05)) <= 0.05
    for n, is_enough in ((59, False), (60, True)):
        assert (float(star_bets_p_value(np.zeros(n), delta=0.05, epsilon=0.05)) <= 0.05) == is_enough
    for n, is_enough in ((77, False), (78, True)):
        assert (float(wsr_p_value(np.zeros(n), delta=0.05)) <= 0.05) == is_enough


def test_it_goes_on_after_its_goal() -> None:
    """Good losses have a p-value far below the level, even if few of them were enough."""
    assert float(star_bets_p_value(np.zeros(1000), delta=0.1, epsilon=0.5)) < 1e-9


def test_the_level_decides_the_bets() -> None:
    """Planned at the tested level, more sets are accepted than planned at another one."""
    losses = (np.random.default_rng(4).uniform(size=(300, 2000)) < 0.06) * 1.0
    shares = [
        [float((star_bets_p_value(losses, delta=0.1, epsilon=planned) <= level).mean()) for planned in (0.2, 0.01)]
        for level in (0.2, 0.01)
    ]
    assert shares[0][0] > shares[0][1] + 0.02
    assert shares[1][1] > shares[1][0] + 0.02


def test_it_proves_more_than_a_single_goal() -> None:
    """Coins of a risk below delta are accepted more often than by `wsr`, and nearly as often as by the exact test."""
    losses = (np.random.default_rng(5).uniform(size=(350, 3000)) < 0.06) * 1.0
    ours = (star_bets_p_value(losses, delta=0.1, epsilon=0.05) <= 0.05).mean()
    theirs = (wsr_p_value(losses, delta=0.1) <= 0.05).mean()
    exact = (exact_binomial_p_value(losses.sum(axis=0), n=350, delta=0.1) <= 0.05).mean()
    assert theirs + 0.15 < ours < exact + 0.02
    assert ours > exact - 0.03


def test_columns_are_separate() -> None:
    """Each column gives its value alone."""
    losses = np.random.default_rng(2).integers(-64, 65, size=(500, 3, 70)) / 64
    together = star_bets_p_value(losses, delta=0.02, epsilon=0.1)
    assert together.shape == (3, 70)
    for place in ((0, 0), (1, 33), (2, 69)):
        assert together[place] == star_bets_p_value(losses[:, *place], delta=0.02, epsilon=0.1)


def test_wrong_arguments_are_refused() -> None:
    """Losses outside [-1, 1], no examples, a single number and a level outside (0, 1) are errors."""
    with pytest.raises(ValueError, match=re.escape("losses[0] must be in [-1, 1], got nan.")):
        star_bets_p_value([math.nan], delta=0.1, epsilon=0.05)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        star_bets_p_value(np.zeros((0, 3)), delta=0.1, epsilon=0.05)
    with pytest.raises(ValueError, match=re.escape("losses must have shape (n, ...), got a single number.")):
        star_bets_p_value(0.5, delta=0.1, epsilon=0.05)
    with pytest.raises(ValueError, match=re.escape("epsilon must be in (0, 1), got 5. It is a fraction")):
        star_bets_p_value([0.0], delta=0.1, epsilon=5)
