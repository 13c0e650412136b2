"""The p-values that bet.

The mixture of bets, against exact products, and the integers that its state is made of; bets that learn, and bets that
aim at a level, against loops that only ever look back.
"""

import itertools
import math
import re
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.risk.elementary import log_capital
from calm_beam.risk.fixed_point import LOSS_SCALE
from calm_beam.risk.pvalues import exact_binomial_p_value, signed_mixture_p_value, star_bets_p_value, wsr_p_value
from calm_beam.risk.pvalues.betting import BETS, mixture_p_value

# Multiples of 2^-20, so that losses are what they are said to be.
_LOSS = st.integers(-(2**20), 2**20).map(lambda units: units / 2**20)
_MIXTURE_DELTA = st.floats(min_value=0.001, max_value=0.999)
# Larger than any in use too: of all shares up to here the accuracy is promised.
_SHARE = st.one_of(st.sampled_from([*BETS]), st.floats(min_value=0.001, max_value=0.99))
_UNITS = st.one_of(st.integers(-LOSS_SCALE, LOSS_SCALE), st.sampled_from([-LOSS_SCALE, -1, 0, 1, LOSS_SCALE]))
_DELTA = st.floats(min_value=0.01, max_value=0.9)
_EPSILON = st.floats(min_value=0.001, max_value=0.5)


def _exact(losses: list[float], delta: float) -> float:
    """The p-value in rational arithmetic, from the definition."""
    wealth = Fraction(0)
    for share, start in BETS.items():
        eta = Fraction(share) / (1 - Fraction(delta))
        wealth += Fraction(start) * math.prod(1 + eta * (Fraction(delta) - Fraction(loss)) for loss in losses)
    return float(min(Fraction(1), 1 / wealth))


@settings(max_examples=50, deadline=None)
@given(losses=st.lists(_LOSS, min_size=1, max_size=12), delta=_MIXTURE_DELTA)
def test_agrees_with_exact_products(losses: list[float], delta: float) -> None:
    """The p-value is at least that of the definition, and above it by the rounding of the logarithms alone."""
    computed = float(signed_mixture_p_value(np.array(losses)[:, None], delta=delta)[0])
    exact = _exact(losses, delta)
    assert exact * (1 - 1e-15) <= computed <= exact * math.exp(1.01 * len(losses) / LOSS_SCALE) * (1 + 1e-12)


@given(units=_UNITS, delta=_MIXTURE_DELTA, share=_SHARE)
def test_logarithm_is_rounded_down(units: int, delta: float, share: float) -> None:
    """The integer is at most the logarithm in 50-digit arithmetic, and less than 1.01 units below it."""
    with mpmath.workdps(50):
        eta = mpmath.mpf(share) / (1 - mpmath.mpf(delta))
        exact = mpmath.log(1 + eta * (mpmath.mpf(delta) - mpmath.mpf(units) / LOSS_SCALE)) * LOSS_SCALE
        below = float(exact - int(log_capital(np.array(units), delta=delta, share=share)))
    assert 0 <= below < 1.01


def test_logarithms_are_these_integers() -> None:
    """Committed values: on every machine, however it computes a logarithm, the state has these very digits."""
    fixed = np.array([-LOSS_SCALE, -123456789, 0, 1, 98765432, LOSS_SCALE // 3, LOSS_SCALE])
    assert log_capital(fixed, delta=0.05, share=0.6).tolist() == [
        2184927780,
        208461440,
        133533054,
        133533054,
        72634717,
        -846830391,
        -3935438728,
    ]
    assert log_capital(fixed, delta=0.05, share=0.95).tolist() == [
        3083098435,
        325549445,
        209552159,
        209552158,
        114444543,
        -1430844503,
        -12866572143,
    ]
    assert log_capital(fixed, delta=0.9, share=0.01).tolist() == [
        747123765,
        381441789,
        370130386,
        370130386,
        361059766,
        236735587,
        -43165864,
    ]


def test_blocks_do_not_show() -> None:
    """Arrays longer than what is done at a time, in any shape, give what single values give."""
    fixed = np.random.default_rng(1).integers(-LOSS_SCALE, LOSS_SCALE, size=(5, 4001))
    whole = log_capital(fixed, delta=0.1, share=0.3)
    assert whole.shape == fixed.shape
    for place in ((0, 0), (2, 190), (2, 191), (4, 4000)):
        assert whole[place] == log_capital(fixed[place], delta=0.1, share=0.3)


def test_order_does_not_matter() -> None:
    """Every order of the examples gives the same p-value to the last bit."""
    losses = np.array([0.3, -0.7, 0.1, 1 / 3])
    found = {float(signed_mixture_p_value(np.array(order)[:, None], delta=0.2)[0])
             for order in itertools.permutations(losses)}  # fmt: skip
    assert len(found) == 1


def test_bettors_start_with_one_and_cannot_go_bankrupt() -> None:
    """The starting capitals add up to 1 and stakes leave something over even if every loss is 1."""
    assert math.fsum(BETS.values()) <= 1
    assert all(0 < share < 1 for share in BETS)
    assert signed_mixture_p_value(np.ones((10_000, 1)), delta=0.999).tolist() == [1.0]


def test_a_mean_of_delta_shows_nothing() -> None:
    """Losses at delta leave every capital as it was."""
    assert signed_mixture_p_value(np.full((50, 1), 0.25), delta=0.25)[0] == pytest.approx(1, abs=1e-7)


@given(losses=st.lists(_LOSS, min_size=1, max_size=8), delta=_MIXTURE_DELTA)
def test_falls_as_losses_fall(losses: list[float], delta: float) -> None:
    """A loss that is smaller never makes the p-value larger."""
    smaller = [max(-1.0, loss - 0.25) for loss in losses]
    table = np.stack([np.array(losses), np.array(smaller)], axis=1)
    larger_losses, smaller_losses = signed_mixture_p_value(table, delta=delta)
    assert smaller_losses <= larger_losses


def test_shape_and_extremes() -> None:
    """Leading axes are separate calibrations; what is all but certain is 1e-300, neither 0 nor NaN."""
    assert signed_mixture_p_value(np.zeros((7, 30, 3)), delta=0.1).shape == (7, 3)
    assert mixture_p_value(np.full((len(BETS), 2), 2**62)).tolist() == [1e-300, 1e-300]
    assert mixture_p_value(np.full((len(BETS), 2), -(2**62))).tolist() == [1.0, 1.0]


def test_wrong_arguments_of_signed_mixture_are_refused() -> None:
    """Losses outside [-1, 1], no examples and too few axes are errors."""
    with pytest.raises(ValueError, match=re.escape("losses[0, 0] must be in [-1, 1], got 1.5.")):
        signed_mixture_p_value([[1.5]], delta=0.1)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        signed_mixture_p_value(np.zeros((0, 3)), delta=0.1)
    with pytest.raises(ValueError, match=re.escape("losses must have shape (..., n, thresholds), got (3,).")):
        signed_mixture_p_value(np.zeros(3), delta=0.1)
    with pytest.raises(ValueError, match=re.escape("delta must be in (0, 1), got 1.")):
        signed_mixture_p_value(np.zeros((3, 1)), delta=1)


def _wsr_by_hand(losses: list[float], delta: float) -> float:
    """Bets on one example after the other, knowing those before it alone."""
    wealth = highest = 1.0
    total, squares, seen = delta, delta * (1 - delta), 1
    for loss in losses:
        bet = min(math.sqrt(2 * math.log(20) / (len(losses) * squares / seen)), 0.75 / (1 - delta))
        wealth *= 1 + bet * (delta - loss)
        highest = max(highest, wealth)
        total, seen = total + loss, seen + 1
        squares += (loss - total / seen) ** 2
    return 1 / highest


@settings(max_examples=60, deadline=None)
@given(losses=st.lists(_LOSS, min_size=1, max_size=40), delta=_DELTA)
def test_wsr_agrees_with_a_loop(losses: list[float], delta: float) -> None:
    """The p-value is one over the highest capital of a bettor who sees the examples one by one, rounded up."""
    computed = float(wsr_p_value(np.array(losses), delta=delta))
    expected = _wsr_by_hand(losses, delta)
    # Logarithms are rounded down to multiples of 2^-32.
    assert expected * (1 - 1e-12) <= computed <= expected * math.exp(1.01 * len(losses) / LOSS_SCALE) * (1 + 1e-12)


def test_order_matters() -> None:
    """The twin of the mixture's law: good news first gives another p-value than good news last."""
    losses = np.array([0.0] * 30 + [1.0] * 10)
    assert wsr_p_value(losses, delta=0.3) < wsr_p_value(losses[::-1], delta=0.3)


def test_columns_of_wsr_are_separate() -> None:
    """Each column gives what it gives alone, also where the table is worked through in parts."""
    losses = np.random.default_rng(2).integers(-64, 65, size=(1000, 3, 700)) / 64
    together = wsr_p_value(losses, delta=0.02)
    assert together.shape == (3, 700)
    for place in ((0, 0), (1, 333), (2, 699)):
        assert together[place] == wsr_p_value(losses[:, *place], delta=0.02)


def test_nothing_shown_is_one() -> None:
    """A bettor who never gains has a p-value of 1."""
    assert float(wsr_p_value(np.ones(100), delta=0.1)) == 1


def test_wrong_arguments_of_wsr_are_refused() -> None:
    """Losses outside [-1, 1], no examples and a single number are errors."""
    with pytest.raises(ValueError, match=re.escape("losses[0] must be in [-1, 1], got nan.")):
        wsr_p_value([math.nan], delta=0.1)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        wsr_p_value(np.zeros((0, 3)), delta=0.1)
    with pytest.raises(ValueError, match=re.escape("losses must have shape (n, ...), got a single number.")):
        wsr_p_value(0.5, delta=0.1)


def _star_bets_by_hand(losses: list[float], delta: float, epsilon: float) -> float:
    """Bets on one example after the other, knowing those before it alone."""
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
def test_star_bets_agrees_with_a_loop(losses: list[float], delta: float, epsilon: float) -> None:
    """The p-value is one over the highest capital of a bettor who sees the examples one by one."""
    computed = float(star_bets_p_value(np.array(losses), delta=delta, epsilon=epsilon))
    # Bets hang on capitals that are rounded down to multiples of 2^-32.
    assert computed == pytest.approx(_star_bets_by_hand(losses, delta, epsilon), rel=1e-4)


def test_a_bettor_never_goes_bankrupt() -> None:
    """The worst loss after the boldest bet leaves a thousandth of the capital, and the p-value is 1 at most."""
    losses = np.array([0.0] * 58 + [1.0, 0.0])
    assert 0.05 < float(star_bets_p_value(losses, delta=0.05, epsilon=0.05)) < 1
    assert float(star_bets_p_value(np.ones(100), delta=0.1, epsilon=0.05)) == 1


def test_no_loss_at_all_proves_what_it_can() -> None:
    """Where the exact test needs 59 examples without a loss, this one needs 60, and `wsr` 78."""
    assert float(exact_binomial_p_value(0.0, n=59, delta=0.05)) <= 0.05
    for n, is_enough in ((59, False), (60, True)):
        assert (float(star_bets_p_value(np.zeros(n), delta=0.05, epsilon=0.05)) <= 0.05) == is_enough
    for n, is_enough in ((77, False), (78, True)):
        assert (float(wsr_p_value(np.zeros(n), delta=0.05)) <= 0.05) == is_enough


def test_it_goes_on_after_its_goal() -> None:
    """Good losses have a p-value far below the level, also where little of it would have been enough."""
    assert float(star_bets_p_value(np.zeros(1000), delta=0.1, epsilon=0.5)) < 1e-9


def test_the_level_decides_the_bets() -> None:
    """Planned at the level that is looked at, more sets are accepted than planned at another one."""
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


def test_columns_of_star_bets_are_separate() -> None:
    """Each column gives what it gives alone."""
    losses = np.random.default_rng(2).integers(-64, 65, size=(500, 3, 70)) / 64
    together = star_bets_p_value(losses, delta=0.02, epsilon=0.1)
    assert together.shape == (3, 70)
    for place in ((0, 0), (1, 33), (2, 69)):
        assert together[place] == star_bets_p_value(losses[:, *place], delta=0.02, epsilon=0.1)


def test_wrong_arguments_of_star_bets_are_refused() -> None:
    """Losses outside [-1, 1], no examples, a single number and a level that is no fraction are errors."""
    with pytest.raises(ValueError, match=re.escape("losses[0] must be in [-1, 1], got nan.")):
        star_bets_p_value([math.nan], delta=0.1, epsilon=0.05)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        star_bets_p_value(np.zeros((0, 3)), delta=0.1, epsilon=0.05)
    with pytest.raises(ValueError, match=re.escape("losses must have shape (n, ...), got a single number.")):
        star_bets_p_value(0.5, delta=0.1, epsilon=0.05)
    with pytest.raises(ValueError, match=re.escape("epsilon must be in (0, 1), got 5. It is a fraction")):
        star_bets_p_value([0.0], delta=0.1, epsilon=5)
