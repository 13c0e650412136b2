"""Bets that learn, against a loop that only ever looks back."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calm_beam.risk.losses import LOSS_SCALE
from calm_beam.risk.pvalues import wsr_p_value

_LOSS = st.integers(-(2**20), 2**20).map(lambda units: units / 2**20)
_DELTA = st.floats(min_value=0.01, max_value=0.9)


def _by_hand(losses: list[float], delta: float) -> float:
    """Returns the p-value of bets on one example after the other that use only earlier ones."""
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
def test_agrees_with_a_loop(losses: list[float], delta: float) -> None:
    """The p-value is one over the highest capital of a bettor who sees the examples one by one, rounded up."""
    computed = float(wsr_p_value(np.array(losses), delta=delta))
    expected = _by_hand(losses, delta)
    # Logarithms are rounded down to multiples of 2^-32.
    assert expected * (1 - 1e-12) <= computed <= expected * math.exp(1.01 * len(losses) / LOSS_SCALE) * (1 + 1e-12)


def test_order_matters() -> None:
    """Small losses first give another p-value than small losses last (the twin of the mixture's law)."""
    losses = np.array([0.0] * 30 + [1.0] * 10)
    assert wsr_p_value(losses, delta=0.3) < wsr_p_value(losses[::-1], delta=0.3)


def test_columns_are_separate() -> None:
    """Each column gives its value alone, also if the table is processed in parts."""
    losses = np.random.default_rng(2).integers(-64, 65, size=(1000, 3, 700)) / 64
    together = wsr_p_value(losses, delta=0.02)
    assert together.shape == (3, 700)
    for place in ((0, 0), (1, 333), (2, 699)):
        assert together[place] == wsr_p_value(losses[:, *place], delta=0.02)


def test_nothing_shown_is_one() -> None:
    """A bettor who never gains has a p-value of 1."""
    assert float(wsr_p_value(np.ones(100), delta=0.1)) == 1


def test_wrong_arguments_are_refused() -> None:
    """Losses outside [-1, 1], no examples and a single number are errors."""
    with pytest.raises(ValueError, match=re.escape("losses[0] must be in [-1, 1], got nan.")):
        wsr_p_value([math.nan], delta=0.1)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        wsr_p_value(np.zeros((0, 3)), delta=0.1)
    with pytest.raises(ValueError, match=re.escape("losses must have shape (n, ...), got a single number.")):
        wsr_p_value(0.5, delta=0.1)
