"""Tests of p-values of losses at hand."""

import math
import re

import numpy as np
import pytest

from calm_beam.risk.evidence import EvidenceError
from calm_beam.risk.in_memory import p_values_of
from calm_beam.risk.pvalues import (
    P_VALUES,
    empirical_bernstein_p_value,
    exact_binomial_p_value,
    hoeffding_bentkus_p_value,
    hoeffding_p_value,
    signed_mixture_p_value,
    star_bets_p_value,
    wsr_p_value,
)

# Multiples of 1/8 have exact sums.
_LOSSES = np.random.default_rng(4).integers(0, 3, size=(60, 5)) / 8


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
    """Losses of several calibrations give what each gives alone."""
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
