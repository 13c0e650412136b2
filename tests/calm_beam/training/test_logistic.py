"""The fit against a general-purpose minimiser, and on hard cases; F1 and AUC by hand and by brute force."""

import math

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

from calm_beam.training.train_classifier import (
    LogisticFit,
    Rows,
    area_under_curve,
    decision_losses,
    exit_quality,
    f1_not_exiting,
    fit_logistic,
)


def _rows(seed: int = 0, *, count: int = 400, width: int = 5) -> Rows:
    """Returns rows with features of different scales and means, and with correlations."""
    generator = np.random.default_rng(seed)
    mixed = generator.standard_normal((count, width)) @ generator.standard_normal((width, width))
    features = (mixed * 10.0 ** np.arange(-2, width - 2) + np.arange(width) * 30).astype(np.float32)
    log_odds = mixed @ generator.standard_normal(width) - 0.5
    labels = generator.random(count) < 1 / (1 + np.exp(-log_odds))
    return Rows(features=features, labels=labels, weights=generator.random(count))


def _loss(rows: Rows, kernel: np.ndarray, bias: float) -> float:
    margins = rows.features.astype(np.float64) @ kernel + bias
    return float(rows.weights @ decision_losses(margins, rows.labels) / rows.weights.sum())


def _fitted_loss(rows: Rows, fit: LogisticFit) -> float:
    return _loss(rows, fit.kernel, fit.bias)


def test_the_fit_is_the_minimum() -> None:
    """A quasi-Newton search from the fit finds nothing better, and the gradient there is nearly 0."""
    rows = _rows()
    fit = fit_logistic([rows])
    scale = rows.features.std(axis=0)
    objective = lambda theta: _loss(rows, theta[:-1] / scale, theta[-1])  # noqa: E731
    found = scipy.optimize.minimize(objective, np.append(fit.kernel * scale, fit.bias), method="BFGS")
    assert _fitted_loss(rows, fit) <= found.fun + 1e-6
    assert _fitted_loss(rows, fit) < 0.8 * _loss(rows, np.zeros(5), 0.0)
    assert fit.steps < 12


def test_parts_and_weights_do_not_matter_by_themselves() -> None:
    """Rows in three parts give the fit of one part; a row of weight 2 is two rows; weight 0 is none."""
    rows = _rows()
    whole = fit_logistic([rows])
    cut = [
        Rows(features=rows.features[one:two], labels=rows.labels[one:two], weights=rows.weights[one:two])
        for one, two in ((0, 7), (7, 200), (200, 400))
    ]
    np.testing.assert_allclose(fit_logistic(cut).kernel, whole.kernel, rtol=1e-6)
    counts = np.arange(400) % 3
    weighted = fit_logistic([Rows(features=rows.features, labels=rows.labels, weights=counts.astype(np.float64))])
    index = np.repeat(np.arange(400), counts)
    repeated = fit_logistic(
        [Rows(features=rows.features[index], labels=rows.labels[index], weights=np.ones(len(index)))]
    )
    np.testing.assert_allclose(weighted.kernel, repeated.kernel, rtol=1e-3)


def test_scales_and_shifts_of_features_do_not_matter() -> None:
    """Features that are rescaled and shifted, one by a million, give the same probabilities."""
    rows = _rows()
    fit = fit_logistic([rows])
    scale, shift = np.array([1e3, 1e-3, -2, 0.5, 1]), np.array([0, 5, -1, 0, 64])
    changed = Rows(
        features=(rows.features * scale + shift).astype(np.float32), labels=rows.labels, weights=rows.weights
    )
    other = fit_logistic([changed])
    margins = changed.features @ other.kernel + other.bias
    np.testing.assert_allclose(margins, rows.features @ fit.kernel + fit.bias, atol=1e-2)


def test_separable_classes_have_a_finite_fit() -> None:
    """Classes that a plane separates are classified with finite weights, in few steps."""
    features = np.array([[-2.0], [-1.0], [1.0], [2.0]], np.float32)
    fit = fit_logistic([Rows(features=features, labels=features[:, 0] > 0, weights=np.ones(4))])
    assert np.all(np.isfinite(fit.kernel))
    assert fit.steps < 50
    assert np.all((features @ fit.kernel + fit.bias > 5) == (features[:, 0] > 0))


@pytest.mark.parametrize("label", [True, False])
def test_one_class_alone_is_predicted(label: bool) -> None:
    """If all rows have one label, the fit predicts it for each, with finite weights; constant features do no harm."""
    features = np.array([[1.0, 3.0], [2.0, 3.0], [3.0, 3.0]], np.float32)
    fit = fit_logistic([Rows(features=features, labels=np.full(3, label), weights=np.ones(3))])
    assert np.all((features @ fit.kernel + fit.bias > 5) == label)
    assert np.all((features @ fit.kernel + fit.bias < -5) != label)
    assert np.isfinite(fit.bias)


def test_f1_by_hand() -> None:
    """Of four tokens predicted to stay, three should; one more should: precision 3/4, recall 3/4; 1/2 means exit."""
    scores = np.array([0.1, 0.2, 0.3, 0.49, 0.5, 0.6, 0.9])
    agrees = np.array([False, False, True, False, False, True, True])
    assert f1_not_exiting(scores, agrees) == pytest.approx(0.75)


def test_f1_with_unlike_precision_and_recall() -> None:
    """One of one prediction is right, and three were wanted: 2 * 1 * (1/3) / (1 + 1/3) = 1/2."""
    assert f1_not_exiting(np.array([0.1, 0.9, 0.9, 0.9]), np.array([False, False, False, True])) == pytest.approx(0.5)


def test_f1_at_its_ends() -> None:
    """All right is 1, all wrong 0, and no positives with none predicted is not a number."""
    agrees = np.array([True, False])
    assert f1_not_exiting(np.array([0.9, 0.1]), agrees) == 1
    assert f1_not_exiting(np.array([0.1, 0.9]), agrees) == 0
    assert math.isnan(f1_not_exiting(np.array([0.9]), np.array([True])))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_auc_agrees_with_all_pairs(rows: list[tuple[int, bool]]) -> None:
    """AUC is the share of (agreeing, other) pairs in the right order, ties counting half."""
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
