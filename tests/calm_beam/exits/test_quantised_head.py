"""Weights of 8 bits, in the order of native code."""

import jax
import jax.numpy as jnp
import numpy as np

from calm_beam.exits.certified_head import BLOCK, heads_of_form, quantised_head


def test_weights_are_packed() -> None:
    """Four columns of sixteen entries follow each other, plus 128; missing columns are 0."""
    weights = np.random.default_rng(0).integers(-126, 127, (BLOCK, 6)).astype(np.float32)
    # Each entry's scale is then 1.
    weights[:, 2] = 127
    found = np.asarray(quantised_head(jnp.asarray(weights)).quantised)
    assert found.shape == (4, 2, 16, 4)
    for entry, column in ((0, 0), (17, 3), (63, 5)):
        assert found[entry // 16, column // 4, entry % 16, column % 4] == int(weights[entry, column]) + 128
    assert (found[:, 1, :, 2:] == 128).all()


def test_heads_of_a_form() -> None:
    """There is one head per kernel, whichever of its axes is the vocabulary."""
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((32, 2048)), jnp.float32)
    one, other = heads_of_form("uint8", [(weights, 1), (weights.T, 0)])
    assert one is not None
    assert one.quantised.dtype == jnp.uint8
    assert one.quantised.shape == (128, 8, 16, 4)
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_exact_heads_certify_nothing() -> None:
    """Exact heads have an empty certificate for each kernel."""
    assert heads_of_form("exact", [(jnp.zeros((4, 8)), 1)] * 2) == [None, None]
