"""The binomial p-value; its values in 60-digit arithmetic are in test_loss_sums.py."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest

from calm_beam.risk.pvalues import exact_binomial_p_value, hoeffding_bentkus_p_value


@pytest.mark.parametrize("n", [1, 2, 13, 40])
@pytest.mark.parametrize("delta", [0.02, 0.5, 0.9])
def test_agrees_with_exact_fractions(n: int, delta: float) -> None:
    """Every value is the binomial tail, summed in rational arithmetic, rounded up; at n losses it is 1."""
    p = Fraction(delta)
    terms = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    computed = exact_binomial_p_value(np.arange(n + 1), n=n, delta=delta)
    for k, p_value in enumerate(computed.tolist()):
        expected = sum(terms[: k + 1])
        assert expected <= Fraction(p_value) <= expected * (1 + Fraction(2, 10**13))
    assert computed[-1] == 1


def test_improves_on_hoeffding_bentkus() -> None:
    """On coins it is never above Hoeffding-Bentkus, and far below where the latter pays its factor e."""
    sums = np.arange(0, 100)
    ours, theirs = exact_binomial_p_value(sums, n=1000, delta=0.1), hoeffding_bentkus_p_value(sums, n=1000, delta=0.1)
    assert np.all(ours <= theirs * (1 + 1e-12))
    assert ours[70] < theirs[70] / 2.5


def test_fractions_are_refused() -> None:
    """A sum that coins cannot have is refused by value."""
    message = "loss_sum must hold whole numbers, got 2.5. The binomial p-value is for losses of 0 and 1 only"
    with pytest.raises(ValueError, match=re.escape(message)):
        exact_binomial_p_value([1.0, 2.5], n=10, delta=0.1)


def test_shape_is_kept() -> None:
    """Leading axes are separate calibrations."""
    assert exact_binomial_p_value(np.zeros((7, 3)), n=10, delta=0.1).shape == (7, 3)
    assert exact_binomial_p_value([], n=10, delta=0.1).shape == (0,)
