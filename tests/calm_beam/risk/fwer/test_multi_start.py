"""Tests of fixed sequence testing from several starting points."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.fwer import fixed_sequence_test, multi_start_test

_P = st.floats(min_value=0.0, max_value=1.0)


@st.composite
def _sequences_and_starts(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    p_values = draw(st.lists(st.sampled_from([0.0, 0.01, 0.02, 0.04, 0.5]) | _P, min_size=1, max_size=9))
    places = st.integers(min_value=0, max_value=len(p_values) - 1)
    return p_values, draw(st.lists(places, min_size=1, max_size=4, unique=True))


@given(case=_sequences_and_starts())
def test_agrees_with_the_algorithm_as_printed(case: tuple[list[float], list[int]]) -> None:
    """The result is that of the loop in the source: from each start down to its first failure."""
    p_values, starts = case
    rejected, tested = set(), set()
    for start in starts:
        for place in range(start, len(p_values)):
            tested.add(place)
            if p_values[place] > 0.05 / len(starts):
                break
            rejected.add(place)
    result = multi_start_test(p_values, epsilon=0.05, starts=starts)
    assert set(np.flatnonzero(result.rejected)) == rejected
    assert set(np.flatnonzero(result.tested)) == tested


@given(p_values=st.lists(_P, min_size=1, max_size=9))
def test_one_start_is_fixed_sequence_testing(p_values: list[float]) -> None:
    """Starting at the first hypothesis alone gives the plain fixed sequence test."""
    one, plain = multi_start_test(p_values, epsilon=0.05, starts=[0]), fixed_sequence_test(p_values, epsilon=0.05)
    assert np.array_equal(one.rejected, plain.rejected)
    assert np.array_equal(one.tested, plain.tested)


@pytest.mark.parametrize(("size", "starts"), [(1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (20, [0, 5, 10, 15])])
def test_default_starts_are_even(size: int, starts: list[int]) -> None:
    """Without starting points there are up to four, evenly spread, whatever the p-values."""
    p_values = np.random.default_rng(1).uniform(high=0.03, size=(200, size))
    expected = multi_start_test(p_values, epsilon=0.05, starts=starts).rejected
    assert np.array_equal(multi_start_test(p_values, epsilon=0.05).rejected, expected)


@pytest.mark.parametrize("starts", [[], [0, 0], [3], [-1]])
def test_bad_starts_are_refused(starts: list[int]) -> None:
    """Starting points are distinct places of the sequence."""
    with pytest.raises(
        ValueError, match=re.escape(f"starts must be one or more different places in [0, 3), got {starts}")
    ):
        multi_start_test([0.1, 0.1, 0.1], epsilon=0.05, starts=starts)


def test_fractional_starts_are_refused() -> None:
    """A place is a whole number."""
    with pytest.raises(TypeError, match="integer"):
        multi_start_test([0.1, 0.1], epsilon=0.05, starts=[0.5])  # type: ignore[list-item]
