"""Tests of the fixed-point losses against exact rational arithmetic."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.fixed_point import LOSS_SCALE, loss_sum_ceil, loss_sum_upper, to_fixed_point

_LOSSES = st.floats(min_value=0.0, max_value=1.0)
_TOTALS = st.integers(min_value=0, max_value=2**63 - 1)


@given(loss=_LOSSES)
def test_loss_is_rounded_up_to_the_next_multiple(loss: float) -> None:
    """The integer is the ceiling of loss * 2^32 in rational arithmetic: up, and by less than one unit."""
    assert int(to_fixed_point(loss)) == math.ceil(Fraction(loss) * LOSS_SCALE)


@given(units=st.integers(min_value=0, max_value=LOSS_SCALE))
def test_multiples_are_kept(units: int) -> None:
    """A loss that is a multiple of 2^-32 is represented exactly."""
    assert int(to_fixed_point(units / LOSS_SCALE)) == units


@given(losses=st.lists(_LOSSES, min_size=2, max_size=5))
def test_rounding_keeps_the_order(losses: list[float]) -> None:
    """A larger loss never becomes a smaller integer."""
    assert np.all(np.diff(to_fixed_point(sorted(losses))) >= 0)


def test_edges() -> None:
    """0 stays 0, the least positive float becomes one unit, 1 becomes the scale; -0.0 is 0."""
    assert to_fixed_point([0.0, -0.0, 5e-324, 1.0]).tolist() == [0, 0, 1, LOSS_SCALE]


def test_shape_and_dtype() -> None:
    """The shape is kept and the dtype is int64, for no losses as well."""
    assert to_fixed_point(np.zeros((2, 0, 3))).shape == (2, 0, 3)
    assert to_fixed_point([0.5]).dtype == np.int64


@pytest.mark.parametrize("loss", [math.nan, -1e-9, 1.0000001, math.inf])
def test_loss_outside_is_refused(loss: float) -> None:
    """A loss that is NaN or outside [0, 1] is refused by value and place."""
    with pytest.raises(ValueError, match=re.escape(f"losses[1] must be in [0, 1], got {loss}.")):
        to_fixed_point([0.0, loss])


@given(total=_TOTALS)
def test_upper_sum_is_the_least_float_not_below(total: int) -> None:
    """The float sum is at least the exact one, and the next float down is below it."""
    upper = float(loss_sum_upper(total))
    exact = Fraction(total, LOSS_SCALE)
    assert Fraction(upper) >= exact
    assert total == 0 or Fraction(math.nextafter(upper, -math.inf)) < exact


@given(total=st.integers(min_value=0, max_value=2**53))
def test_upper_sum_is_exact_for_two_million_examples(total: int) -> None:
    """Up to 2^53 units the float sum is the exact sum."""
    assert Fraction(float(loss_sum_upper(total))) == Fraction(total, LOSS_SCALE)


@given(total=_TOTALS)
def test_ceilings_agree(total: int) -> None:
    """The integer ceiling is exact, and so is `ceil` of the float sum, rounded up as it is."""
    exact = math.ceil(Fraction(total, LOSS_SCALE))
    assert int(loss_sum_ceil(total)) == exact
    assert math.ceil(float(loss_sum_upper(total))) == exact


@pytest.mark.parametrize("total", [2**53 + 1, 2**62 + 1, 2**63 - 1, 2**63 - 512, 2**63 - 1024, 2**63 - 1025])
def test_upper_sum_where_floats_are_sparse(total: int) -> None:
    """Near the top of int64, where rounding to nearest may go down or to 2^63, the sum is still rounded up."""
    assert Fraction(float(loss_sum_upper(total))) >= Fraction(total, LOSS_SCALE)
    assert int(loss_sum_ceil(total)) == math.ceil(Fraction(total, LOSS_SCALE))


def test_rounding_to_nearest_would_go_down() -> None:
    """The twin of the test above: a plain conversion is too small at 2^53 + 1."""
    total = 2**53 + 1
    assert int(np.float64(np.int64(total))) < total < int(float(loss_sum_upper(total)) * LOSS_SCALE)


def test_ceiling_of_a_rounded_mean_is_off_by_one() -> None:
    """N times the rounded mean has the wrong ceiling for some whole sums, which is why sums are carried."""
    pairs = [(n, k) for n in range(1, 200) for k in range(n + 1)]
    wrong = [(n, k) for n, k in pairs if math.ceil(n * (k / n)) != k]
    assert wrong
    assert all(int(loss_sum_ceil(k * LOSS_SCALE)) == k for _, k in wrong)


@pytest.mark.parametrize("convert", [loss_sum_upper, loss_sum_ceil])
def test_totals_are_checked(convert: object) -> None:
    """Totals that are no integers or beyond int64 are refused by value."""
    assert callable(convert)
    with pytest.raises(TypeError, match=re.escape("totals must be integers")):
        convert([0.5])
    with pytest.raises(ValueError, match=re.escape(f"totals must be in [-2^63, 2^63), got {2**63}.")):
        convert(np.array([2**63], dtype=np.uint64))
