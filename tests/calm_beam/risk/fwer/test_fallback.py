"""Tests of the fallback procedure."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.fwer import bonferroni_test, fallback_test, fixed_sequence_test, multi_start_test

_P = st.sampled_from([0.0, 0.01, 0.02, 0.04, 0.05, 0.5]) | st.floats(min_value=0.0, max_value=1.0)
_SEQUENCES = st.lists(_P, min_size=1, max_size=9)


def test_rejected_hypotheses_hand_on_their_share() -> None:
    """Levels are read off: .0125 and what was handed on; a failure starts anew at its own share."""
    result = fallback_test([0.0125, 0.025, 0.0376, 0.0125], epsilon=0.05)
    assert result.rejected.tolist() == [True, True, False, True]


@given(p_values=_SEQUENCES)
def test_all_weight_on_the_first_is_fixed_sequence_testing(p_values: list[float]) -> None:
    """With weights 1, 0, 0, ... both procedures reject, and look at, the same."""
    weights = [1.0] + [0.0] * (len(p_values) - 1)
    result, plain = fallback_test(p_values, epsilon=0.05, weights=weights), fixed_sequence_test(p_values, epsilon=0.05)
    assert np.array_equal(result.rejected, plain.rejected)
    assert np.array_equal(result.tested, plain.tested)


@given(p_values=_SEQUENCES, data=st.data())
def test_rejects_what_several_starts_reject(p_values: list[float], data: st.DataObject) -> None:
    """With the weight spread over the starting points, everything `multi_start_test` rejects is rejected."""
    size = len(p_values)
    starts = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=4, unique=True))
    weights = [1 / len(starts) if place in starts else 0.0 for place in range(size)]
    several = multi_start_test(p_values, epsilon=0.05, starts=starts).rejected
    assert not (several & ~fallback_test(p_values, epsilon=0.05, weights=weights).rejected).any()


@given(p_values=_SEQUENCES)
def test_rejects_what_bonferroni_rejects(p_values: list[float]) -> None:
    """With even weights, nobody is tested below epsilon / K."""
    assert not (
        bonferroni_test(p_values, epsilon=0.05).rejected & ~fallback_test(p_values, epsilon=0.05).rejected
    ).any()


def test_a_weight_of_nothing_rejects_nothing() -> None:
    """A hypothesis that nobody handed anything to is not rejected even at p = 0, and not tested."""
    result = fallback_test([0.9, 0.0], epsilon=0.05, weights=[1, 0])
    assert result.rejected.tolist() == [False, False]
    assert result.tested.tolist() == [True, False]


def test_the_level_never_exceeds_epsilon() -> None:
    """Shares that add up to 1 only almost never test a hypothesis above epsilon."""
    epsilon, size = 0.05, 20
    p_values = [0.0] * (size - 1) + [math.nextafter(epsilon, 1)]
    assert not fallback_test(p_values, epsilon=epsilon).rejected[-1]
    p_values[-1] = epsilon
    assert fallback_test(p_values, epsilon=epsilon, weights=[1 / 4] * 4 + [0] * (size - 4)).rejected[-1]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, 0.5], "weights must have one entry per threshold, shape (3,), got (2,)."),
        ([0.5, 0.5, 0.5], "weights must be at least 0 and add up to at most 1, got [0.5, 0.5, 0.5]."),
        ([1.5, -0.5, 0], "weights must be at least 0 and add up to at most 1, got [1.5, -0.5, 0.0]."),
        ([math.nan, 0, 0], "weights must be at least 0 and add up to at most 1, got [nan, 0.0, 0.0]."),
    ],
)
def test_bad_weights_are_refused(weights: list[float], message: str) -> None:
    """Weights are shares of epsilon, one per hypothesis."""
    with pytest.raises(ValueError, match=re.escape(message)):
        fallback_test([0.1, 0.1, 0.1], epsilon=0.05, weights=weights)
