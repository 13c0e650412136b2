"""The prediction heads of both architectures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from calm_beam.model.heads import exit_probability, head_logits
from calm_beam.precision import FLOAT32, Precision


def test_one_logit_through_a_sigmoid_two_through_a_softmax() -> None:
    """Two logits whose difference is the one logit give the same probability."""
    states = np.random.default_rng(0).normal(size=(4, 3, 5)).astype(np.float32)
    kernel = np.arange(5, dtype=np.float32)[:, None] - 2

    def probability(kernel: np.ndarray, bias: np.ndarray) -> jax.Array:
        classifier = nn.Dense(kernel.shape[1], precision="highest")
        return exit_probability(classifier.bind({"params": {"kernel": kernel, "bias": bias}}), jnp.asarray(states))

    one = probability(kernel, np.array([0.5], np.float32))
    two = probability(np.concatenate([-kernel, kernel], axis=1) / 2, np.array([-0.25, 0.25], np.float32))
    assert one.shape == (4, 3)
    np.testing.assert_allclose(one, 1 / (1 + np.exp(-(states @ kernel[:, 0] + 0.5))), rtol=0, atol=1e-5)
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", [FLOAT32, Precision(dtype="bfloat16")], ids=str)
def test_logits_are_float32_whichever_way_the_weights_lie(precision: Precision) -> None:
    """Logits are float32 for either orientation of the weights: sums of bfloat16 products are not rounded."""
    inputs, weights = (
        jnp.asarray(np.random.default_rng(seed).normal(size=shape), precision.dtype)
        for seed, shape in ((0, (3, 8)), (1, (8, 11)))
    )
    logits = head_logits(inputs, (weights, 1), precision)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, head_logits(inputs, (weights.T, 0), precision), rtol=0, atol=1e-5)
    exact = np.asarray(inputs, np.float64) @ np.asarray(weights, np.float64)
    np.testing.assert_allclose(logits, exact, rtol=0, atol=1e-5)
