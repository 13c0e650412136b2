"""Exponential and logarithm against 40-digit arithmetic; test_bits.py compares their bits between machines."""

import mpmath
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from calm_beam.risk import elementary


@given(value=st.floats(-708, 709))
@example(value=0.34657359027997264)
@example(value=-1e-300)
@example(value=709.0)
@example(value=-708.0)
def test_exp(value: float) -> None:
    """The exponential is right to a share of 2^-51, and a normal number."""
    computed = float(elementary.exp(value))
    with mpmath.workdps(40):
        assert abs(mpmath.mpf(computed) / mpmath.exp(value) - 1) <= elementary.RELATIVE_ERROR
    assert np.finfo(np.float64).tiny <= computed < np.inf


@given(value=st.floats(np.finfo(np.float64).tiny, np.finfo(np.float64).max))
@example(value=0.7071067811865475)
@example(value=0.7071067811865476)
@example(value=1.4142135623730951)
@example(value=0.9999999999999999)
@example(value=1.0000000000000002)
def test_log(value: float) -> None:
    """The logarithm is right to a share of 2^-51, next to 1 as well."""
    computed = float(elementary.log(value))
    with mpmath.workdps(40):
        assert abs(computed - mpmath.log(value)) <= abs(mpmath.log(value)) * elementary.RELATIVE_ERROR


def test_exact_points_and_ends() -> None:
    """The values at 0 and 1 are exact, inputs out of range give the end values, and NaN gives NaN."""
    assert elementary.exp([0.0, -0.0]).tolist() == [1.0, 1.0]
    assert elementary.log([1.0]).tolist() == [0.0]
    assert elementary.exp([-1e9, -np.inf, 1e9]).tolist() == elementary.exp([-708.0, -708.0, 709.0]).tolist()
    assert np.isnan(elementary.exp(np.nan))


@pytest.mark.parametrize("function", [elementary.exp, elementary.log])
def test_every_element_is_by_itself(function: np.ufunc) -> None:
    """An element's bits depend neither on other elements nor on the array's shape."""
    values = np.random.default_rng(0).uniform(0.01, 50, size=(7, 131))
    together = function(values)
    assert together.shape == values.shape
    assert function(values[:, ::2]).tobytes() == together[:, ::2].tobytes()
    assert [float(function(value)) for value in values[3]] == together[3].tolist()
