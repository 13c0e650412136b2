"""Tests of the [0, 1] check: what passes, and what the message says of the rest."""

import math
import re

import numpy as np
import pytest

from calm_beam.risk.unit_interval import require_unit_interval


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
    """A scalar has no place, so the message gives its name alone."""
    with pytest.raises(ValueError, match=re.escape("score must be in [0, 1], got 2.0.")):
        require_unit_interval(2, name="score")
