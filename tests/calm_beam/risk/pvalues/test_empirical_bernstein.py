"""At the empirical Bernstein p-value, Maurer and Pontil's bound equals delta."""

import re
import statistics

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.pvalues import empirical_bernstein_p_value, hoeffding_bentkus_p_value

_LOSSES = st.lists(st.floats(0, 1), min_size=2, max_size=30)
_DELTA = st.floats(min_value=0.01, max_value=0.99)


def _p_value(losses: list[float], delta: float) -> float:
    values = np.array(losses)
    sums, squares = [values.sum()], [(values**2).sum()]
    return float(empirical_bernstein_p_value(sums, squares, n=len(losses), delta=delta)[0])


@given(losses=_LOSSES, delta=_DELTA)
def test_bound_at_the_p_value_is_delta(losses: list[float], delta: float) -> None:
    """At u = p the bound, from its textbook form with the sample variance, is delta; a p-value of 1 has no u."""
    n, p_value = len(losses), _p_value(losses, delta)
    with mpmath.workdps(40):
        log = mpmath.log(2 / mpmath.mpf(p_value))
        variance = mpmath.mpf(statistics.variance([float(loss) for loss in losses]))
        bound = mpmath.fsum(losses) / n + mpmath.sqrt(2 * variance * log / n) + 7 * log / (3 * (n - 1))
    if p_value == 1:
        assert bound >= delta - 1e-9
    else:
        assert float(bound) == pytest.approx(delta, abs=1e-7)


@given(losses=_LOSSES, delta=_DELTA, excess=st.floats(0, 1))
def test_larger_squares_make_it_larger(losses: list[float], delta: float, excess: float) -> None:
    """Larger squares, as from rounding up or an upper bound, give a larger p-value, which stays valid."""
    values = np.array(losses)
    n, sums, squares = len(losses), values.sum(), (values**2).sum()
    larger = squares + excess * (n - squares)
    p_value = empirical_bernstein_p_value([sums, sums], [squares, larger], n=n, delta=delta)
    assert p_value[1] >= p_value[0] * (1 - 1e-12)


def test_small_variance_pays() -> None:
    """Losses near 0.05 are proved below 0.06, where Hoeffding-Bentkus, which ignores the variance, fails."""
    sums, squares = [1000 * 0.05], [1000 * (0.05**2 + 0.01**2)]
    assert empirical_bernstein_p_value(sums, squares, n=1000, delta=0.06)[0] < 0.05
    assert hoeffding_bentkus_p_value(sums, n=1000, delta=0.06)[0] > 0.05


def test_is_one_where_nothing_is_shown() -> None:
    """One example, or a mean of at least delta, gives exactly 1; neither is NaN, nor is a variance of 0."""
    assert empirical_bernstein_p_value([0.0], [0.0], n=1, delta=0.5).tolist() == [1.0]
    assert empirical_bernstein_p_value([5.0, 6.0, 10.0], [5.0, 6.0, 10.0], n=10, delta=0.5).tolist() == [1.0] * 3
    assert 0 < empirical_bernstein_p_value([0.0], [0.0], n=100, delta=0.5)[0] < 1e-8


def test_shape_is_kept() -> None:
    """Leading axes are separate calibrations."""
    assert empirical_bernstein_p_value(np.zeros((7, 3)), np.zeros((7, 3)), n=10, delta=0.1).shape == (7, 3)


@pytest.mark.parametrize(
    ("sums", "squares", "message"),
    [
        ([5.0], [float("nan")], "square_sum[0] must be in [0, 10] for n = 10, got nan. It is the sum of the squares"),
        ([5.0], [10.5], "square_sum[0] must be in [0, 10] for n = 10, got 10.5."),
        ([5.0], [[5.0]], "square_sum has shape (1, 1), loss_sum (1,): they must be alike."),
        ([5.0], [0.25], "square_sum must be at least loss_sum^2 / n, got 0.25 for a loss_sum of 5.0 and n = 10. It is"),
        ([11.0], [5.0], "loss_sum[0] must be in [0, 10] for n = 10, got 11.0."),
    ],
)
def test_impossible_sums_are_refused(sums: list[float], squares: list[float], message: str) -> None:
    """Sums that no losses in [0, 1] have, such as a variance in place of the squares, are refused by value."""
    with pytest.raises(ValueError, match=re.escape(message)):
        empirical_bernstein_p_value(sums, squares, n=10, delta=0.1)
