"""The losses on numbers that can be checked by hand."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.risk.losses import relu_risk_loss, signed_risk_loss, textual_loss

_SCORES = st.floats(min_value=0.0, max_value=1.0)


def test_textual_loss_is_one_minus_similarity() -> None:
    """The loss is 0 for equal outputs, 1 for unlike ones, and keeps the shape."""
    assert textual_loss([1.0, 0.75, 0.0]).tolist() == [0.0, 0.25, 1.0]
    assert textual_loss(np.ones((2, 3))).shape == (2, 3)


def test_relu_loss_counts_only_what_is_lost() -> None:
    """Scores below the full model's cost the difference; equal and better ones cost nothing."""
    loss = relu_risk_loss(early_score=[0.25, 0.5, 0.75], full_score=0.5)
    assert loss.tolist() == [0.25, 0.0, 0.0]


def test_relu_loss_takes_one_full_score_per_row() -> None:
    """The full model's score broadcasts over thresholds, also for several rows at once."""
    loss = relu_risk_loss(early_score=[[0.5, 0.25], [0.0, 1.0]], full_score=[[0.5], [1.0]])
    assert loss.tolist() == [[0.0, 0.25], [1.0, 0.0]]


@given(early=_SCORES, full=_SCORES)
def test_losses_stay_in_the_unit_interval(early: float, full: float) -> None:
    """The losses lie in [0, 1] for any scores there, the signed one in [-1, 1]."""
    assert 0 <= float(textual_loss(early)) <= 1
    assert 0 <= float(relu_risk_loss(early_score=early, full_score=full)) <= 1
    assert -1 <= float(signed_risk_loss(early_score=early, full_score=full)) <= 1


@given(early=_SCORES, full=_SCORES)
def test_signed_loss_is_the_difference_of_risks(early: float, full: float) -> None:
    """The loss equals R_early - R_full with R = 1 - m, up to the rounding of the latter."""
    loss = float(signed_risk_loss(early_score=early, full_score=full))
    assert loss == pytest.approx((1 - early) - (1 - full), abs=1e-15)


@given(early=_SCORES, full=_SCORES)
def test_relu_loss_is_what_is_positive_of_the_signed_one(early: float, full: float) -> None:
    """Swapping the two outputs gives the other half of the signed loss."""
    lost = float(relu_risk_loss(early_score=early, full_score=full))
    gained = float(relu_risk_loss(early_score=full, full_score=early))
    assert lost - gained == float(signed_risk_loss(early_score=early, full_score=full))


def test_difference_of_scores_is_more_exact() -> None:
    """A small difference between small scores survives, where the difference of risks loses it."""
    early, full = 1e-18, 3e-18
    assert float(relu_risk_loss(early_score=early, full_score=full)) == full - early
    assert (1 - early) - (1 - full) == 0.0


@pytest.mark.parametrize("value", [1.5, -0.5, float("nan")])
def test_scores_outside_are_refused_by_name(value: float) -> None:
    """A score outside [0, 1] is refused by name, before the maximum can hide it."""
    message = f"[0] must be in [0, 1], got {value}."
    with pytest.raises(ValueError, match=re.escape("similarity" + message)):
        textual_loss([value])
    with pytest.raises(ValueError, match=re.escape("early_score" + message)):
        relu_risk_loss(early_score=[value], full_score=0.5)
    with pytest.raises(ValueError, match=re.escape("full_score" + message)):
        relu_risk_loss(early_score=[0.5], full_score=[value])
