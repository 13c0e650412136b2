"""F1 and AUC by hand and by brute force."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.training.exit_quality import area_under_curve, exit_quality, f1_not_exiting


def test_f1_by_hand() -> None:
    """Of four tokens said to stay, three should; one more should have: precision 3/4, recall 3/4; 1/2 says exit."""
    scores = np.array([0.1, 0.2, 0.3, 0.49, 0.5, 0.6, 0.9])
    agrees = np.array([False, False, True, False, False, True, True])
    assert f1_not_exiting(scores, agrees) == pytest.approx(0.75)


def test_f1_with_unlike_precision_and_recall() -> None:
    """One of one prediction is right, and three were wanted: 2 * 1 * (1/3) / (1 + 1/3) = 1/2."""
    assert f1_not_exiting(np.array([0.1, 0.9, 0.9, 0.9]), np.array([False, False, False, True])) == pytest.approx(0.5)


def test_f1_at_its_ends() -> None:
    """All right is 1, all wrong 0, and nothing to find with nothing found is not a number."""
    agrees = np.array([True, False])
    assert f1_not_exiting(np.array([0.9, 0.1]), agrees) == 1
    assert f1_not_exiting(np.array([0.1, 0.9]), agrees) == 0
    assert math.isnan(f1_not_exiting(np.array([0.9]), np.array([True])))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_auc_agrees_with_all_pairs(rows: list[tuple[int, bool]]) -> None:
    """It is the share of (agreeing, other) pairs in the right order, ties counting half."""
    scores, agrees = np.array([row[0] for row in rows]) / 5, np.array([row[1] for row in rows])
    pairs = [(one, two) for one in scores[agrees] for two in scores[~agrees]]
    if not pairs:
        assert math.isnan(area_under_curve(scores, agrees))
    else:
        expected = sum(1.0 if one > two else 0.5 if one == two else 0.0 for one, two in pairs) / len(pairs)
        assert area_under_curve(scores, agrees) == pytest.approx(expected)


def test_each_layer_is_measured_alone() -> None:
    """Quality comes layer by layer, with the share of tokens that agree."""
    scores = np.array([[0.1, 0.9, 0.2, 0.8], [0.9, 0.9, 0.9, 0.9]])
    agrees = np.array([[False, True, False, False], [True, True, True, False]])
    first, second = exit_quality(scores, agrees)
    assert (first.agreeing, first.f1, first.auc) == (0.25, pytest.approx(0.8), 1.0)
    assert (second.agreeing, second.f1, second.auc) == (0.75, 0.0, 0.5)
