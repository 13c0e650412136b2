"""What holds for every procedure alike."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.fwer import PROCEDURES, Procedure

_P = st.sampled_from([0.0, 0.01, 0.0125, 0.025, 0.05]) | st.floats(min_value=0.0, max_value=1.0)
_EACH = pytest.mark.parametrize("procedure", PROCEDURES.values(), ids=PROCEDURES.keys())


@_EACH
@given(data=st.data())
def test_smaller_p_values_reject_no_less(procedure: Procedure, data: st.DataObject) -> None:
    """What is rejected stays rejected when any of the p-values fall."""
    p_values = np.array(data.draw(st.lists(_P, min_size=1, max_size=9)))
    factors = np.array(data.draw(st.lists(st.floats(0, 1), min_size=p_values.size, max_size=p_values.size)))
    before = procedure(p_values, epsilon=0.05).rejected
    assert not (before & ~procedure(p_values * factors, epsilon=0.05).rejected).any()


@_EACH
@given(p_values=st.lists(_P, max_size=9), low=st.floats(0.001, 0.999), high=st.floats(0.001, 0.999))
def test_a_larger_epsilon_rejects_no_less(procedure: Procedure, p_values: list[float], low: float, high: float) -> None:
    """What is rejected at epsilon is rejected at any larger one."""
    low, high = min(low, high), max(low, high)
    before = procedure(p_values, epsilon=low).rejected
    assert not (before & ~procedure(p_values, epsilon=high).rejected).any()


@_EACH
@given(p_values=st.lists(_P, max_size=9))
def test_rejected_means_tested_and_at_most_epsilon(procedure: Procedure, p_values: list[float]) -> None:
    """Nothing is rejected untested or above epsilon, and what was not tested has no say."""
    result = procedure(p_values, epsilon=0.05)
    assert not (result.rejected & ~result.tested).any()
    assert not (result.rejected & (np.array(p_values) > 0.05)).any()
    for replacement in (0.0, 1.0):
        changed = np.where(result.tested, p_values, replacement)
        assert np.array_equal(procedure(changed, epsilon=0.05).rejected, result.rejected)


@_EACH
def test_leading_axes_are_separate_calibrations(procedure: Procedure) -> None:
    """A table of p-values gives row for row what its rows give alone."""
    p_values = np.random.default_rng(7).uniform(size=(3, 50, 6)) ** 4
    table = procedure(p_values, epsilon=0.05)
    assert table.last_rejected().shape == (3, 50)
    for place in np.ndindex(3, 50):
        row = procedure(p_values[place], epsilon=0.05)
        assert np.array_equal(table.rejected[place], row.rejected)
        assert np.array_equal(table.tested[place], row.tested)
        assert table.last_rejected()[place] == row.last_rejected()


@_EACH
def test_independent_uniform_p_values_are_rejected_at_most_at_epsilon(procedure: Procedure) -> None:
    """With every null true and p-values as small as they may be, any is rejected in a share epsilon of trials."""
    p_values = np.random.default_rng(11).uniform(size=(20_000, 8))
    misses = procedure(p_values, epsilon=0.1).rejected.any(axis=1).mean()
    assert misses < 0.1 + 3.3 * math.sqrt(0.1 * 0.9 / 20_000)
    assert misses > 0.05


@_EACH
@pytest.mark.parametrize("value", [math.nan, -0.1, 1.5])
def test_p_values_outside_are_refused(procedure: Procedure, value: float) -> None:
    """A p-value that is NaN or outside [0, 1] is refused, even behind the first failure."""
    with pytest.raises(ValueError, match=re.escape(f"p_values[2] must be in [0, 1], got {value}.")):
        procedure([0.01, 0.5, value], epsilon=0.05)
    with pytest.raises(ValueError, match=re.escape(f"p_values[1, 0] must be in [0, 1], got {value}.")):
        procedure([[0.01], [value]], epsilon=0.05)


@_EACH
@pytest.mark.parametrize("epsilon", [0, 1, 5, -0.05, math.nan])
def test_epsilon_outside_is_refused(procedure: Procedure, epsilon: float) -> None:
    """Epsilon has to lie strictly inside (0, 1)."""
    with pytest.raises(ValueError, match=re.escape(f"epsilon must be in (0, 1), got {epsilon}. It is a probability")):
        procedure([0.01], epsilon=epsilon)


@_EACH
def test_a_sequence_is_expected(procedure: Procedure) -> None:
    """A single number is refused; an empty sequence rejects nothing."""
    with pytest.raises(
        ValueError, match=re.escape("p_values must have shape (..., thresholds), got the single number")
    ):
        procedure(0.01, epsilon=0.05)
    empty = procedure([], epsilon=0.05)
    assert empty.rejected.shape == empty.tested.shape == (0,)
    assert empty.last_rejected() == -1
