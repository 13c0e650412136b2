"""The classifier's losses against their definitions."""

import itertools

import numpy as np
import pytest

from calm_beam.training.train_classifier import (
    balanced_weights,
    decision_losses,
    geometric_weights,
    independent_weights,
)

# Five layers below the last, seven tokens: always agreeing, never, from the third layer on, and in and out.
_AGREES = np.array(
    [
        [1, 0, 0, 1, 0, 0, 1],
        [1, 0, 0, 0, 0, 1, 1],
        [1, 0, 1, 1, 0, 0, 1],
        [1, 0, 1, 0, 0, 1, 1],
        [1, 0, 1, 1, 1, 1, 1],
    ],
    bool,
)
_MARGINS = np.random.default_rng(0).normal(scale=3, size=_AGREES.shape)
_EXITS = 1 / (1 + np.exp(-_MARGINS))


def _loss(weights: np.ndarray) -> float:
    return float(np.sum(weights * decision_losses(_MARGINS, _AGREES)))


def test_independent_loss_agrees_with_a_loop() -> None:
    """The independent loss is the average over layers of each layer's binary cross-entropy."""
    expected = 0.0
    for layer, token in itertools.product(range(5), range(7)):
        chance = _EXITS[layer, token] if _AGREES[layer, token] else 1 - _EXITS[layer, token]
        expected -= np.log(chance) / 5
    assert _loss(independent_weights(_AGREES)) == pytest.approx(expected)


def test_balanced_loss_agrees_with_a_loop() -> None:
    """Within each layer, a positive weighs 1 - the share of positives, a negative 1 - the share of negatives."""
    expected = 0.0
    for layer in range(5):
        positives = sum(_AGREES[layer]) / 7
        for token in range(7):
            if _AGREES[layer, token]:
                expected -= (1 - positives) * np.log(_EXITS[layer, token]) / 5
            else:
                expected -= (1 - (1 - positives)) * np.log(1 - _EXITS[layer, token]) / 5
    assert _loss(balanced_weights(_AGREES)) == pytest.approx(expected)


def test_balanced_classes_weigh_the_same() -> None:
    """In every layer, all positives together weigh as much as all negatives; a layer of one class weighs nothing."""
    weights = balanced_weights(_AGREES)
    np.testing.assert_allclose((weights * _AGREES).sum(axis=1), (weights * ~_AGREES).sum(axis=1))
    assert not balanced_weights(np.ones((2, 3), bool)).any()


def test_geometric_loss_agrees_with_a_loop() -> None:
    """The loss is minus the log of the product of "don't exit" below the first agreeing layer and "exit" at it."""
    expected = 0.0
    for token in range(7):
        chance = 1.0
        for layer in range(5):
            if _AGREES[layer, token]:
                chance *= _EXITS[layer, token]
                break
            chance *= 1 - _EXITS[layer, token]
        expected -= np.log(chance)
    assert _loss(geometric_weights(_AGREES)) == pytest.approx(expected)


def test_layers_above_the_first_exit_do_not_count() -> None:
    """Changed scores above the first exit leave the geometric loss, and change the independent one."""
    above = np.array([[0, 0, 0, 1, 0, 0, 1]] + [[1, 0, 0, 1, 0, 0, 1]] * 4, bool)
    above[0, 3] = above[0, 6] = False
    changed = np.where(above, -_MARGINS, _MARGINS)
    losses = decision_losses(changed, _AGREES)
    assert np.sum(geometric_weights(_AGREES) * losses) == pytest.approx(_loss(geometric_weights(_AGREES)))
    assert np.sum(independent_weights(_AGREES) * losses) != pytest.approx(_loss(independent_weights(_AGREES)))


def test_sure_decisions_do_not_overflow() -> None:
    """A margin of a thousand costs a thousand if it is wrong, and nothing if it is right."""
    losses = decision_losses(np.array([1000.0, 1000.0, -1000.0]), np.array([True, False, False]))
    np.testing.assert_array_equal(losses, [0, 1000, 0])
