"""The entropy measure."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from calm_beam.exits.measures.built_in import entropy_confidence

pytestmark = pytest.mark.usefixtures("strict_promotion")


@pytest.mark.parametrize("scale", [0.01, 1, 30])
def test_it_is_one_less_the_relative_entropy(scale: float) -> None:
    """The measure is scipy's relative entropy in float64, subtracted from 1."""
    logits = np.random.default_rng(0).standard_normal((20, 97)) * scale
    entropy = scipy.stats.entropy(scipy.special.softmax(logits, axis=-1), axis=-1)
    found = entropy_confidence(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(found, 1 - entropy / np.log(97), rtol=0, atol=2e-6)


def test_its_ends() -> None:
    """Equal logits give 0, a certain token 1, two equal ones of many a value between; logits may be -inf."""
    logits = np.full((4, 64), -np.inf, np.float32)
    logits[0] = 3
    logits[1, 5] = 0
    logits[2, :2] = 7
    logits[3] = [100.0, *[0.0] * 63]
    found = np.asarray(entropy_confidence(jnp.asarray(logits)))
    np.testing.assert_allclose(found, [0, 1, 1 - np.log(2) / np.log(64), 1], rtol=0, atol=1e-6)
