"""The cheap bits of dropout are good enough for dropout."""

import jax
import numpy as np
import pytest

from calm_beam.training.dropout_key import dropout_key


def test_masks_have_the_right_rate_everywhere() -> None:
    """Over many keys, every position is kept at the asked rate, within 5 standard deviations."""
    keys = jax.random.split(dropout_key(0), 2000)
    kept = np.asarray(jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (8, 16)))(keys))
    deviation = np.sqrt(0.09 / 2000)
    assert np.abs(kept.mean(axis=0) - 0.9).max() < 5 * deviation
    assert abs(kept.mean() - 0.9) < 5 * deviation / np.sqrt(128)


def test_draws_of_different_keys_are_uncorrelated() -> None:
    """Draws of neighbouring steps, and of the parts of a split, do not resemble each other, nor shifted selves."""
    key = dropout_key(5)
    keys = [key, *(jax.random.fold_in(key, step) for step in range(4)), *jax.random.split(key, 3)]
    draws = np.stack([np.asarray(jax.random.uniform(one, (4096,))) for one in keys])
    draws = np.concatenate([draws, np.roll(draws[:2], 1, axis=1)])
    correlations = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlations).max() < 5 / np.sqrt(4096)


def test_seeds_decide_the_bits() -> None:
    """A seed gives the same bits again, another seed others."""
    draw = lambda seed: np.asarray(jax.random.bits(dropout_key(seed), (64,)))  # noqa: E731
    np.testing.assert_array_equal(draw(1), draw(1))
    assert np.mean(draw(1) == draw(2)) < 0.1


def test_other_widths_are_refused() -> None:
    """Only 32 bits at a time are drawn."""
    with pytest.raises(NotImplementedError, match="got bit_width=8"):
        jax.random.bits(dropout_key(0), (4,), dtype=np.uint8)
