"""The interval of a share, against its definition."""

import pytest
from scipy import stats

from calm_beam.risk.binomial_interval import binomial_interval


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
