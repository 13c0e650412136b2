"""Tests of fixed sequence testing on short sequences that can be read off."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.fwer import fixed_sequence_test

_P = st.floats(min_value=0.0, max_value=1.0)


@pytest.mark.parametrize(
    ("p_values", "num_rejected", "num_tested"),
    [
        ([0.01, 0.02, 0.3, 0.01], 2, 3),
        ([0.3, 0.0, 0.0], 0, 1),
        ([0.0, 0.05, 0.05], 3, 3),
        ([0.05, math.nextafter(0.05, 1.0)], 1, 2),
        ([], 0, 0),
    ],
    ids=["stops at a failure", "first fails", "all rejected", "epsilon itself is enough", "no thresholds"],
)
def test_sequences(p_values: list[float], num_rejected: int, num_tested: int) -> None:
    """Hypotheses are rejected up to the first p-value above epsilon, which is the last one tested."""
    result = fixed_sequence_test(p_values, epsilon=0.05)
    places = range(len(p_values))
    assert result.rejected.tolist() == [place < num_rejected for place in places]
    assert result.tested.tolist() == [place < num_tested for place in places]
    assert result.last_rejected() == num_rejected - 1


@given(p_values=st.lists(_P, max_size=8), epsilon=st.floats(min_value=0.001, max_value=0.999))
def test_agrees_with_the_algorithm_as_printed(p_values: list[float], epsilon: float) -> None:
    """The result is that of the paper's loop."""
    num_rejected = 0
    for p in p_values:
        if p > epsilon:
            break
        num_rejected += 1
    result = fixed_sequence_test(p_values, epsilon=epsilon)
    assert result.rejected.sum() == num_rejected == result.last_rejected() + 1
    assert result.tested.sum() == min(num_rejected + 1, len(p_values))


@given(p_values=st.lists(_P, min_size=1, max_size=8), replacement=_P)
def test_what_follows_the_first_failure_is_never_looked_at(p_values: list[float], replacement: float) -> None:
    """Other p-values behind the first failure change nothing."""
    result = fixed_sequence_test(p_values, epsilon=0.05)
    changed = np.where(result.tested, p_values, replacement)
    assert np.array_equal(fixed_sequence_test(changed, epsilon=0.05).rejected, result.rejected)


def test_passing_over_failures_breaks_the_level() -> None:
    """On uniform p-values under the null, the sequence errs at epsilon; taking any small p-value errs far more."""
    p_values = np.random.default_rng(20220714).uniform(size=(4000, 20))
    misses = fixed_sequence_test(p_values, epsilon=0.05).rejected.any(axis=1).mean()
    # Four standard errors of a share of 0.05 in 4,000.
    assert abs(misses - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 4000)
    assert np.mean(p_values.min(axis=1) <= 0.05) > 0.6
