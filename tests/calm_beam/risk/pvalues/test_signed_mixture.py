"""The mixture of bets, against exact products, and the integers of its state."""

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
from calm_beam.risk.losses import LOSS_SCALE
from calm_beam.risk.pvalues import signed_mixture_p_value
from calm_beam.risk.pvalues.signed_mixture import BETS, mixture_p_value

# Multiples of 2^-20, so that losses are exact.
_LOSS = st.integers(-(2**20), 2**20).map(lambda units: units / 2**20)
_DELTA = st.floats(min_value=0.001, max_value=0.999)
# Larger than any in use too: accuracy is promised for all shares up to here.
_SHARE = st.one_of(st.sampled_from([*BETS]), st.floats(min_value=0.001, max_value=0.99))
_UNITS = st.one_of(st.integers(-LOSS_SCALE, LOSS_SCALE), st.sampled_from([-LOSS_SCALE, -1, 0, 1, LOSS_SCALE]))


def _exact(losses: list[float], delta: float) -> float:
    """Returns the p-value in rational arithmetic, from the definition."""
    wealth = Fraction(0)
    for share, start in BETS.items():
        eta = Fraction(share) / (1 - Fraction(delta))
        wealth += Fraction(start) * math.prod(1 + eta * (Fraction(delta) - Fraction(loss)) for loss in losses)
    return float(min(Fraction(1), 1 / wealth))


@settings(max_examples=50, deadline=None)
@given(losses=st.lists(_LOSS, min_size=1, max_size=12), delta=_DELTA)
def test_agrees_with_exact_products(losses: list[float], delta: float) -> None:
    """The p-value is at least that of the definition, and exceeds it by the rounding of logarithms alone."""
    computed = float(signed_mixture_p_value(np.array(losses)[:, None], delta=delta)[0])
    exact = _exact(losses, delta)
    assert exact * (1 - 1e-15) <= computed <= exact * math.exp(1.01 * len(losses) / LOSS_SCALE) * (1 + 1e-12)


@given(units=_UNITS, delta=_DELTA, share=_SHARE)
def test_logarithm_is_rounded_down(units: int, delta: float, share: float) -> None:
    """The integer is at most the logarithm in 50-digit arithmetic, and less than 1.01 units below it."""
    with mpmath.workdps(50):
        eta = mpmath.mpf(share) / (1 - mpmath.mpf(delta))
        exact = mpmath.log(1 + eta * (mpmath.mpf(delta) - mpmath.mpf(units) / LOSS_SCALE)) * LOSS_SCALE
        below = float(exact - int(log_capital(np.array(units), delta=delta, share=share)))
    assert 0 <= below < 1.01


def test_logarithms_are_these_integers() -> None:
    """On every machine, with any logarithm, the state has these committed digits."""
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
    """Arrays longer than one block, in any shape, give the values of single losses."""
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
    """The starting capitals add up to 1, and stakes leave a rest even if every loss is 1."""
    assert math.fsum(BETS.values()) <= 1
    assert all(0 < share < 1 for share in BETS)
    assert signed_mixture_p_value(np.ones((10_000, 1)), delta=0.999).tolist() == [1.0]


def test_a_mean_of_delta_shows_nothing() -> None:
    """Losses at delta do not change any capital."""
    assert signed_mixture_p_value(np.full((50, 1), 0.25), delta=0.25)[0] == pytest.approx(1, abs=1e-7)


@given(losses=st.lists(_LOSS, min_size=1, max_size=8), delta=_DELTA)
def test_falls_as_losses_fall(losses: list[float], delta: float) -> None:
    """A smaller loss never makes the p-value larger."""
    smaller = [max(-1.0, loss - 0.25) for loss in losses]
    table = np.stack([np.array(losses), np.array(smaller)], axis=1)
    larger_losses, smaller_losses = signed_mixture_p_value(table, delta=delta)
    assert smaller_losses <= larger_losses


def test_shape_and_extremes() -> None:
    """Leading axes are separate calibrations; overwhelming evidence is 1e-300, neither 0 nor NaN."""
    assert signed_mixture_p_value(np.zeros((7, 30, 3)), delta=0.1).shape == (7, 3)
    assert mixture_p_value(np.full((len(BETS), 2), 2**62)).tolist() == [1e-300, 1e-300]
    assert mixture_p_value(np.full((len(BETS), 2), -(2**62))).tolist() == [1.0, 1.0]


def test_wrong_arguments_are_refused() -> None:
    """Losses outside [-1, 1], no examples and too few axes are errors."""
    with pytest.raises(ValueError, match=re.escape("losses[0, 0] must be in [-1, 1], got 1.5.")):
        signed_mixture_p_value([[1.5]], delta=0.1)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        signed_mixture_p_value(np.zeros((0, 3)), delta=0.1)
    with pytest.raises(ValueError, match=re.escape("losses must have shape (..., n, thresholds), got (3,).")):
        signed_mixture_p_value(np.zeros(3), delta=0.1)
    with pytest.raises(ValueError, match=re.escape("delta must be in (0, 1), got 1.")):
        signed_mixture_p_value(np.zeros((3, 1)), delta=1)
