"""Tests of fixed sequence testing on short sequences that can be read off."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.fixed_sequence import FixedSequenceResult, fixed_sequence_test

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
    expected = FixedSequenceResult(num_rejected=num_rejected, num_tested=num_tested)
    assert fixed_sequence_test(p_values, epsilon=0.05) == expected


@given(p_values=st.lists(_P, max_size=8), epsilon=st.floats(min_value=0.001, max_value=0.999))
def test_agrees_with_the_algorithm_as_printed(p_values: list[float], epsilon: float) -> None:
    """The result is that of the paper's loop."""
    num_rejected = 0
    for p in p_values:
        if p > epsilon:
            break
        num_rejected += 1
    result = fixed_sequence_test(p_values, epsilon=epsilon)
    assert result.num_rejected == num_rejected
    assert result.num_tested == min(num_rejected + 1, len(p_values))


@given(p_values=st.lists(_P, min_size=1, max_size=8), replacement=_P)
def test_what_follows_the_first_failure_is_never_looked_at(p_values: list[float], replacement: float) -> None:
    """Other p-values behind the first failure change nothing."""
    result = fixed_sequence_test(p_values, epsilon=0.05)
    changed = p_values[: result.num_tested] + [replacement] * (len(p_values) - result.num_tested)
    assert fixed_sequence_test(changed, epsilon=0.05) == result


def test_passing_over_failures_breaks_the_level() -> None:
    """On uniform p-values under the null, the sequence errs at epsilon; taking any small p-value errs far more."""
    rng = np.random.default_rng(20220714)
    p_values = rng.uniform(size=(4000, 20))
    misses = np.mean([fixed_sequence_test(row, epsilon=0.05).num_rejected > 0 for row in p_values])
    # Four standard errors of a share of 0.05 in 4,000.
    assert abs(misses - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 4000)
    assert np.mean(p_values.min(axis=1) <= 0.05) > 0.6


@pytest.mark.parametrize("value", [math.nan, -0.1, 1.5])
def test_p_values_outside_are_refused(value: float) -> None:
    """A p-value that is NaN or outside [0, 1] is refused, even behind the first failure."""
    with pytest.raises(ValueError, match=re.escape(f"p_values[2] must be in [0, 1], got {value}.")):
        fixed_sequence_test([0.01, 0.5, value], epsilon=0.05)


@pytest.mark.parametrize("epsilon", [0, 1, 5, -0.05, math.nan])
def test_epsilon_outside_is_refused(epsilon: float) -> None:
    """Epsilon has to lie strictly inside (0, 1)."""
    with pytest.raises(ValueError, match=re.escape(f"epsilon must be in (0, 1), got {epsilon}. It is a probability")):
        fixed_sequence_test([0.01], epsilon=epsilon)


def test_one_row_of_p_values_is_expected() -> None:
    """Several objectives are tested one at a time, so a table is refused."""
    with pytest.raises(ValueError, match=re.escape("p_values must have shape (thresholds,), got (2, 3).")):
        fixed_sequence_test(np.zeros((2, 3)), epsilon=0.05)
