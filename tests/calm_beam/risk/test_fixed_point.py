"""The [0, 1] check with its messages, and fixed-point losses against exact rational arithmetic."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.losses import (
    LOSS_SCALE,
    loss_sum_upper,
    require_unit_interval,
    squares_upper,
    to_fixed_point,
    to_signed_fixed_point,
)

_LOSSES = st.floats(min_value=0.0, max_value=1.0)
_TOTALS = st.integers(min_value=-(2**63), max_value=2**63 - 1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.bool_])
def test_values_inside_come_back_as_float64(dtype: type) -> None:
    """Zero and one pass in every dtype, and come back as float64."""
    checked = require_unit_interval(np.array([0, 1], dtype=dtype), name="loss")
    assert checked.dtype == np.float64
    assert checked.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, -0.25, math.nextafter(1.0, 2.0), -5e-324, math.inf, -math.inf])
def test_first_value_outside_is_named_with_its_place(value: float) -> None:
    """The message holds the first value outside [0, 1] and its index, NaN included."""
    message = f"loss[1, 0] must be in [0, 1], got {value}. The bounds hold"
    with pytest.raises(ValueError, match=re.escape(message)):
        require_unit_interval([[0.5, 1.0], [value, -7.0]], name="loss")


def test_scalar_is_named_without_an_index() -> None:
    """A scalar has no index, so the message has its name only."""
    with pytest.raises(ValueError, match=re.escape("score must be in [0, 1], got 2.0.")):
        require_unit_interval(2, name="score")


@given(loss=_LOSSES)
def test_loss_is_rounded_up_to_the_next_multiple(loss: float) -> None:
    """The integer is the ceiling of loss * 2^32 in rational arithmetic: up, and by less than one unit."""
    assert int(to_fixed_point(loss)) == math.ceil(Fraction(loss) * LOSS_SCALE)


@given(loss=st.floats(min_value=-1.0, max_value=1.0))
def test_signed_loss_is_rounded_up_too(loss: float) -> None:
    """A negative loss is rounded towards 0, which is up; where both apply, both functions agree."""
    assert int(to_signed_fixed_point(loss)) == math.ceil(Fraction(loss) * LOSS_SCALE)
    if loss >= 0:
        assert to_signed_fixed_point(loss) == to_fixed_point(loss)


@given(units=st.one_of(st.integers(0, LOSS_SCALE), st.sampled_from([1, 2**16, LOSS_SCALE - 1, LOSS_SCALE])))
def test_squares_are_rounded_up(units: int) -> None:
    """The square in units of 2^-32 is the ceiling of the exact one, for a full loss as well."""
    assert int(squares_upper(np.array(units))) == math.ceil(Fraction(units, LOSS_SCALE) ** 2 * LOSS_SCALE)


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


@pytest.mark.parametrize("loss", [math.nan, -1.0000001, 1.0000001, -math.inf])
def test_signed_loss_outside_is_refused(loss: float) -> None:
    """A signed loss that is NaN or outside [-1, 1] is refused by value and place."""
    with pytest.raises(ValueError, match=re.escape(f"losses[1] must be in [-1, 1], got {loss}.")):
        to_signed_fixed_point([0.0, loss])


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
def test_ceiling_is_exact(total: int) -> None:
    """`ceil` of the float sum is that of the exact one, although the sum is rounded up."""
    assert math.ceil(float(loss_sum_upper(total))) == math.ceil(Fraction(total, LOSS_SCALE))


@pytest.mark.parametrize("total", [2**53 + 1, 2**62 + 1, 2**63 - 1, 2**63 - 512, 2**63 - 1024, 2**63 - 1025])
def test_upper_sum_where_floats_are_sparse(total: int) -> None:
    """Near the top of int64, where rounding to nearest may go down or to 2^63, the sum is still rounded up."""
    assert Fraction(float(loss_sum_upper(total))) >= Fraction(total, LOSS_SCALE)


def test_rounding_to_nearest_would_go_down() -> None:
    """A plain conversion is too small at 2^53 + 1 (the twin of the test above)."""
    total = 2**53 + 1
    assert int(np.float64(np.int64(total))) < total < int(float(loss_sum_upper(total)) * LOSS_SCALE)


def test_ceiling_of_a_rounded_mean_is_off_by_one() -> None:
    """N times the rounded mean has the wrong ceiling for some whole sums, which is why sums are carried."""
    pairs = [(n, k) for n in range(1, 200) for k in range(n + 1)]
    wrong = [(n, k) for n, k in pairs if math.ceil(n * (k / n)) != k]
    assert wrong
    assert all(math.ceil(float(loss_sum_upper(k * LOSS_SCALE))) == k for _, k in wrong)


def test_totals_are_checked() -> None:
    """Totals that are not integers, or beyond int64, are refused by value."""
    with pytest.raises(TypeError, match=re.escape("totals must be integers")):
        loss_sum_upper([0.5])
    with pytest.raises(ValueError, match=re.escape(f"totals must be in [-2^63, 2^63), got {2**63}.")):
        loss_sum_upper(np.array([2**63], dtype=np.uint64))
