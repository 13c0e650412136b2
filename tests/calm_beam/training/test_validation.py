"""Measuring a model: losses by layer, and which of two models is better."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calm_beam.model import EarlyExitT5
from calm_beam.training.batches import choose_shapes, end_pairs
from calm_beam.training.step import variables
from calm_beam.training.validation import Validation, validation_losses
from tests.builders import build_arrays, build_config


@pytest.mark.parametrize("exit_heads", [False, True])
def test_losses_are_means_over_all_target_tokens(*, exit_heads: bool) -> None:
    """Over pairs of many lengths, each layer's loss is the mean over tokens of a pair-by-pair computation."""
    config = build_config(num_encoder_layers=1, num_decoder_layers=2, exit_heads=exit_heads)
    generator = np.random.default_rng(0)
    side = lambda: generator.integers(3, 64, size=generator.integers(1, 6)).tolist()  # noqa: E731
    pairs = end_pairs([(side(), side()) for _ in range(7)], config, max_input_length=8, max_target_length=8)
    parameters = {name: jnp.asarray(array) for name, array in build_arrays(config, 0).items()}
    model = EarlyExitT5(config)
    shapes = choose_shapes(pairs, batch_tokens=24, num_shapes=2)
    found = validation_losses(model, parameters, pairs=pairs, shapes=shapes)
    sums, tokens = np.zeros(2), 0
    apply = jax.jit(model.apply)
    for source, target in pairs:
        # Padded to one width, for a single compilation; padding comes after all that is read.
        sources, inputs = (np.pad(row, (0, 8 - len(row)))[None] for row in (source, [0, *target[:-1]]))
        logits = np.asarray(apply(variables(parameters), sources, inputs), np.float64)
        for layer, (position, token) in itertools.product(range(2), enumerate(target)):
            scores = logits[layer, 0, position]
            sums[layer] += np.log(np.exp(scores).sum()) - scores[token]
        tokens += len(target)
    np.testing.assert_allclose(found, sums / tokens, rtol=1e-5)


def test_better_means_a_lower_last_loss() -> None:
    """Without scores the last layer decides, whatever the others lose; equal is not better."""
    one, two = Validation(losses=(9.0, 1.0)), Validation(losses=(2.0, 1.5))
    assert one.is_better_than(two)
    assert not two.is_better_than(one)
    assert not one.is_better_than(one)


def test_better_means_a_higher_score() -> None:
    """With scores, losses do not matter; equal is not better."""
    one, two = Validation(losses=(1.0,), score=0.2), Validation(losses=(2.0,), score=0.3)
    assert two.is_better_than(one)
    assert not one.is_better_than(two)
    assert not two.is_better_than(Validation(losses=(3.0,), score=0.3))
