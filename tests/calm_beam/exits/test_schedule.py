"""Thresholds at each step."""

import numpy as np
import pytest

from calm_beam.exits.rule import ExitRule
from calm_beam.exits.thresholds import scheduled_thresholds, threshold_factors
from tests.numpy_decoder import threshold_at

_DECAY = ExitRule(schedule="decay", tau=4.0)
_DECAY_T5X = ExitRule(schedule="decay_t5x", tau=4.0)


def test_a_constant_schedule_is_the_threshold() -> None:
    """Every step has the threshold itself, rounded to float32."""
    found = scheduled_thresholds(ExitRule(), (0.9, 0.1, 0.0), max_decode_length=5)
    assert found.dtype == np.float32
    assert found.shape == (5, 3)
    assert (found == np.array([0.9, 0.1, 0.0], np.float32)).all()


def test_eq_5_by_hand() -> None:
    """With N = 4 and tau = 4, Eq. 5 adds 0.1 e^-t to 0.9 of the threshold: e^-1 = .367879, e^-2 = .135335."""
    found = scheduled_thresholds(_DECAY, (0.8, 0.0), max_decode_length=4)
    np.testing.assert_allclose(found[:, 0], [0.82, 0.7567879, 0.7335335, 0.7249787], rtol=1e-6)
    np.testing.assert_allclose(found[:, 1], [0.1, 0.0367879, 0.0135335, 0.0049787], rtol=1e-5)


def test_the_released_formula_by_hand() -> None:
    """The T5X formula scales the falling term by the threshold as well, so that 0 stays 0."""
    found = scheduled_thresholds(_DECAY_T5X, (0.8, 0.0), max_decode_length=4)
    np.testing.assert_allclose(found[:, 0], [0.8, 0.7494303, 0.7308268, 0.7239830], rtol=1e-6)
    assert not found[:, 1].any()


def test_without_decay_eq_5_is_not_constant() -> None:
    """At tau = 0, Eq. 5 gives 0.9 lambda + 0.1 at every step; the released formula gives lambda."""
    thresholds = (1.0, 0.5, 0.0)
    eq_5 = scheduled_thresholds(ExitRule(schedule="decay", tau=0.0), thresholds, max_decode_length=6)
    assert (eq_5 == np.array([1.0, 0.55, 0.1], np.float32)).all()
    released = scheduled_thresholds(ExitRule(schedule="decay_t5x", tau=0.0), thresholds, max_decode_length=6)
    np.testing.assert_allclose(released, np.tile(np.array(thresholds), (6, 1)), rtol=1e-7)


@pytest.mark.parametrize("tau", [0.0, 0.3, 4.0, 50.0])
def test_the_released_formula_without_a_position_is_constant(tau: float) -> None:
    """At position 0, the only one that the released sampler passes, its formula is the threshold itself, to the bit."""
    thresholds = (1.0, 0.95, 0.7, 1 / 3, 0.05, 0.0)
    found = scheduled_thresholds(ExitRule(schedule="decay_t5x", tau=tau), thresholds, max_decode_length=9)[0]
    np.testing.assert_array_equal(found, scheduled_thresholds(ExitRule(), thresholds, max_decode_length=1)[0])


def test_threshold_one_falls_below_one() -> None:
    """At a nominal threshold of 1, Eq. 5 is 1 at the first token only."""
    column = scheduled_thresholds(_DECAY, (1.0,), max_decode_length=24)[:, 0]
    assert column[0] == 1
    assert (np.diff(column) < 0).all()
    assert column[-1] > 0.9


@pytest.mark.parametrize("rule", [ExitRule(), _DECAY, _DECAY_T5X, ExitRule(schedule="decay", tau=0.3)])
def test_every_step_equals_scalar_arithmetic(rule: ExitRule) -> None:
    """The table equals the formula worked out number by number, stays in [0, 1] and keeps the thresholds' order."""
    thresholds = (1.0, 0.95, 0.5, 0.05, 0.0)
    found = scheduled_thresholds(rule, thresholds, max_decode_length=17)
    expected = [[threshold_at(rule, each, step=t, max_decode_length=17) for each in thresholds] for t in range(17)]
    np.testing.assert_allclose(found, np.array(expected, np.float32), rtol=2e-7)
    assert found.min() >= 0
    assert found.max() <= 1
    assert (np.diff(found, axis=1) < 0).all()


def test_the_factors_make_up_the_table() -> None:
    """Scale and shift give the table, before clipping and rounding."""
    scale, shift = threshold_factors(_DECAY_T5X, 9)
    assert scale.dtype == shift.dtype == np.float64
    table = (scale[:, None] * np.array([0.7, 0.2]) + shift[:, None]).astype(np.float32)
    np.testing.assert_array_equal(table, scheduled_thresholds(_DECAY_T5X, (0.7, 0.2), max_decode_length=9))
